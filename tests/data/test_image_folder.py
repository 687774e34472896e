"""What is found in a folder, what is left out, and that both are said; the listing: small, shared, kept as a file."""

import hashlib
import io
import os
import socket
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch

from adasim.data import FolderImages, describe, image_folder, open_images
from adasim.data.image_folder import Listing, scan
from adasim.data.sources import file_name
from adasim.util.errors import MissingSplitError, UserError
from adasim.util.rgb import EXTENSIONS, hash_file

from .pictures import labels_of, save_image, smooth

WAY_OUT = "; if they are others, put their folders side by side."


def fill(root: Path, **counts: int) -> Path:
    """fill(root, train__cat=3): three pictures in train/cat."""
    for place, count in counts.items():
        for i in range(count):
            save_image(smooth(1, 8, 8, seed=i)[0], root / place.replace("__", "/") / f"{i}.png")
    return root


@pytest.mark.parametrize(
    ("files", "classes", "labels", "note"),
    [
        (["cat/1", "cat/kittens/2", "dog/3"], ["cat", "dog"], [0, 0, 1], ""),
        (["cat/images/1", "dog/images/2"], ["cat", "dog"], [0, 1], ""),
        (
            ["a/abbey/1", "a/abbey/deep/2", "a/apartment/outdoor/3", "b/bar/4", "z/zoo/outdoor/5"],
            ["a/abbey", "a/apartment/outdoor", "b/bar", "z/zoo/outdoor"],
            [0, 0, 1, 2, 3],
            " The classes are the folders that hold images, such as a/abbey.",
        ),
        (
            ["all/cat/1", "all/dog/2"],
            ["all/cat", "all/dog"],
            [0, 1],
            " The classes are the folders that hold images, such as all/cat.",
        ),
        (
            ["cat/1", "dog/husky/2", "dog/poodle/3"],
            ["cat", "dog"],
            [0, 1, 1],
            " Warning: cat holds images itself, dog only in folders below it. The classes are taken to be cat, dog"
            + WAY_OUT,
        ),
        (
            ["art/cat/1", "art/dog/2", "photo/dog/3"],
            ["art", "photo"],
            [0, 0, 1],
            " Warning: there is a folder dog in each of art, photo. The classes are taken to be art, photo"
            + WAY_OUT,
        ),
    ],
    ids=["plain", "one folder in each", "SUN397", "one folder around all", "two levels", "repeated names"],
)
def test_the_classes_of_nested_folders_are_those_that_hold_images_and_a_doubt_is_said(
    tmp_path: Path, files: list[str], classes: list[str], labels: list[int], note: str
) -> None:
    for name in files:
        save_image(smooth(1, 8, 8)[0], tmp_path / f"{name}.png")
    data = open_images(str(tmp_path))
    assert data.classes == classes
    assert labels_of(data) == labels
    assert describe(data).endswith(f" from {tmp_path}.{note}")


def test_images_classes_and_what_was_left_out_are_told(tmp_path: Path) -> None:
    fill(tmp_path, cat=2, dog=1)
    for i in range(9):
        (tmp_path / "cat" / f"{i}.CR2").write_bytes(b"?")
    for name in ("notes.txt", "README", ".DS_Store"):
        (tmp_path / name).write_text("?")
    assert describe(open_images(str(tmp_path))) == (
        f"3 images in 2 classes (cat, dog) from {tmp_path}. Left out: 9 .cr2 (convert them to JPEG or PNG), "
        f"1 file without an ending, 1 .txt."
    )


