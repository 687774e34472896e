"""Images given in Python: a tensor, an array, or any map-style data set of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from adasim.data.decode import UNREADABLE, hash_bytes, reading
from adasim.data.hub import is_rows, open_rows, read_labels
from adasim.data.images import (
    MAX_CLASSES,
    ArrayImages,
    ImageSet,
    Unreadable,
    channels_first,
    distinct_classes,
    match_classes,
    sample_ids,
)
from adasim.data.sources import open_images
from adasim.registry import SOURCES
from adasim.util.errors import UserError
from adasim.util.rgb import to_tensor

KIND = "python"
RESUME_ADVICE = "Hand over the images that the run began with: data=... in Python"
_CHECKED_ITEMS = 8  # items that are read before anything begins
# Where data sets of torchvision, and of people who write theirs alike, have their labels and the names of classes.
_LABELS = ("targets", "labels", "_labels", "y")
_PAIRS = ("_samples", "samples", "_flat_character_images", "index")  # (image, label), or the other way round
_CLASS_NAMES = ("classes", "categories", "all_categories", "_characters")


@runtime_checkable
class Items(Protocol):
    """A map-style data set: torch's `Dataset` with a length, or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: Any, /) -> Any: ...


ImagesLike = str | ImageSet | Tensor | np.ndarray | Dataset[Any] | Items
"""What `as_images` takes."""


def as_images(data: ImagesLike, *, size: int = 32) -> ImageSet:
    """Images of any make as an `ImageSet`.

    Args:
        data: a source string (see `open_images`); an `ImageSet`, which is returned as it is; a tensor or numpy array
            of images, uint8 (N, C, H, W) or (N, H, W), where an array may also be (N, H, W, C); or a map-style data
            set whose items are PIL images, tensors (C, H, W) or (H, W), or arrays that may also be (H, W, C), alone
            or first in a tuple; or a Hugging Face `Dataset`. C is 1 or 3. Floats must lie in 0..1 and are rounded to
            8 bits. The labels of a data set are its list of them, under any name that torchvision has for it, those
            of a `TensorDataset` its second tensor; all items are not read for them, which could take hours. A
            `Subset` and a `ConcatDataset` have those of what they are made of.
        size: side in pixels of the images that the source `synthetic` draws.

    >>> images = as_images(torch.zeros(10, 3, 8, 8, dtype=torch.uint8))
    >>> len(images), tuple(images.load(0).shape)
    (10, (3, 8, 8))
    """
    if isinstance(data, str):
        return open_images(data, size=size)
    if isinstance(data, ImageSet):
        images = data
        images.name = images.name or type(data).__name__
        images.classes = distinct_classes(images.labels, images.classes)
    elif isinstance(data, Tensor | np.ndarray):
        images = _stacked(data, "tensor" if isinstance(data, Tensor) else "array", None)
    elif isinstance(data, TensorDataset) and data.tensors[0].ndim > 2:
        labels = data.tensors[1] if len(data.tensors) > 1 else None
        images = _stacked(data.tensors[0], "tensor", _usable_labels(labels, len(data)))
    elif is_rows(data):
        images = open_rows(f"a {type(data).__name__} in Python", data)
        images.name = type(data).__name__
    elif isinstance(data, Items) and not isinstance(data, Mapping | bytes | IterableDataset):
        images = DatasetImages(data)
    else:
        raise UserError(
            f"data is a {type(data).__name__}, which holds no images by number. Give a source string, an ImageSet, a "
            f"tensor, or a data set with __len__ and __getitem__."
        )
    if not len(images):
        raise UserError(f"There are no images in data ({type(data).__name__}).")
    return images


def source_of(data: ImagesLike) -> str:
    """What stands as `data.source` in the configuration of a run on these images: `python:Tensor`."""
    return data if isinstance(data, str) else f"{KIND}:{type(data).__name__}"


def is_from_python(source: str) -> bool:
    """Whether a run's `data.source` says that its images came from Python."""
    return source.startswith(f"{KIND}:")


