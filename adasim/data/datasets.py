"""Data sets of other libraries: Hugging Face's (`hf:NAME`), torchvision's, and any map-style data set of torch."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from adasim.data.images import (
    MAX_CLASSES,
    ImageSet,
    channels_first,
    distinct_classes,
    match_classes,
    sample_ids,
)
from adasim.registry import SOURCES
from adasim.util.errors import MissingSplitError, UserError
from adasim.util.rgb import (
    UNREADABLE,
    Reduction,
    Unreadable,
    decode_file,
    hash_bytes,
    hash_file,
    open_regular,
    reading,
    to_tensor,
)

_CHECKED_ITEMS = 8  # items that are read before anything begins
_HIDDEN = (None, -1, "")  # what Hugging Face's data sets have in place of a label that is not told
_COLUMN_NAMES = ("label", "labels", "class", "target", "category")  # of columns that are no ClassLabel
# Where data sets of torchvision, and of people who write theirs alike, have their labels and the names of classes.
_LABELS = ("targets", "labels", "_labels", "y")
_PAIRS = ("_samples", "samples", "_flat_character_images", "index")  # (image, label), or the other way round
_CLASS_NAMES = ("classes", "categories", "all_categories", "_characters")


# ---- Hugging Face ----


class HuggingFaceImages(ImageSet):
    """One split of a Hugging Face data set, decoded on demand. The image column is found by its type.

    Args:
        place: where it comes from, for people.
        rows: the split.
        split: its name.
        others: the data set's other splits.
    """

    def __init__(self, place: str, rows: Any, split: str = "", others: dict[str, Any] | None = None) -> None:
        import datasets

        columns = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]
        if not columns:
            raise UserError(f"{place} has no image column: its columns are {', '.join(rows.features)}.")
        self.name, self.place, self.split = Path(place.removeprefix("hf:")).name, place, split
        self._others = others or {}
        self.other_splits = {name: len(rows) for name, rows in self._others.items()}
        self._mark, self._image = rows._fingerprint, columns[0]
        # Undecoded: the library would open files of every format that PIL knows.
        self._rows = rows.with_format(None).cast_column(self._image, datasets.Image(decode=False))
        self.labels, names = _column_labels(rows)
        self.classes = distinct_classes(self.labels, names)

    def __len__(self) -> int:
        return len(self._rows)

    def load(self, i: int) -> Tensor:
        return self.load_reduced(i, None)[0]

    def load_reduced(self, i: int, reduction: Reduction | None) -> tuple[Tensor, int]:
        with reading(self.where(i)):
            stored = self._rows[int(i)][self._image]
            data = stored["bytes"]
            with open_regular(stored["path"]) if data is None else io.BytesIO(data) as file:
                return decode_file(file, reduction)

    def listing(self) -> list[str]:
        return [f"{self.name} {len(self)} rows, fingerprint {self._mark}"]

    def content(self, i: int, whole: bool = False) -> str:
        try:
            stored = self._rows[int(i)][self._image]
        except Exception:  # a damaged table; loading the image will say why
            return UNREADABLE
        data = stored["bytes"]
        return hash_file(stored["path"], whole) if data is None else hash_bytes(data)

    def cache_key(self) -> str:
        states = [os.stat(file["filename"]) for file in self._rows.cache_files]
        marks = [(state.st_size, state.st_mtime_ns, state.st_ctime_ns) for state in states]
        return hash_bytes(f"{self.fingerprint()} {marks}".encode())

    def more_splits(self, known: set[str]) -> list[ImageSet]:
        others = {split: rows for split, rows in self._others.items() if split not in known}
        return [HuggingFaceImages(self.place, rows, s) for s, rows in others.items() if _is_labelled(rows)]


@SOURCES.register("hf")
def open_hub(name: str, *, size: int, split: str, seed: int) -> ImageSet:
    """`hf:NAME`, a data set of the Hugging Face hub, or `hf:FOLDER`, one that was saved to disk."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"hf:{name} needs the datasets library: pip install 'adasim[hf]'.") from None
    try:
        opened = datasets.load_from_disk(name) if os.path.isdir(name) else datasets.load_dataset(name)
    except Exception as error:
        raise UserError(f"hf:{name} cannot be opened: {error}") from None
    if not isinstance(opened, datasets.DatasetDict):
        if split == "test":
            raise MissingSplitError(
                f"hf:{name} is one split without test images. Save a DatasetDict with train and test."
            )
        return HuggingFaceImages(f"hf:{name}", opened)
    wanted = ("train",) if split == "train" else ("test", "validation", "valid", "val")
    there = [key for key in wanted if key in opened]
    if not there:
        raise MissingSplitError(f"hf:{name} has no {split} split, only {', '.join(opened)}.")
    # Public data sets often hide the labels of `test`, and hold labelled images beside it.
    key = next((key for key in there if _is_labelled(opened[key])), there[0])
    others = {other: rows for other, rows in opened.items() if other != key}
    return HuggingFaceImages(f"hf:{name}", opened[key], key, others)