@pytest.mark.parametrize("test_name", ["test", "val"])
def test_a_divided_folder_is_read_by_split_and_tells_what_it_does_not_use_and_how_to_use_it(
    tmp_path: Path, test_name: str
) -> None:
    counts = {"train__cat": 3, "train__dog": 2, f"{test_name}__dog": 14, "holiday__train": 20, ".": 10}
    root = fill(tmp_path / "photos", **counts)
    said = describe(open_images(str(root)))
    assert said.startswith(f"5 images in 2 classes (cat, dog) from {root}/train (its split train; ")
    assert f"20 in holiday/, 14 in {test_name}/, 10 directly in it are not among them" in said
    assert "put a link" in said
    test = open_images(str(root), split="test")
    assert (len(test), test.split, test.classes) == (14, test_name, ["dog"])
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "photos").symlink_to(root)
    assert len(open_images(str(tmp_path / "all"))) == 49  # that way works
    with pytest.raises(MissingSplitError, match="no test images"):
        open_images(str(root / "train"), split="test")


def test_images_beside_folders_have_no_labels(tmp_path: Path) -> None:
    images = open_images(str(fill(tmp_path, **{".": 2, "more": 1})))
    assert describe(images) == f"3 images without labels from {tmp_path}."
    assert images.labels is None
    stray = open_images(str(fill(tmp_path / "stray", **{".": 1, "a": 2, "b": 1})))
    assert labels_of(stray) == [-1, 0, 0, 1]  # most lie in folders
    assert "4 images in 2 classes (a, b), 1 of them without a label," in describe(stray)


def test_heic_files_that_cannot_be_read_are_counted_and_the_command_that_reads_them_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_folder, "EXTENSIONS", {"png"})  # as without pillow-heif
    for i in range(9):
        (tmp_path / f"{i}.HEIC").write_bytes(b"?")
    with pytest.raises(UserError, match=r"found 9 \.heic \(to read them: pip install pillow-heif\)\.$"):
        open_images(str(tmp_path))
    fill(tmp_path, **{".": 2})
    said = describe(open_images(str(tmp_path)))
    assert said.endswith("Left out: 9 .heic (to read them: pip install pillow-heif).")


def test_the_folder_that_one_is_in_is_told_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fill(tmp_path / "photos", train__cat=2, test__cat=1)
    monkeypatch.chdir(root / "train")
    for source in (".", "./", "cat/.."):
        images = open_images(source)
        assert describe(images) == f"2 images in 1 class (cat) from {root / 'train'}."
        assert images.name == "train"
        assert file_name(images, 0) == "cat/0.png"
    assert open_images("..").name == "photos"


def test_links_are_followed_and_loops_pipes_and_sockets_left_out_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "store", a=2, b=3)
    root = fill(tmp_path / "view", c=1)
    (root / "x").symlink_to(tmp_path / "store" / "a")
    (root / "y").symlink_to(tmp_path / "store" / "a")
    (root / "c" / "1.png").symlink_to(tmp_path / "store" / "b" / "0.png")
    (root / "c" / "up").symlink_to(root)
    (root / "c" / "here").symlink_to(root / "c")
    (root / "c" / "itself").symlink_to(root / "c" / "itself")
    os.mkfifo(root / "c" / "x.jpg")
    monkeypatch.chdir(root)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("c/y.png")
        data = open_images(str(root))
    assert len(data) == 6
    assert data.classes == ["c", "x", "y"]
    assert "2 links that lead back to a folder above them, 2 pipes, sockets or devices" in describe(data)


def test_a_class_whose_name_is_not_printable_can_be_printed(tmp_path: Path) -> None:
    root = os.fsencode(tmp_path) + b"/\xff\x1b[31m"
    os.mkdir(root)
    save_image(smooth(1, 8, 8)[0], tmp_path / "x.png")
    os.rename(tmp_path / "x.png", root + b"/x.png")
    said = describe(open_images(str(tmp_path)))
    said.encode()
    assert "\x1b" not in said
    assert r"(\xff\x1b[31m)" in said


# The listing

