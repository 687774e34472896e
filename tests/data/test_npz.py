"""Mistakes in an .npz file are sentences, and cost no memory."""

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adasim.data import ArrayImages, describe, open_images
from adasim.util.errors import UserError

from .pictures import labels_of, smooth

PIXELS = np.zeros((3, 8, 8, 3), np.uint8)


def saved(save: Callable[..., None], *arrays: Any, **named: Any) -> bytes:
    file = io.BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


WHOLE = saved(np.savez, images=PIXELS, labels=np.arange(3))


def with_member(name: str, content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK",
        WHOLE[: len(WHOLE) // 2],
        WHOLE[:120] + b"\xff" * 40 + WHOLE[160:],
        saved(np.save, PIXELS),
        with_member("images.npy", b"\x93NUMPY\x01\x00\x10\x00{'descr': broken"),
        with_member("images.npy", b"no array"),
    ],
    ids=["empty", "cut to 2", "cut to half", "bytes changed", "npy", "bad header", "no array"],
)
def test_a_damaged_file_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "d.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be read as an \.npz file|images is"):
        open_images(str(path))


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"images": PIXELS[:0]}, "at least one"),
        ({"images": PIXELS[:, :0]}, "at least one"),
        ({"images": np.uint8(3)}, r"uint8 of shape \(\)"),
        ({"images": PIXELS[0, 0]}, r"uint8 of shape \(8, 3\)"),
        ({"images": np.full(PIXELS.shape, np.nan)}, "float64"),
        ({"images": PIXELS[..., :2]}, "1 or 3 channels"),
        ({"images": np.array([None, "a"], object)}, "cannot be read"),
        ({"images": PIXELS, "labels": np.array(["a", None, "c"], object)}, "cannot be read"),
        ({"images": PIXELS, "labels": np.int64(1)}, r"labels is int64 of shape \(\)"),
        ({"images": PIXELS, "labels": np.arange(0)}, "there are 3 images"),
        ({"images": PIXELS, "labels": np.arange(4)}, "there are 3 images"),
        ({"images": PIXELS, "labels": np.zeros((3, 2), int)}, r"int64 of shape \(3, 2\)"),
        ({"images": PIXELS, "labels": np.array([0.0, np.nan, 2.0])}, "labels is float64"),
        ({"images": PIXELS, "labels": np.array(["a", "b", "c"])}, "labels is <U1"),
        ({"images": PIXELS, "labels": np.array([0, -2, 2])}, "from -2 to 2"),
        ({"images": PIXELS, "labels": np.array([0, 1, 2**63], np.uint64)}, "from 0 to 99999"),
        ({"images": PIXELS, "labels": np.array([0, 1, 100_000])}, "from 0 to 100000; .* from 0 to 99999"),
        ({"images": PIXELS, "masks": np.uint8(1)}, "masks is uint8"),
        ({"images": PIXELS, "masks": np.full((3, 8, 8), np.nan)}, "float64.*class ids from 0 to 255"),
        ({"images": PIXELS, "masks": np.full((3, 8, 8), 256)}, "from 256 to 256"),
        ({"x_train": PIXELS, "y_train": np.int64(0)}, "y_train is int64"),
    ],
)
def test_arrays_that_cannot_be_used_are_a_sentence(tmp_path: Path, arrays: dict[str, Any], says: str) -> None:
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(UserError, match=says):
        open_images(str(tmp_path / "d.npz"))


def test_a_pipe_instead_of_a_file_is_a_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "d.npz")
    with pytest.raises(UserError, match="not a regular file"):
        open_images(str(tmp_path / "d.npz"))


def test_more_than_the_machine_has_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """An archive whose directory claims an array of a million gigabytes."""
    path = tmp_path / "d.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", saved(np.save, PIXELS))
        archive.filelist[0].file_size = 10**15
    with pytest.raises(UserError, match=r"needs 1,000,000 GB of memory, and this machine has \d+"):
        open_images(str(path))


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NHW"])
def test_npz_arrays_of_any_layout_give_the_same_kind_of_image(tmp_path: Path, layout: str) -> None:
    pixels = smooth(5, 10, 12, channels=1 if layout == "NHW" else 3)
    array = {"NHWC": pixels.permute(0, 2, 3, 1), "NCHW": pixels, "NHW": pixels[:, 0]}[layout].numpy()
    masks = np.ones((5, 10, 12), np.int64)
    np.savez(tmp_path / "d.npz", images=array, labels=np.array([[0], [1], [2], [1], [0]]), masks=masks)
    data = open_images(str(tmp_path / "d.npz"))
    assert torch.equal(data.load(3), pixels[3].expand(3, -1, -1))
    assert isinstance(data, ArrayImages)
    assert labels_of(data) == [0, 1, 2, 1, 0]
    assert data.classes == ["0", "1", "2"]
    assert torch.equal(data.as_array(), pixels)
    assert data.masks is not None
    assert data.masks.dtype == torch.uint8


def test_train_and_test_arrays_are_read_by_split_and_the_other_is_told_of(tmp_path: Path) -> None:
    (a, b), path = (smooth(n, 8, 8, seed=n) for n in (3, 2)), str(tmp_path / "d.npz")
    np.savez(path, x_train=a, y_train=np.arange(3), x_test=b, y_test=np.arange(2))
    assert torch.equal(open_images(path, split="test").load(1), b[1])
    assert describe(open_images(path)) == (
        f"3 images in 3 classes (0, 1, 2) from {path} (its split x_train; 2 in x_test are not among them)."
    )