def is_hugging_face(data: Any) -> bool:
    """Whether this is a Hugging Face data set; the library is not imported for it."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(data, library.Dataset)


def _label_column(rows: Any) -> str | None:
    """The first column of class labels; else one of words or whole numbers that is named like labels."""
    import datasets

    plain: dict[str, str] = {}
    for name, kind in rows.features.items():
        if isinstance(kind, datasets.ClassLabel):
            return str(name)
        if isinstance(kind, datasets.Value) and ("int" in kind.dtype or "string" in kind.dtype):
            plain[name.lower()] = name
    return next((plain[name] for name in _COLUMN_NAMES if name in plain), None)


def _is_labelled(rows: Any) -> bool:
    """Whether the first rows have labels."""
    column = _label_column(rows)
    return column is not None and not set(rows.select_columns(column)[:100][column]) <= set(_HIDDEN)


def _column_labels(rows: Any) -> tuple[Tensor | None, list[str]]:
    """The labels (N,), -1 for a hidden one, and the names of the classes, if they have names."""
    column = _label_column(rows)
    if column is None:
        return None, []
    values = rows.with_format(None)[column][:]
    names = list(getattr(rows.features[column], "names", []))
    known = sorted({value for value in values if value not in _HIDDEN})
    if not names and not known:
        return None, []
    number = {value: value for value in known}
    if not names and (isinstance(known[0], str) or known[0] < 0 or known[-1] >= MAX_CLASSES):
        number, names = {value: c for c, value in enumerate(known)}, [str(value) for value in known]
    return torch.tensor([number.get(value, -1) for value in values], dtype=torch.int64), names


# ---- torch ----


class DatasetImages(ImageSet):
    """A map-style data set of images, or a list of them. One thread at a time asks it, as with a DataLoader."""

    def __init__(self, items: Any) -> None:
        self._items, self._turn = items, threading.Lock()
        self.name = type(items).__name__
        self.place = f"a {self.name} in Python"
        self._check_items(sample_ids(len(items), _CHECKED_ITEMS))
        self.labels, names = labels_of(items)
        self.classes = distinct_classes(self.labels, names)

    def __len__(self) -> int:
        return len(self._items)

    def load(self, i: int) -> Tensor:
        with reading(self.where(i)), self._turn:  # somebody else's code: it raises anything, too
            return _item_pixels(self._items[int(i)]).expand(3, -1, -1)

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

    def _check_items(self, ids: list[int]) -> None:
        """Refuse what holds no images, which would else end in a quarantine of all, and what is random."""
        first, again = [self.content(i) for i in ids], [self.content(i) for i in ids]
        try:
            if set(first) == {UNREADABLE}:
                self.load(ids[0])
        except Unreadable as problem:
            raise UserError(
                f"The items of {self.name} are no images: {problem}. Let each be a PIL image, or a uint8 tensor "
                f"(C, H, W), alone or first in a tuple."
            ) from None
        if first != again:
            raise UserError(
                f"{self.name} gives another image each time it is asked for the same one. Leave random transforms "
                f"out of it: training views are cut and coloured by adasim."
            )


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
    return channels_first(to_8_bits(item)[None], channels_last=isinstance(item, np.ndarray))[0]


def to_8_bits(data: Tensor | np.ndarray) -> Tensor:
    """uint8, or floats in 0..1, as uint8. Raises ValueError."""
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


def labels_of(items: Any) -> tuple[Tensor | None, list[str]]:
    """A data set's labels (N,), if it keeps a list of them, and the names of its classes; [] where it has none."""
    if is_hugging_face(items):
        return _column_labels(items)
    if isinstance(items, Subset):
        labels, names = labels_of(items.dataset)
        return None if labels is None else labels[torch.as_tensor(items.indices, dtype=torch.int64)], names
    if isinstance(items, ConcatDataset):
        members: list[Any] = items.datasets
        return _joined([labels_of(member) for member in members if len(member)])
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
    """The first list of a data set that can be its labels, and that some of its items, (image, label), agree with.

    One by the name of `targets` or `labels` is trusted where items have nothing to compare with.
    """
    if isinstance(items, TensorDataset):
        return _usable_labels(items.tensors[1] if len(items.tensors) > 1 else None, len(items))
    told: dict[int, int] = {}
    for i in sample_ids(len(items), _CHECKED_ITEMS):
        with suppress(Exception):  # not readable, or no number
            item = items[i]
            if isinstance(item, tuple | list) and len(item) > 1:
                told[i] = int(item[1])
    for name in (*_LABELS, *_PAIRS):
        columns: list[Any] = [getattr(items, name, None)]
        if name in _PAIRS:
            pairs = columns[0] if isinstance(columns[0], list) else []
            paired = all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
            columns = list(zip(*pairs, strict=True)) if paired else []
        for labels in (_usable_labels(column, len(items)) for column in columns):
            if labels is None or not (told or name in _LABELS[:2]):
                continue
            if all(labels[i] == label for i, label in told.items()):  # else renumbered on the way
                return labels
    return None


def _usable_labels(listed: Any, count: int) -> Tensor | None:
    """As int64 (N,), if they are whole numbers that can be classes; -1, no label, may be among them."""
    try:
        labels = torch.as_tensor(listed)
    except (TypeError, ValueError, RuntimeError):  # None, words, lists of boxes
        return None
    whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    usable = labels.shape == (count,) and count and whole and labels.min() >= -1
    return labels.detach().cpu().to(torch.int64) if usable and 0 <= labels.max() < MAX_CLASSES else None
