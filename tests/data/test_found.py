"""What is found in a folder, what is left out, and that both are said."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest

from adasim.data import describe, listing, open_images
from adasim.data.sources import file_name
from adasim.util.errors import UserError

from .pictures import save_image, smooth


def fill(root: Path, **counts: int) -> Path:
    """fill(root, train__cat=3): three pictures in train/cat."""
    for place, count in counts.items():
        for i in range(count):
            save_image(smooth(1, 8, 8, seed=i)[0], root / place.replace("__", "/") / f"{i}.png")
    return root


def test_images_classes_and_what_was_left_out_are_told(tmp_path: Path) -> None:
    fill(tmp_path, cat=2, dog=1)
    for i in range(9):
        (tmp_path / "cat" / f"{i}.CR2").write_bytes(b"?")
    (tmp_path / "notes.txt").write_text("?")
    (tmp_path / "README").write_text("?")
    (tmp_path / ".DS_Store").write_text("?")
    assert describe(open_images(str(tmp_path))) == (
        f"3 images in 2 classes (cat, dog) from {tmp_path}. Left out: 9 .cr2 (convert them to JPEG or PNG), "
        f"1 file without an ending, 1 .txt."
    )


def test_a_divided_folder_tells_what_it_does_not_use_and_how_to_use_it_and_that_way_works(
    tmp_path: Path,
) -> None:
    root = fill(tmp_path / "photos", train__cat=3, train__dog=2, test__cat=14, holiday__train=20)
    fill(root, **{".": 10})
    said = describe(open_images(str(root)))
    assert said.startswith(f"5 images in 2 classes (cat, dog) from {root}/train (its split train; ")
    assert "20 in holiday/, 14 in test/, 10 directly in it are not among them" in said
    assert "put a link" in said
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "photos").symlink_to(root)
    assert len(open_images(str(tmp_path / "all"))) == 49


def test_images_without_labels_and_arrays_are_told_of(tmp_path: Path) -> None:
    flat = fill(tmp_path / "flat", **{".": 2, "more": 1})
    assert describe(open_images(str(flat))) == f"3 images without labels from {flat}."
    assert open_images(str(flat)).labels is None
    pixels = smooth(3, 8, 8).numpy()
    path = tmp_path / "d.npz"
    np.savez(path, x_train=pixels, y_train=np.arange(3), x_test=pixels[:2], y_test=np.arange(2))
    assert describe(open_images(str(path))) == (
        f"3 images in 3 classes (0, 1, 2) from {path} (its split x_train; 2 in x_test are not among them)."
    )
    assert "generated" in describe(open_images("synthetic:48"))


def test_heic_files_that_cannot_be_read_are_counted_and_the_command_that_reads_them_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "EXTENSIONS", frozenset(["png"]))  # as without pillow-heif
    monkeypatch.setattr(listing, "_USUAL_ENDINGS", frozenset([".png"]))
    for i in range(9):
        (tmp_path / f"{i}.HEIC").write_bytes(b"?")
    with pytest.raises(UserError, match=r"found 9 \.heic \(to read them: pip install pillow-heif\)\.$"):
        open_images(str(tmp_path))
    fill(tmp_path, **{".": 2})
    said = describe(open_images(str(tmp_path)))
    assert said.endswith("Left out: 9 .heic (to read them: pip install pillow-heif).")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("my photos.zip", "unzip 'my photos.zip' -d 'my photos'"),
        ("photos.TAR", "mkdir -p photos && tar -xf photos.TAR -C photos"),
        ("photos.tar.gz", "mkdir -p photos && tar -xf photos.tar.gz -C photos"),
        ("photos.tgz", "mkdir -p photos && tar -xf photos.tgz -C photos"),
    ],
)
def test_an_archive_is_refused_with_the_command_that_unpacks_it(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(b"?")
    folder = command.rpartition("-d " if "unzip" in command else "-C ")[2]
    with pytest.raises(UserError) as caught:
        open_images(name)
    assert str(caught.value) == f"{name} is an archive. Unpack it with `{command}`, then name {folder}."


@pytest.mark.parametrize("name", ["a.jpg", "a.HEIC"])
def test_one_image_is_refused_with_the_name_of_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"?")
    with pytest.raises(UserError, match=rf"is one image\. Name its folder: {tmp_path}$"):
        open_images(str(tmp_path / name))


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


def test_loops_of_links_are_left_out_with_a_word(tmp_path: Path) -> None:
    fill(tmp_path, cat=2, dog=1)
    (tmp_path / "cat" / "up").symlink_to(tmp_path)
    (tmp_path / "dog" / "here").symlink_to(tmp_path / "dog")
    (tmp_path / "dog" / "itself").symlink_to(tmp_path / "dog" / "itself")
    data = open_images(str(tmp_path))
    assert len(data) == 3
    assert "2 links that lead back to a folder above them" in describe(data)


def test_links_to_other_folders_and_files_are_followed(tmp_path: Path) -> None:
    fill(tmp_path / "store", a=2, b=3)
    (tmp_path / "view" / "c").mkdir(parents=True)
    (tmp_path / "view" / "x").symlink_to(tmp_path / "store" / "a")
    (tmp_path / "view" / "y").symlink_to(tmp_path / "store" / "a")
    (tmp_path / "view" / "c" / "0.png").symlink_to(tmp_path / "store" / "b" / "0.png")
    data = open_images(str(tmp_path / "view"))
    assert len(data) == 5
    assert data.classes == ["c", "x", "y"]


def test_pipes_and_sockets_are_left_out_with_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, cat=2)
    os.mkfifo(tmp_path / "cat" / "x.jpg")
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("cat/y.png")
        data = open_images(str(tmp_path))
    assert len(data) == 2
    assert "2 pipes, sockets or devices" in describe(data)


def test_a_class_whose_name_is_not_printable_can_be_printed(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff\x1b[31m"
    os.mkdir(folder)
    save_image(smooth(1, 8, 8)[0], tmp_path / "x.png")
    os.rename(tmp_path / "x.png", folder + b"/x.png")
    said = describe(open_images(str(tmp_path)))
    said.encode()
    assert "\x1b" not in said
    assert r"(\xff\x1b[31m)" in said


def test_no_source_is_asked_for_with_an_example() -> None:
    with pytest.raises(UserError, match=r"Which images.*--data ~/photos"):
        open_images("")
