"""Whether a data set is still the one that a run began with."""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adasim.data import ImageSet, check_same_data, leave_out, open_images, record
from adasim.data.identity import difference, listing_file
from adasim.data.image_folder import Listing
from adasim.util.errors import UserError

from .pictures import save_image, smooth

YEAR_2020 = 1_577_836_800_000_000_000


def photos(root: Path, count: int = 6) -> Path:
    """Files of one size and one modification time, of different content, in two classes."""
    for i in range(count):
        path = root / f"class{i % 2}" / f"{i:03d}.bmp"
        save_image(smooth(1, 8, 8, seed=i)[0], path)
        os.utime(path, ns=(YEAR_2020, YEAR_2020))
    return root


Kept = tuple[dict[str, Any], Listing | None]


def kept(images: ImageSet | Path, complete: bool = False) -> Kept:
    """What a run keeps of its images, after a trip through its files."""
    images = open_images(str(images)) if isinstance(images, Path) else images
    facts, file = json.loads(json.dumps(record(images, complete))), listing_file(images)
    listing = None if file is None else Listing.read(io.BytesIO(file), facts["fingerprint"])
    assert (listing is None) == (file is None)
    return facts, listing


def check(saved: Kept, images: ImageSet | Path, complete: bool = False) -> str:
    images = open_images(str(images)) if isinstance(images, Path) else images
    return check_same_data(saved[0], images, complete, listing=saved[1])


def overwrite_keeping_the_time(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-3] + b"\0\0\0")
    os.utime(path, ns=(YEAR_2020, YEAR_2020))
    assert path.read_bytes() != content


def swap(a: Path, b: Path) -> None:
    a.rename(a.with_suffix(".aside"))
    b.rename(a)
    a.with_suffix(".aside").rename(b)


def test_unchanged_data_are_accepted_and_a_copy_with_other_times_by_its_contents(tmp_path: Path) -> None:
    root = photos(tmp_path / "photos")
    saved = kept(root)
    assert "names, sizes and modification times of all 6 files agree" in check(saved, root)
    shutil.copytree(root, tmp_path / "copy", copy_function=shutil.copyfile)
    said = check(saved, tmp_path / "copy")
    assert "Modification times differ for 6, as after a copy" in said
    assert "contents of 6 of them" in said