ODD_NAMES = [
    *b"a.png|B.PNG|c.JpEg|two words.gif|new\nline.bmp|no-image.txt|none|x.png.bak".split(b"|"),
    *"\u00e9.png|\uffff.png|\U00010000.png|.hidden.png|dotted.name.webp|Kelvin.\u212a".encode().split(b"|"),
    *(b"\xff\xfe.png", b"z.\xc9"),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = os.fsencode(tmp_path / "tree")
    for c, name in enumerate([b"dog", b"cat", b"cat/deep/er", b"\xff\x01", b".git", b"cat.png"]):
        os.makedirs(root + b"/" + name, exist_ok=True)
        for i, file in enumerate(ODD_NAMES):
            with open(b"/".join([root, name, file]), "wb") as opened:
                opened.write(bytes([20 * c + i]) * (20 * c + i))
    os.mkdir(root + b"/empty")
    return tmp_path / "tree"


def walked(place: str, prefix: str = "") -> list[str]:
    """The same walk, a few lines long: names of images first, then each folder in it; sorted."""
    names = sorted(name for name in os.listdir(place) if not name.startswith("."))
    folders = [name for name in names if os.path.isdir(f"{place}/{name}")]
    paths = [
        prefix + name
        for name in names
        if name not in folders and "." in name and name.rpartition(".")[2].lower() in EXTENSIONS
    ]
    for name in folders:
        paths += walked(f"{place}/{name}", f"{prefix}{name}/")
    return paths


def test_a_listing_is_what_a_walk_with_strings_finds(tree: Path) -> None:
    paths = walked(str(tree))
    assert len(paths) == 5 * 10
    images = FolderImages(tree)
    states = [os.stat(tree / path) for path in paths]
    lines = [f"{path} {state.st_size}" for path, state in zip(paths, states, strict=True)]
    assert images.listing() == lines
    assert images.files.states[:, 1].tolist() == [state.st_mtime_ns for state in states]
    assert [images.where(i) for i in range(len(paths))] == [f"{tree}/{path}" for path in paths]
    tops = sorted({path.partition("/")[0] for path in paths})
    assert images.classes == tops
    assert images.labels is not None
    assert images.labels.tolist() == [tops.index(path.partition("/")[0]) for path in paths]
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogateescape") + b"\n")
    digest.update(hashlib.sha256(images.labels.numpy().tobytes()).hexdigest().encode())
    for path in paths:  # fewer than 64: all of them
        digest.update(hash_file(f"{tree}/{path}", whole=False).encode())
    assert images.fingerprint() == digest.hexdigest()


def test_a_listing_survives_its_file_and_that_of_other_data_or_a_damaged_one_is_none(tree: Path) -> None:
    before = scan(os.fsencode(tree))

    def same(a: Listing | None) -> bool:
        return (
            a is not None and list(a.lines()) == list(before.lines()) and torch.equal(a.states, before.states)
        )

    data = before.to_bytes("mine")
    again = Listing.read(io.BytesIO(data), "mine")
    assert same(again)
    assert again is not None
    assert [again.path(i) for i in range(len(again))] == [before.path(i) for i in range(len(before))]
    assert Listing.read(io.BytesIO(data), "another's") is None
    for cut in range(0, len(data), 97):
        assert Listing.read(io.BytesIO(data[:cut]), "mine") is None
    for place in range(0, len(data), 41):
        damaged = Listing.read(
            io.BytesIO(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]), "mine"
        )
        assert damaged is None or same(damaged)  # not all of a zip file's own bytes matter


def made_up(count: int) -> FolderImages:
    """A folder that need not be there, with a hundred classes."""
    per = count // 100
    folders = [b"", *(b"n%08d/" % c for c in range(100))]
    text = bytearray(b"".join(b"n%08d_%05d.JPEG\0" % (c, i) for c in range(100) for i in range(per)))
    names = torch.frombuffer(text, dtype=torch.uint8)
    counts, states = np.array([0] + [per] * 100), torch.arange(3 * count).view(count, 3)
    return FolderImages("/nowhere", Listing(folders, counts, names, states))


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
    assert images.files.names.nbytes + images.files.states.nbytes > 17e6
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
