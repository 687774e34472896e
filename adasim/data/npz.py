"""Images in an .npz file. Headers are checked before memory is taken, and what is wrong is said in a sentence."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adasim.data.decode import open_regular
from adasim.data.images import MAX_CLASSES, ArrayImages, ImageSet, channels_first
from adasim.util.errors import MissingSplitError, UserError
from adasim.util.terminal import few, printable


def open_npz(path: str, split: str) -> ImageSet:
    """`images` (uint8; NHWC, NCHW or NHW), `labels`, `masks`; or x_train, y_train, x_test, y_test."""
    arrays, names, counts = _read(path, split)
    divided = "x_train" in names
    key = f"x_{split}" if divided else "images"
    pixels = arrays.get(key)
    if pixels is None or (split == "test" and not divided):
        raise MissingSplitError(
            f"{path} has no {split} images: it needs the arrays x_train and x_test"
            f"{' or images' if split == 'train' else ''}, and has {few(map(printable, names), 8) or 'none'}."
        )
    images = _to_nchw(path, pixels)
    labels = arrays.get(f"y_{split}" if divided else "labels")
    masks = None if divided else arrays.get("masks")
    opened = NpzImages(
        Path(path).stem,
        images,
        None if labels is None else _to_labels(path, labels, len(images)),
        masks=None if masks is None else _to_masks(path, masks, len(images)),
    )
    opened.place = path
    if divided:
        opened.split, opened.counts = key, counts
    return opened


class NpzImages(ArrayImages):
    """The images of an .npz file, which may be one of two splits in it."""

    counts: dict[str, int] = {}  # noqa: RUF012  (images in x_train and x_test, where there are both)

    def unused(self, also: Collection[str] = ()) -> str:
        others = {name: n for name, n in self.counts.items() if n and name != self.split and name not in also}
        return "".join(f"{count:,} in {name} are not among them" for name, count in others.items())


def _read(path: str, split: str) -> tuple[dict[str, np.ndarray], list[str], dict[str, int]]:
    """The arrays that are wanted, the names of all, and how many images x_train and x_test have."""
    wanted = ("images", "labels", "masks", f"x_{split}", f"y_{split}")
    try:
        with open_regular(path) as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it is a single array; use numpy.savez to store images and labels by name")
            names = list(archive.files)
            _require_memory(archive, [name for name in names if name in wanted])
            arrays = {name: archive[name] for name in names if name in wanted}
            counts = {name: _count(archive, name) for name in names if name in ("x_train", "x_test")}
    except FileNotFoundError:
        raise UserError(f"No such file: {path}. Check its spelling.") from None
    except Exception as error:  # as with images: a damaged archive raises nearly anything
        reason = str(error) or type(error).__name__
        raise UserError(f"{path} cannot be read as an .npz file: {printable(reason)}") from None
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy hands out what is no array as bytes
            raise UserError(f"{path} cannot be read as an .npz file: {name} is no array of numpy.")
    return arrays, names, counts


def _require_memory(archive: np.lib.npyio.NpzFile, names: list[str]) -> None:
    """Compressed zeros of a few megabytes may ask for a thousand times as much."""
    assert archive.zip is not None  # open
    listed = {entry.filename: entry.file_size for entry in archive.zip.infolist()}
    need = sum(listed.get(f"{name}.npy", 0) for name in names)
    if hasattr(os, "sysconf") and need > (there := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        raise ValueError(
            f"it needs {need / 1e9:,.0f} GB of memory, and this machine has {there / 1e9:,.0f}; use a folder of "
            f"image files instead"
        )


def _count(archive: np.lib.npyio.NpzFile, name: str) -> int:
    """The rows of an array by its header: its values are not read."""
    assert archive.zip is not None  # open
    with archive.zip.open(f"{name}.npy") as file:
        old = np.lib.format.read_magic(file) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
        shape = read(file)[0]
        return shape[0] if shape else 0


def _to_nchw(path: str, pixels: np.ndarray) -> Tensor:
    shape = pixels.shape
    if pixels.dtype != np.uint8 or len(shape) not in (3, 4) or not pixels.size:
        raise UserError(
            f"{path}: the images are {pixels.dtype} of shape {shape}; they must be uint8 of shape "
            f"(N, H, W, C), (N, C, H, W) or (N, H, W), and at least one."
        )
    try:
        return channels_first(torch.from_numpy(np.ascontiguousarray(pixels)), either=True)
    except ValueError:
        raise UserError(f"{path}: the images of shape {shape} have neither 1 nor 3 channels.") from None


def _to_labels(path: str, labels: np.ndarray, images: int) -> Tensor:
    _require_rows(path, "labels", labels, images)
    if labels.size != images or not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        raise UserError(
            f"{path}: the labels must be one whole number from 0 up for each image; they are {_kind(labels)}."
        )
    if labels.max() >= MAX_CLASSES:
        raise UserError(
            f"{path}: the greatest label is {labels.max()}, and labels above {MAX_CLASSES - 1} are refused. "
            f"Number the classes from 0 up."
        )
    return torch.from_numpy(labels.reshape(-1).astype(np.int64))


def _to_masks(path: str, masks: np.ndarray, images: int) -> Tensor:
    _require_rows(path, "masks", masks, images)
    whole = np.issubdtype(masks.dtype, np.integer) or masks.dtype == np.bool_
    if not whole or not masks.size or masks.min() < 0 or masks.max() > 255:
        raise UserError(f"{path}: the masks must be class ids from 0 to 255; they are {_kind(masks)}.")
    return torch.from_numpy(np.ascontiguousarray(masks, dtype=np.uint8))


def _require_rows(path: str, what: str, array: np.ndarray, images: int) -> None:
    count = array.shape[0] if array.ndim else 1
    if not array.ndim or count != images:
        raise UserError(
            f"{path} has {images} images but {count} {what}{'' if array.ndim else ' (a single value)'}: they must "
            f"be as many."
        )


def _kind(array: np.ndarray) -> str:
    whole = array.size and np.issubdtype(array.dtype, np.integer)
    values = f" with values from {array.min()} to {array.max()}" if whole else ""
    return f"{array.dtype} of shape {array.shape}{values}"