@pytest.fixture
def few_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred files are as many as a million: only 34 are looked into, every third."""
    monkeypatch.setattr(sys.modules["adasim.data.identity"], "SAMPLED_FILES", 34)


@pytest.mark.usefixtures("few_sampled")
def test_of_a_large_data_set_a_sample_vouches_for_a_copy_but_not_for_files_written_since(
    tmp_path: Path,
) -> None:
    root = photos(tmp_path / "photos", 100)
    for i, path in enumerate(sorted(root.rglob("*.bmp"))):
        os.utime(path, ns=(YEAR_2020 + i, YEAR_2020 + i))
    saved = kept(root)
    shutil.copytree(root, tmp_path / "copy", copy_function=shutil.copyfile)
    said = check(saved, tmp_path / "copy")
    assert "contents of 34 of them" in said
    assert "Modification times differ for 100" in said
    swap(root / "class0/002.bmp", root / "class0/004.bmp")  # images 1 and 2 of every three
    with pytest.raises(
        UserError, match=r"2 of 100 files were written .*class0/002\.bmp, .*class0/004\.bmp.*--verify-data"
    ):
        check(saved, root)


@pytest.mark.usefixtures("few_sampled")
def test_a_complete_record_finds_what_a_sample_misses(tmp_path: Path) -> None:
    root = photos(tmp_path / "photos", 100)
    sampled, complete = kept(root), kept(root, complete=True)
    assert "so does every byte of them" in check(complete, root, complete=True)
    before = (root / "class0/002.bmp").read_bytes()
    overwrite_keeping_the_time(root / "class0/002.bmp")
    assert "contents of 34 of them" in check(sampled, root)
    assert "began without --verify-data" in check(sampled, root, complete=True)
    with pytest.raises(UserError, match=r"1 of 100 images .*class0/002\.bmp"):
        check(complete, root, complete=True)
    os.utime(root / "class0/002.bmp")  # read again without being asked
    with pytest.raises(UserError, match=r"class0/002\.bmp"):
        check(complete, root)
    os.utime(root / "class0/004.bmp")
    (root / "class0/002.bmp").write_bytes(before)
    assert "Every byte of 2 of these was read" in check(complete, root)


def test_long_files_are_sampled_from_the_first_byte_to_the_last(tmp_path: Path) -> None:
    root = photos(tmp_path / "photos", 2)
    long = root / "class0/000.bmp"
    long.write_bytes(bytes(1_000_000))
    saved = kept(root)
    for place in (0, 999_999):
        content = bytearray(1_000_000)
        content[place] = 1
        long.write_bytes(content)
        with pytest.raises(UserError, match=r"class0/000\.bmp"):
            check(saved, root)


def test_other_labels_alone_are_refused(tmp_path: Path) -> None:
    pixels = smooth(3, 8, 8).numpy()
    np.savez(tmp_path / "d.npz", images=pixels, labels=np.array([0, 1, 1]))
    saved = kept(tmp_path / "d.npz")
    assert "contents of 3 of 3 images agree" in check(saved, tmp_path / "d.npz")
    np.savez(tmp_path / "d.npz", images=pixels, labels=np.array([0, 1, 0]))
    with pytest.raises(UserError, match="the labels differ"):
        check(saved, tmp_path / "d.npz")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda root: (root / "class0/000.bmp").unlink(), r"of 6 entries, 1 removed \(class0/000\.bmp\)"),
        (lambda root: (root / "class0/000.bmp").rename(root / "class1/9.bmp"), "1 renamed .*class1/9"),
        (lambda root: (root / "class0/002.bmp").write_bytes(b"?"), r"1 changed \(class0/002\.bmp\)"),
        (lambda root: save_image(smooth(1, 9, 9)[0], root / "class2/new.bmp"), "1 added .*class2/new"),
        (lambda root: overwrite_keeping_the_time(root / "class1/003.bmp"), r"1 of 6 .*class1/003\.bmp"),
        (
            lambda root: swap(root / "class0/000.bmp", root / "class0/002.bmp"),
            r"2 of 6 images .*class0/000\.bmp, .*class0/002\.bmp",
        ),
    ],
    ids=["removed", "renamed", "changed", "added", "overwritten", "swapped"],
)
def test_what_is_other_in_a_folder_is_said_by_name(
    tmp_path: Path, change: Callable[[Path], object], words: str
) -> None:
    root = photos(tmp_path / "photos")
    saved = kept(root)
    change(root)
    with pytest.raises(UserError, match=f"Cannot resume with other data: .*{words}"):
        check(saved, root)


def test_of_a_folder_without_its_rejected_images_the_listing_is_a_file_too(tmp_path: Path) -> None:
    root, verdicts = photos(tmp_path / "photos"), tmp_path / "verdicts.csv"
    verdicts.write_text("file,verdict\nclass0/002.bmp,reject\n")

    def now() -> ImageSet:
        return leave_out(open_images(str(root)), verdicts)

    facts, listing = saved = kept(now())
    assert listing is not None
    assert [line for lines in listing.lines() for line in lines] == now().listing()
    assert not {"listing", "times"} & set(facts)
    (root / "class0/002.bmp").write_bytes(b"?")  # nobody looks at it
    assert "times of all 5 files agree" in check(saved, now())
    in_json = {**facts, "listing": now().listing(), "times": listing.states[:, 1].tolist()}
    assert "times of all 5 files agree" in check_same_data(in_json, now())
    os.utime(root / "class1/003.bmp")
    assert "differ for 1, as after a copy" in check(saved, now())
    (root / "class0/000.bmp").unlink()
    with pytest.raises(UserError, match=r"of 5 entries, 1 removed \(class0/000\.bmp\)"):
        check(saved, now())


def test_a_copy_has_the_fingerprint_but_not_the_cache_key(tmp_path: Path) -> None:
    root = photos(tmp_path / "photos")
    shutil.copytree(root, tmp_path / "copy", copy_function=shutil.copyfile)
    first, copy = open_images(str(root)), open_images(str(tmp_path / "copy"))
    assert first.fingerprint() == copy.fingerprint()
    assert first.cache_key() != copy.cache_key()
    assert first.cache_key() == open_images(str(root)).cache_key()
    swap(root / "class0/000.bmp", root / "class0/002.bmp")
    assert first.cache_key() != open_images(str(root)).cache_key()


# How two listings differ, in words


def test_the_difference_of_two_listings_in_words_and_in_linear_time() -> None:
    lines = [f"cats/{i:03d}.png {1000 + i}" for i in range(50)]
    assert "5 removed (cats/000.png, cats/001.png, cats/002.png and 2 more)" in difference(lines, lines[5:])
    words = difference(lines, [*lines[2:], "b a 7"])
    assert "2 removed (cats/000.png, cats/001.png), 1 added (b a)" in words
    assert "the order of the images differs" in difference(lines, lines[::-1])
    many = [f"new/{i} {i % 3}" for i in range(50_000)]
    words = difference([f"old/{i} {i % 5}" for i in range(50_000)], many)
    assert "30000 renamed" in words
    assert "20000 removed" in words
    assert "20000 added" in words
