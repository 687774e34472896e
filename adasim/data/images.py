"""What every data set of images looks like to the rest of the package (`ImageSet`), a part of one, and images in
memory: an array, or an .npz file."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adasim.util.errors import MissingSplitError, UserError
from adasim.util.rgb import Reduction, open_regular
from adasim.util.terminal import few, printable

MAX_CLASSES = 100_000
"""Of classes that are known by number alone: there is one for each number up to the greatest label."""
_FINGERPRINT_FILES = 64  # looked into for the fingerprint, by every process of a run


class ImageSet(ABC):
    """N images, numbered 0..N-1 in an order that never changes.

    `labels` is int64 (N,) or None; `classes` names them. `load` gives one image as uint8 (3, H, W).

    A set of one's own needs `__len__`, `load` and `listing`; and `content`, if the listing does not change with
    what an image holds.
    """

    name: str = ""
    labels: Tensor | None = None
    classes: list[str] = []  # noqa: RUF012  (never changed in place)
    place: str = ""
    """Where the images come from, for people."""
    split: str = ""
    """Which part of a source that is divided into splits this is."""
    left_out: str = ""
    """In words, which files among the images were left out."""
    class_note: str = ""
    """A sentence on which folders are the classes, where people may expect others."""
    other_splits: dict[str, int] = {}  # noqa: RUF012
    """How many images the source has in other splits, by name."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def load(self, i: int) -> Tensor:
        """Image i as RGB, uint8 (3, H, W). Raises `Unreadable`."""

    def load_reduced(self, i: int, reduction: Reduction) -> tuple[Tensor, int]:
        """Image i, at 1/s of its size where that makes it quicker to decode; and s.

        `reduction` is told height and width and answers with the greatest s that will do: 1, 2, 4 or 8.
        """
        return self.load(i), 1

    @abstractmethod
    def listing(self) -> list[str]:
        """One line per image (or per run of images) that changes when the image does: for messages about what
        differs between two states of a data set."""

    def content(self, i: int, whole: bool = False) -> str:
        """Hash of what image i's file holds, every byte of it or a sample; "" where the listing has it already."""
        return ""

    def unused(self, also: Collection[str] = ()) -> str:
        """In words, what the source holds beside this split, and beside those that are `also` used."""
        others = [f"{n:,} in {split}" for split, n in self.other_splits.items() if n and split not in also]
        return f"{few(others)} are not among them" if others else ""

    def more_splits(self, known: set[str]) -> list[ImageSet]:
        """The labelled splits of the source beside those that are known."""
        return []

    def where(self, i: int) -> str:
        """Where image i is, for people: its path, or `name[i]`."""
        return f"{self.name}[{i}]"

    def mask(self, i: int) -> Tensor | None:
        """The segmentation mask of image i, uint8 (H, W), or None where there is none."""
        return None

    def as_array(self) -> Tensor | None:
        """All images as one uint8 (N, C, H, W) when they already are in memory, else None. C may be 1."""
        return None

    def fingerprint(self) -> str:
        """sha256 over the listing, the labels and the sampled contents of at most 64 files: two data sets with one
        fingerprint train alike. A copy on another disk has the same one."""
        digest = hashlib.sha256()
        for lines in self.listing_bytes():
            digest.update(lines)
        digest.update((self.labels_hash() + self.sampled_contents()).encode())
        return digest.hexdigest()

    def listing_bytes(self) -> Iterator[bytes]:
        """The listing as text, a newline after each line, in pieces."""
        return (line.encode("utf-8", "surrogateescape") + b"\n" for line in self.listing())

    def sampled_contents(self) -> str:
        """The hashes of what at most 64 images hold, one after another."""
        return "".join(self.content(i) for i in sample_ids(len(self), _FINGERPRINT_FILES))

    def labels_hash(self) -> str:
        return "" if self.labels is None else hashlib.sha256(self.labels.numpy().tobytes()).hexdigest()

    def cache_key(self) -> str:
        """Names this state of the files to a cache: another one as soon as a file may have been written."""
        return self.fingerprint()


