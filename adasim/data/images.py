"""What every data set of images looks like to the rest of the package, the one in memory, and a part of one."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from adasim.util.errors import UserError

MAX_CLASSES = 100_000
"""Of classes that are known by number alone: there is one for each number up to the greatest label."""
_FINGERPRINT_FILES = 64  # looked into for the fingerprint, by every process of a run


Reduction = Callable[[int, int], int]
"""From an image's height and width to the part, 1/s, of its size that is enough: s."""


class Unreadable(Exception):  # noqa: N818  (a state of the file, as the quarantine reports it)
    """An image that cannot be decoded: `where` it is and the `reason`."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)  # both, so that it survives a trip through a worker's pickle
        self.where = where
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


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

    def times(self) -> list[int]:
        """When the file behind each line of the listing was last written, in ns; empty where there are no files."""
        return []

    def content(self, i: int, whole: bool = False) -> str:
        """Hash of what image i's file holds, every byte of it or a sample; "" where the listing has it already."""
        return ""

    def unused(self, also: Collection[str] = ()) -> str:
        """In words, what the source holds beside this split, and beside those that are `also` used."""
        return ""

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
        fingerprint train alike. A copy on another disk has the same one.
        """
        digest = hashlib.sha256()
        for lines in self.listing_bytes():
            digest.update(lines)
        digest.update(self.labels_hash().encode())
        digest.update(self.sampled_contents().encode())
        return digest.hexdigest()

    def listing_bytes(self) -> Iterator[bytes]:
        """The listing as text, a newline after each line, in pieces."""
        for line in self.listing():
            yield line.encode("utf-8", "surrogateescape") + b"\n"

    def sampled_contents(self) -> str:
        """The hashes of what at most 64 images hold, one after another."""
        return "".join(self.content(i) for i in sample_ids(len(self), _FINGERPRINT_FILES))

    def labels_hash(self) -> str:
        return "" if self.labels is None else hashlib.sha256(self.labels.numpy().tobytes()).hexdigest()

    def cache_key(self) -> str:
        """Names this state of the files to a cache: another one as soon as a file may have been written."""
        return self.fingerprint()


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
        self.name = name
        self.images = images
        self.labels = None if labels is None else labels.to(torch.int64)
        self.classes = classes or numbered_classes(self.labels)
        self.masks = masks

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
        for start in range(0, len(self), self.CHUNK):
            chunk = self.images[start : start + self.CHUNK].contiguous()
            digest = hashlib.sha256(chunk.numpy().tobytes()).hexdigest()
            lines.append(f"{self.name}[{start}:{start + len(chunk)}] {tuple(chunk.shape[1:])} {digest}")
        return lines


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

    def keeps_order(self) -> bool:
        """Whether these images stand in the order of the whole."""
        return bool((self.ids[1:] > self.ids[:-1]).all())

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

    def times(self) -> list[int]:
        times = self.images.times()
        return [times[i] for i in self.ids.tolist()] if len(times) == len(self.images) else times

    def cache_key(self) -> str:
        return hashlib.sha256((self.images.cache_key() + self._ids_hash()).encode()).hexdigest()

    def _ids_hash(self) -> str:
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()


def channels_first(pixels: Tensor, either: bool) -> Tensor:
    """Images (N, H, W) or (N, C, H, W) as (N, C, H, W), contiguous. Raises ValueError.

    Args:
        pixels: the images.
        either: (N, H, W, C) is taken, too, as numpy's arrays often are.
    """
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif either and pixels.ndim == 4 and pixels.shape[3] in (1, 3):
        pixels = pixels.permute(0, 3, 1, 2)
    if pixels.ndim != 4:
        raise ValueError("images have two sides, and one or three channels")
    if pixels.shape[1] not in (1, 3):
        raise ValueError(f"it has {pixels.shape[1]} channels, not 1 or 3")
    if 0 in pixels.shape[1:]:
        raise ValueError("it has no pixels")
    return pixels.contiguous()


def numbered_classes(labels: Tensor | None) -> list[str]:
    """Names for classes that are known by number alone."""
    greatest = -1 if labels is None or not len(labels) else int(labels.max())
    if greatest >= MAX_CLASSES:
        raise UserError(
            f"The greatest label is {greatest}, and labels above {MAX_CLASSES - 1} are refused. Number the classes "
            f"from 0 up."
        )
    return [str(c) for c in range(greatest + 1)]


def distinct_classes(labels: Tensor | None, names: Sequence[str]) -> list[str]:
    """The names of the classes, no two alike: where one is repeated, its number goes along, as in `crane (134)`.

    Where labels have no names, or too few, these are numbers.
    """
    numbers = numbered_classes(labels)
    if len(names) < len(numbers):
        return numbers
    counts = Counter(names)
    return [name if counts[name] == 1 else f"{name} ({i})" for i, name in enumerate(names)]


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


def sample_ids(count: int, limit: int) -> list[int]:
    """Which of `count` images are looked into: all up to the limit, else `limit` of them at even distances."""
    return np.linspace(0, count - 1, min(count, limit)).round().astype(np.int64).tolist()
