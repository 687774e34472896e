"""Mistakes in an .npz file are sentences, and cost no memory."""

import io
import os
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adasim.data import open_images
from adasim.util.errors import UserError

PIXELS = np.zeros((3, 8, 8, 3), np.uint8)


def whole() -> bytes:
    file = io.BytesIO()
    np.savez(file, images=PIXELS, labels=np.arange(3))
    return file.getvalue()


def with_member(name: str, content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


def single_array() -> bytes:
    file = io.BytesIO()
    np.save(file, PIXELS)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK",
        whole()[: len(whole()) // 2],
        whole()[:120] + b"\xff" * 40 + whole()[160:],
        single_array(),
        with_member("images", b"no array"),
        with_member("images.npy", b"\x93NUMPY\x01\x00\x10\x00{'descr': broken"),
        with_member("images.npy", b"no array"),
    ],
    ids=["empty", "cut to 2", "cut to half", "bytes changed", "npy", "no npy", "bad header", "no array"],
)
def test_a_damaged_file_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "d.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be read as an \.npz file"):
        open_images(str(path))


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"images": PIXELS[:0]}, "at least one"),
        ({"images": PIXELS[:0], "labels": np.arange(0)}, "at least one"),
        ({"images": PIXELS[:, :0]}, "at least one"),
        ({"images": np.uint8(3)}, r"uint8 of shape \(\)"),
        ({"images": PIXELS[0, 0]}, r"uint8 of shape \(8, 3\)"),
        ({"images": np.full(PIXELS.shape, np.nan)}, "float64"),
        ({"images": PIXELS[..., :2]}, "neither 1 nor 3 channels"),
        ({"images": np.array([None, "a"], object)}, "cannot be read"),
        ({"images": PIXELS, "labels": np.array(["a", None, "c"], object)}, "cannot be read"),
        ({"images": PIXELS, "labels": np.int64(1)}, r"1 labels \(a single value\)"),
        ({"images": PIXELS, "labels": np.arange(0)}, "3 images but 0 labels"),
        ({"images": PIXELS, "labels": np.arange(4)}, "3 images but 4 labels"),
        ({"images": PIXELS, "labels": np.zeros((3, 2), int)}, r"int64 of shape \(3, 2\)"),
        ({"images": PIXELS, "labels": np.zeros((3, 0), int)}, r"int64 of shape \(3, 0\)"),
        ({"images": PIXELS, "labels": np.array([0.0, 1.0, 2.0])}, "they are float64"),
        ({"images": PIXELS, "labels": np.array([0.0, np.nan, 2.0])}, "they are float64"),
        ({"images": PIXELS, "labels": np.array(["a", "b", "c"])}, "they are <U1"),
        ({"images": PIXELS, "labels": np.array([0, -1, 2])}, "from -1 to 2"),
        ({"images": PIXELS, "labels": np.array([0, 1, 2**63], np.uint64)}, "labels above 99999 are refused"),
        ({"images": PIXELS, "labels": np.array([0, 1, 100_000])}, "labels above 99999 are refused"),
        ({"images": PIXELS, "masks": np.uint8(1)}, r"1 masks \(a single value\)"),
        (
            {"images": PIXELS, "masks": np.full((3, 8, 8), np.nan)},
            "class ids from 0 to 255; they are float64",
        ),
        ({"images": PIXELS, "masks": np.full((3, 8, 8), 256)}, "from 256 to 256"),
        ({"x_train": PIXELS, "y_train": np.int64(0)}, r"1 labels \(a single value\)"),
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


def test_a_label_of_a_hundred_million_costs_no_memory(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", images=PIXELS, labels=np.array([0, 1, 10**8]))
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="the greatest label is 100000000"):
            open_images(str(tmp_path / "d.npz"))
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_more_than_the_machine_has_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """An archive whose directory claims an array of a million gigabytes."""
    path = tmp_path / "d.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", single_array())
        archive.filelist[0].file_size = 10**15
    with pytest.raises(UserError, match=r"needs 1,000,000 GB of memory, and this machine has \d+"):
        open_images(str(path))
