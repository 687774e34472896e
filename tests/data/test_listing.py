"""What is in a folder, kept in a few buffers: the same as a walk with strings, small, shared, known again."""

import hashlib
import os
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch

from adasim.data import FolderImages, describe, open_images
from adasim.data.decode import EXTENSIONS, hash_file
from adasim.data.listing import Listing, Names, refresh, scan

ODD_NAMES = [
    *b"a.png|B.PNG|c.JpEg|two words.gif|new\nline.bmp|no-image.txt|none|x.png.bak".split(b"|"),
    *"\u00e9.png|\uffff.png|\U00010000.png|.hidden.png|dotted.name.webp|Kelvin.\u212a".encode().split(b"|"),
    *(b"\xff\xfe.png", b"z.\xc9"),
]


def write(path: bytes, size: int) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(bytes([size % 251]) * size)
    os.utime(path, ns=(10**18 + size, 10**18 + size))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = os.fsencode(tmp_path / "tree")
    for c, folder in enumerate([b"dog", b"cat", b"cat/deep/er", b"\xff\x01", b".git", b"cat.png"]):
        for i, name in enumerate(ODD_NAMES):
            write(b"/".join([root, folder, name]), 20 * c + i)
    os.mkdir(root + b"/empty")
    return tmp_path / "tree"


def walked(folder: bytes, prefix: bytes = b"") -> list[bytes]:
    """The same walk, a few lines long: names of images first, then each folder in it; in the order of bytes."""
    names = sorted(name for name in os.listdir(folder) if not name.startswith(b"."))
    folders = [name for name in names if os.path.isdir(folder + b"/" + name)]
    endings = {os.fsencode(ending) for ending in EXTENSIONS}
    found = [
        prefix + name
        for name in names
        if name not in folders and b"." in name and name.rpartition(b".")[2].lower() in endings
    ]
    for name in folders:
        found += walked(folder + b"/" + name, prefix + name + b"/")
    return found


def test_a_listing_is_what_a_walk_with_strings_finds(tree: Path) -> None:
    root = os.fsencode(tree)
    paths = walked(root)
    assert len(paths) == 5 * 10
    images = FolderImages(tree)
    states = [os.stat(root + b"/" + path) for path in paths]
    lines = [os.fsdecode(path) + f" {state.st_size}" for path, state in zip(paths, states, strict=True)]
    assert images.listing() == lines
    assert images.times() == [state.st_mtime_ns for state in states]
    assert [os.fsencode(images.where(i)) for i in range(len(paths))] == [root + b"/" + path for path in paths]
    tops = sorted({path.partition(b"/")[0] for path in paths})
    assert images.classes == [os.fsdecode(top) for top in tops]
    assert images.labels is not None
    assert images.labels.tolist() == [tops.index(path.partition(b"/")[0]) for path in paths]
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogateescape") + b"\n")
    digest.update(hashlib.sha256(images.labels.numpy().tobytes()).hexdigest().encode())
    for path in paths:  # fewer than 64: all of them
        digest.update(hash_file(os.fsdecode(root + b"/" + path), whole=False).encode())
    assert images.fingerprint() == digest.hexdigest()


def test_folders_named_like_images_are_told_of_where_no_image_is_in_them(tmp_path: Path) -> None:
    for name in ("cat/a.png", "full.jpg/b.png", "outer.gif/inner/c.png"):
        write(os.fsencode(tmp_path / name), 9)
    for name in ("cat/x.jpg", "y.PNG/z.png", "plain"):
        (tmp_path / name).mkdir(parents=True)
    images = open_images(str(tmp_path))
    assert len(images) == 3
    assert describe(images).endswith("Left out: 3 folders named like images.")