class Subset(ImageSet):
    """Some images of a data set, in the order of `ids`."""

    def __init__(self, images: ImageSet, ids: Tensor) -> None:
        self.name, self.place, self.split = images.name, images.place, images.split
        self.classes, self.left_out, self.class_note = images.classes, images.left_out, images.class_note
        self.labels = None if images.labels is None else images.labels[ids]
        self.images, self.ids = images, ids
        array = images.as_array()
        self._array = None if array is None else array[ids]

    def __len__(self) -> int:
        return len(self.ids)

    def load(self, i: int) -> Tensor:
        return self.images.load(int(self.ids[i]))

    def load_reduced(self, i: int, reduction: Reduction) -> tuple[Tensor, int]:
        return self.images.load_reduced(int(self.ids[i]), reduction)

    def where(self, i: int) -> str:
        return self.images.where(int(self.ids[i]))

    def mask(self, i: int) -> Tensor | None:
        return self.images.mask(int(self.ids[i]))

    def as_array(self) -> Tensor | None:
        return self._array

    def content(self, i: int, whole: bool = False) -> str:
        return self.images.content(int(self.ids[i]), whole)

    def unused(self, also: Collection[str] = ()) -> str:
        return self.images.unused(also)

    def listing(self) -> list[str]:
        """The lines of these images; where a line stands for several images, all lines and which images these are."""
        lines = self.images.listing()
        if len(lines) == len(self.images):
            return [lines[i] for i in self.ids.tolist()]
        return [*lines, f"kept {len(self)} {self._ids_hash()}"]

    def cache_key(self) -> str:
        return hashlib.sha256((self.images.cache_key() + self._ids_hash()).encode()).hexdigest()

    def _ids_hash(self) -> str:
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()


class ArrayImages(ImageSet):
    """Images of one size in memory: uint8 (N, C, H, W) with C of 1 or 3; masks uint8 (N, H, W)."""

    CHUNK = 1024  # images per line of the listing

    def __init__(
        self,
        name: str,
        images: Tensor,
        labels: Tensor | None = None,
        classes: list[str] | None = None,
        masks: Tensor | None = None,
    ) -> None:
        self.name, self.images, self.masks = name, images, masks
        self.labels = None if labels is None else labels.to(torch.int64)
        self.classes = distinct_classes(self.labels, classes or [])

    def __len__(self) -> int:
        return len(self.images)

    def load(self, i: int) -> Tensor:
        return self.images[i].expand(3, -1, -1)

    def mask(self, i: int) -> Tensor | None:
        return None if self.masks is None else self.masks[i]

    def as_array(self) -> Tensor:
        return self.images

    def listing(self) -> list[str]:
        lines = []
        for first in range(0, len(self), self.CHUNK):
            chunk = self.images[first : first + self.CHUNK]
            digest = hashlib.sha256(chunk.contiguous().numpy().tobytes()).hexdigest()
            lines.append(f"{self.name}[{first}:{first + len(chunk)}] {tuple(chunk.shape[1:])} {digest}")
        return lines


def sample_ids(count: int, limit: int) -> list[int]:
    """Which of `count` images are looked into: all up to the limit, else `limit` of them at even distances."""
    return np.linspace(0, count - 1, min(count, limit)).round().astype(np.int64).tolist()


def channels_first(pixels: Tensor, channels_last: bool) -> Tensor:
    """Images (N, H, W) or (N, C, H, W) as (N, C, H, W), contiguous; with `channels_last`, also (N, H, W, C), which
    numpy's arrays often are. Raises ValueError."""
    shape = tuple(pixels.shape)
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif channels_last and pixels.ndim == 4 and shape[3] in (1, 3):
        pixels = pixels.permute(0, 3, 1, 2)
    if pixels.ndim != 4 or pixels.shape[1] not in (1, 3) or 0 in pixels.shape[1:]:
        raise ValueError(f"images of shape {shape[1:]} have no height and width with 1 or 3 channels")
    return pixels.contiguous()


# ---- classes ----


def distinct_classes(labels: Tensor | None, names: Sequence[str]) -> list[str]:
    """The names of the classes, no two alike: where one is repeated, its number goes along, as in `crane (134)`.

    Where labels have no names, or too few, these are numbers.
    """
    greatest = -1 if labels is None or not len(labels) else int(labels.max())
    if len(names) > greatest:
        counts = Counter(names)
        return [name if counts[name] == 1 else f"{name} ({i})" for i, name in enumerate(names)]
    if greatest >= MAX_CLASSES:
        raise UserError(
            f"The greatest label is {greatest}, and labels above {MAX_CLASSES - 1} are refused. Number the classes "
            f"from 0 up."
        )
    return [str(c) for c in range(greatest + 1)]