@SOURCES.register(KIND)
def refuse_by_name(what: str, *, size: int, split: str, seed: int) -> ImageSet:
    """Such images have a name in the configuration of their run, but nothing can open them by it."""
    raise UserError(
        f"The images {KIND}:{what} were handed over in Python, and no name opens them. Hand them over again, as in "
        f"adasim.pretrain(config, out, data=images, resume=True); an evaluation takes others with --data."
    )


class DatasetImages(ImageSet):
    """A map-style data set of images. In each process one thread at a time asks it, as with a DataLoader."""

    def __init__(self, items: Items) -> None:
        self._items = items
        self._process, self._turn = os.getpid(), threading.Lock()
        self.name = type(items).__name__
        self.place = f"a {self.name} in Python"
        self._check_items(sample_ids(len(items), _CHECKED_ITEMS))
        self.labels, names = _labelled(items)
        self.classes = distinct_classes(self.labels, names)

    def __len__(self) -> int:
        return len(self._items)

    def load(self, i: int) -> Tensor:
        with reading(self.where(i)):  # somebody else's code: it raises anything, too
            return self._read(i).expand(3, -1, -1)

    def listing(self) -> list[str]:
        return [f"items {len(self)}"]

    def content(self, i: int, whole: bool = False) -> str:
        try:
            pixels = self.load(i)
        except Unreadable:
            return UNREADABLE
        return hash_bytes(f"{tuple(pixels.shape)}".encode() + pixels.contiguous().numpy().tobytes())

    def cache_key(self) -> str:
        # Nothing but its items tells whether a data set is still the same.
        return hash_bytes("".join([self.fingerprint(), *map(self.content, range(len(self)))]).encode())

    def _read(self, i: int) -> Tensor:
        if self._process != os.getpid():  # forked, perhaps while another thread had its turn
            self._process, self._turn = os.getpid(), threading.Lock()
        with self._turn:
            return _item_pixels(self._items[int(i)])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_process": None, "_turn": None}  # a lock cannot be pickled

    def _check_items(self, ids: list[int]) -> None:
        """Refuse what holds no images, which would else end in a quarantine of all, and what is random."""
        first = [self.content(i) for i in ids]
        if ids and set(first) == {UNREADABLE}:
            try:
                self.load(ids[0])
            except Unreadable as problem:
                raise UserError(
                    f"The items of {self.name} are no images: {problem}. Let each be a PIL image, or a uint8 tensor "
                    f"(C, H, W), alone or first in a tuple."
                ) from None
        if first != [self.content(i) for i in ids]:
            raise UserError(
                f"{self.name} gives another image each time it is asked for the same one. Leave random transforms "
                f"out of it: training views are cut and coloured by adasim."
            )


def _stacked(data: Tensor | np.ndarray, name: str, labels: Tensor | None) -> ArrayImages:
    """All images in one tensor."""
    shape = tuple(data.shape)
    try:
        pixels = channels_first(_to_8_bits(data), either=isinstance(data, np.ndarray))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"data of shape {shape} and type {data.dtype} cannot be used: {error}. Give uint8 of shape "
            f"(N, C, H, W) or (N, H, W), with C of 1 or 3."
        ) from None
    images = ArrayImages(name, pixels, labels)
    images.place = f"{'an' if name == 'array' else 'a'} {name} in Python"
    return images


def _item_pixels(item: Any) -> Tensor:
    """One item as uint8 (C, H, W). Raises ValueError or TypeError."""
    if isinstance(item, Mapping):  # a row of a Hugging Face data set
        item = next((value for value in item.values() if isinstance(value, Image.Image)), item)
    if isinstance(item, tuple | list) and item:
        item = item[0]
    if isinstance(item, Image.Image):
        return to_tensor(item)
    if not isinstance(item, Tensor | np.ndarray):
        raise ValueError(f"a {type(item).__name__} is no image")
    pixels = _to_8_bits(item)
    if pixels.ndim not in (2, 3):
        raise ValueError(f"an image has no shape {tuple(pixels.shape)}")
    return channels_first(pixels[None], either=isinstance(item, np.ndarray))[0]