# Known again


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that were changed just now count as having been left alone for long."""
    monkeypatch.setattr(sys.modules["adasim.data.listing"], "_SETTLED_NS", -(10**18))


def same(a: Listing | None, b: Listing) -> bool:
    return a is not None and a.same_files(b) and torch.equal(a.states, b.states) and a.left_out == b.left_out


@pytest.mark.usefixtures("settled")
def test_a_folder_that_nobody_touched_is_known_again(tree: Path) -> None:
    (tree / "cat" / "dangling.png").symlink_to(tree / "nowhere")
    before = scan(os.fsencode(tree))
    assert same(refresh(before, os.fsencode(tree)), before)


@pytest.mark.usefixtures("settled")
def test_files_that_were_written_in_place_have_their_new_sizes_and_times(tree: Path) -> None:
    before = scan(os.fsencode(tree))
    with open(tree / "cat" / "a.png", "ab") as file:
        file.write(b"more")
    os.utime(tree / "dog" / "a.png")
    now = refresh(before, os.fsencode(tree))
    assert same(now, scan(os.fsencode(tree)))
    assert now is not None
    assert int((now.states[:, 0] != before.states[:, 0]).sum()) == 1
    assert int((now.states[:, 1] != before.states[:, 1]).sum()) == 2


CHANGES: dict[str, Callable[[Path], object]] = {
    "added": lambda root: (root / "dog/new.png").write_bytes(b"?"),
    "added beside": lambda root: (root / "new.txt").write_bytes(b"?"),
    "removed": lambda root: (root / "cat/deep/er/a.png").unlink(),
    "renamed": lambda root: (root / "dog/a.png").rename(root / "dog/b.png"),
    "moved": lambda root: (root / "dog/a.png").rename(root / "cat/moved.png"),
    "replaced": lambda root: (root / "dog/a.png").replace(root / "dog/B.PNG"),
    "a folder more": lambda root: (root / "empty/more").mkdir(),
    "a folder less": lambda root: (root / "empty").rmdir(),
    "another folder of its name": lambda root: (root / "dog").rename(root / "empty"),
}


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_with_other_names_in_it_is_read_again(tree: Path, change: str) -> None:
    before = scan(os.fsencode(tree))
    CHANGES[change](tree)
    assert refresh(before, os.fsencode(tree)) is None


@pytest.mark.usefixtures("settled")
def test_a_copy_is_read_again(tree: Path, tmp_path: Path) -> None:
    before = scan(os.fsencode(tree))
    tree.rename(tmp_path / "aside")
    assert refresh(before, os.fsencode(tree)) is None
    os.mkdir(tree)
    assert refresh(before, os.fsencode(tree)) is None


def test_a_folder_that_was_changed_just_before_it_was_read_is_read_again(tree: Path) -> None:
    assert refresh(scan(os.fsencode(tree)), os.fsencode(tree)) is None


# As a file


def test_a_listing_survives_its_file(tree: Path) -> None:
    before = scan(os.fsencode(tree))
    again = Listing.from_bytes(before.to_bytes("mine"), "mine")
    assert same(again, before)
    assert again is not None
    assert again.began == before.began
    assert np.array_equal(again.marks, before.marks)
    assert [again.path(i) for i in range(len(again))] == [before.path(i) for i in range(len(before))]


def test_a_listing_of_other_data_and_a_damaged_one_are_none(tree: Path) -> None:
    before = scan(os.fsencode(tree))
    data = before.to_bytes("mine")
    assert Listing.from_bytes(data, "another's") is None
    for cut in range(0, len(data), 97):
        assert Listing.from_bytes(data[:cut], "mine") is None
    for place in range(0, len(data), 41):
        damaged = data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]
        found = Listing.from_bytes(damaged, "mine")
        assert found is None or same(found, before)  # not all of a zip file's own bytes matter


# Small, and shared


def made_up(count: int) -> FolderImages:
    """A folder that need not be there, with a hundred classes."""
    per = count // 100
    folders = b"\0" + b"".join(b"n%08d/\0" % c for c in range(100))
    names = b"".join(b"n%08d_%05d.JPEG\0" % (c, i) for c in range(100) for i in range(per))
    counts = np.array([0] + [per] * 100)
    states = torch.arange(3 * count).view(count, 3)
    marks = np.zeros((101, 2), np.int64)
    return FolderImages("/nowhere", listing=Listing(Names(folders), marks, counts, Names(names), states, 0))


def test_a_spawned_worker_receives_as_little_of_many_images_as_of_few() -> None:
    few, many = (len(ForkingPickler.dumps(made_up(count))) for count in (200, 200_000))
    assert many < few + 100


def private_dirty() -> int:
    """Bytes that this process does not share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty:"))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_a_forked_worker_copies_nothing_of_the_listing() -> None:
    images = made_up(400_000)
    held = images.files.names.text.nbytes + images.files.states.nbytes
    assert held > 17e6
    receive, send = os.pipe()
    if not (pid := os.fork()):
        images.where(0)
        before = private_dirty()
        for i in range(0, 400_000, 20):
            images.where(i)
        os.write(send, str(private_dirty() - before).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    copied = int(os.read(receive, 100))
    os.close(receive)
    os.close(send)
    assert copied < 1e6