def match_classes(labels: Tensor, classes: list[str], known: list[str]) -> Tensor:
    """Labels that number `classes`, renumbered by `known`, where the class of that name stands.

    Two folders number their classes each for itself: 3 here need not be 3 there. A name that is not in `known`
    becomes -1, and -1, no label, stays so.
    """
    if classes == known:
        return labels
    number = {name: i for i, name in enumerate(known)}
    table = torch.tensor([*(number.get(name, -1) for name in classes), -1], dtype=torch.int64)
    return table[labels]  # the last entry is that of -1


# ---- .npz files ----


def open_npz(path: str, split: str) -> ArrayImages:
    """`images` (uint8; NHWC, NCHW or NHW), `labels`, `masks`; or x_train, y_train, x_test, y_test."""
    try:
        with open_regular(path) as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it is a single array; use numpy.savez to store images and labels by name")
            return _npz_images(path, archive, split)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"No such file: {path}. Check its spelling.") from None
    except Exception as error:  # a damaged archive raises nearly anything
        reason = printable(str(error) or type(error).__name__)
        raise UserError(f"{path} cannot be read as an .npz file: {reason}") from None


def _npz_images(path: str, archive: Any, split: str) -> ArrayImages:
    divided = "x_train" in archive.files
    names = (f"x_{split}", f"y_{split}") if divided else ("images", "labels", "masks")
    if names[0] not in archive.files or (split == "test" and not divided):
        raise MissingSplitError(
            f"{path} has no {split} images: it needs the arrays x_train and x_test"
            f"{' or images' if split == 'train' else ''}, and has {few(map(printable, archive.files), 8) or 'none'}."
        )
    need = sum(entry.file_size for entry in archive.zip.infolist() if entry.filename[:-4] in names)
    if hasattr(os, "sysconf") and need > (there := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        raise ValueError(
            f"it needs {need / 1e9:,.0f} GB of memory, and this machine has {there / 1e9:,.0f}; use a folder of "
            f"image files instead"
        )
    arrays = {name: archive[name] for name in names if name in archive.files}
    pixels, labels, masks = arrays[names[0]], arrays.get(names[1]), arrays.get("masks")

    def refusal(name: str, wanted: str) -> UserError:
        array = arrays[name]
        values = f" from {array.min()} to {array.max()}" if array.size and array.dtype.kind in "iuf" else ""
        return UserError(f"{path}: {name} is {array.dtype} of shape {array.shape}{values}; {wanted}.")

    try:
        if pixels.dtype != np.uint8 or not pixels.size:
            raise ValueError
        stacked = channels_first(torch.from_numpy(np.ascontiguousarray(pixels)), channels_last=True)
    except ValueError:
        shapes = "(N, H, W, C), (N, C, H, W) or (N, H, W)"
        wanted = f"give uint8 of shape {shapes}, with 1 or 3 channels, and at least one image"
        raise refusal(names[0], wanted) from None
    for name, array in arrays.items():
        if array.shape[:1] != pixels.shape[:1]:
            raise refusal(name, f"there are {len(pixels)} images: give one for each")
    if labels is not None and (labels.size != len(pixels) or not _within(labels, MAX_CLASSES - 1, least=-1)):
        wanted = f"give one whole number from 0 to {MAX_CLASSES - 1} for each image, or -1 for none"
        raise refusal(names[1], wanted)
    if masks is not None and not _within(masks, 255):
        raise refusal("masks", "give class ids from 0 to 255")
    images = ArrayImages(
        Path(path).stem,
        stacked,
        None if labels is None else torch.from_numpy(labels.reshape(-1).astype(np.int64)),
        masks=None if masks is None else torch.from_numpy(np.ascontiguousarray(masks, dtype=np.uint8)),
    )
    images.place = path
    if divided:
        images.split = names[0]
        others = {"x_train", "x_test"} & set(archive.files) - {names[0]}
        images.other_splits = {name: _count(archive, name) for name in others}
    return images


def _within(array: np.ndarray, most: int, least: int = 0) -> bool:
    whole = np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_
    return bool(whole and array.size and array.min() >= least and array.max() <= most)


def _count(archive: Any, name: str) -> int:
    """The rows of an array by its header: its values are not read."""
    with archive.zip.open(f"{name}.npy") as file:
        np.lib.format.read_magic(file)
        shape, _, _ = np.lib.format.read_array_header_1_0(file)
        return shape[0] if shape else 0