def _to_8_bits(data: Tensor | np.ndarray) -> Tensor:
    pixels = torch.as_tensor(data).detach().cpu()
    if pixels.is_floating_point():
        if pixels.numel() and not (pixels.min() >= 0 and pixels.max() <= 1):
            raise ValueError(
                f"floats must lie in 0..1, and these go from {float(pixels.min()):.3g} to {float(pixels.max()):.3g} "
                f"(leave a normalisation out)"
            )
        return (pixels * 255).round().to(torch.uint8)
    if pixels.dtype != torch.uint8:
        raise ValueError(f"{pixels.dtype} is neither uint8 nor floats in 0..1")
    return pixels


def _labelled(items: Any) -> tuple[Tensor | None, list[str]]:
    """A data set's labels (N,), if it keeps a list of them, and the names of its classes; [] where it has none."""
    if is_rows(items):
        return read_labels(items)
    if isinstance(items, Subset):
        labels, names = _labelled(items.dataset)
        return None if labels is None else labels[torch.as_tensor(items.indices, dtype=torch.int64)], names
    if isinstance(items, ConcatDataset):
        members: list[Any] = items.datasets
        return _joined([_labelled(member) for member in members if len(member)])
    labels = _listed_labels(items)
    lists = (getattr(items, name, None) for name in _CLASS_NAMES)
    classes = next((x for x in lists if isinstance(x, list | tuple)), ())
    # torchvision's ImageNet has all words for a class in a tuple.
    words = [", ".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in classes]
    return labels, distinct_classes(labels, words) if words else []


def _joined(parts: list[tuple[Tensor | None, list[str]]]) -> tuple[Tensor | None, list[str]]:
    """The labels of several data sets one after another. Where all have names for their classes, these decide: 3
    here need not be 3 there."""
    labels = [part for part, _ in parts if part is not None]
    if not parts or len(labels) < len(parts):
        return None, []
    if not all(names for _, names in parts):
        return torch.cat(labels), []
    known = list(dict.fromkeys(name for _, names in parts for name in names))
    matched = [match_classes(part, names, known) for part, (_, names) in zip(labels, parts, strict=True)]
    return torch.cat(matched), known


def _listed_labels(items: Any) -> Tensor | None:
    """The first list of a data set that can be its labels, and that some of its items agree with.

    One by the name of `targets` or `labels` is trusted where items have nothing to compare with.
    """
    if isinstance(items, TensorDataset):
        return _usable_labels(items.tensors[1] if len(items.tensors) > 1 else None, len(items))
    for name in (*_LABELS, *_PAIRS):
        listed = getattr(items, name, None)
        columns: list[Any] = [listed]
        if name in _PAIRS:
            pairs = listed if isinstance(listed, list) else []
            paired = all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
            columns = list(zip(*pairs, strict=True)) if paired else []
        for labels in (_usable_labels(column, len(items)) for column in columns):
            agrees = False if labels is None else _agrees(items, labels)
            if agrees or (agrees is None and name in _LABELS[:2]):
                return labels
    return None


def _agrees(items: Any, labels: Tensor) -> bool | None:
    """Whether some of the items, (image, label), have these labels; None if they have none to compare with."""
    agrees = None
    for i in sample_ids(len(labels), _CHECKED_ITEMS):
        with suppress(Exception):  # not readable, or no number
            item = items[i]
            if isinstance(item, tuple | list) and len(item) > 1:
                if int(item[1]) != int(labels[i]):
                    return False  # renumbered on the way
                agrees = True
    return agrees


def _usable_labels(listed: Any, count: int) -> Tensor | None:
    """As int64 (N,), if they are whole numbers that can be classes; -1, no label, may be among them."""
    if listed is None:
        return None
    try:
        labels = torch.as_tensor(listed)
    except (TypeError, ValueError, RuntimeError):  # words, lists of boxes
        return None
    whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if labels.shape != (count,) or not count or not whole:
        return None
    usable = labels.min() >= -1 and 0 <= labels.max() < MAX_CLASSES
    return labels.detach().cpu().to(torch.int64) if usable else None
