"""Hugging Face datasets: the image column is found by its type, and so are the labels."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adasim.data.decode import UNREADABLE, decode_file, hash_bytes, hash_file, open_regular, reading
from adasim.data.images import MAX_CLASSES, ImageSet, Reduction, distinct_classes
from adasim.registry import SOURCES
from adasim.util.errors import MissingSplitError, UserError
from adasim.util.terminal import few

_HIDDEN = (None, -1, "")  # what stands for a label that is not told
_LABEL_NAMES = ("label", "labels", "class", "target", "category")  # of columns that are no ClassLabel


class HuggingFaceImages(ImageSet):
    """One split of a Hugging Face data set, decoded on demand."""

    def __init__(self, name: str, rows: Any, image: str) -> None:
        import datasets

        self.name = name
        # Undecoded: the library would open files of every format that PIL knows.
        self._rows = rows.with_format(None).cast_column(image, datasets.Image(decode=False))
        self._mark = rows._fingerprint
        self._image = image
        self.others: dict[str, Any] = {}  # the rows of the data set's other splits
        self.labels, names = read_labels(rows)
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

    def more_splits(self, known: set[str]) -> list[ImageSet]:
        others = {split: rows for split, rows in self.others.items() if split not in known}
        return [open_rows(self.place, rows, split) for split, rows in others.items() if _is_labelled(rows)]

    def unused(self, also: Collection[str] = ()) -> str:
        counts = [f"{len(rows):,} in {split}" for split, rows in self.others.items() if split not in also]
        return f"{few(counts)} are not among them" if counts else ""

    def content(self, i: int, whole: bool = False) -> str:
        try:
            stored = self._rows[int(i)][self._image]
            data = stored["bytes"]
            return hash_file(stored["path"], whole) if data is None else hash_bytes(data)
        except Exception:  # a damaged table; loading the image will say why
            return UNREADABLE

    def cache_key(self) -> str:
        states = [os.stat(file["filename"]) for file in self._rows.cache_files]
        marks = [(state.st_size, state.st_mtime_ns, state.st_ctime_ns) for state in states]
        return hash_bytes(f"{self.fingerprint()} {marks}".encode())


def _is_labelled(rows: Any) -> bool:
    """Whether the first rows have labels."""
    column = _label_column(rows)
    return column is not None and any(
        label not in _HIDDEN for label in rows.select_columns(column)[:100][column]
    )


def _label_column(rows: Any) -> str | None:
    """The first column of class labels; else one of words or whole numbers that is named like labels."""
    import datasets

    plain = {
        name.lower(): name
        for name, feature in rows.features.items()
        if isinstance(feature, datasets.Value) and ("int" in feature.dtype or "string" in feature.dtype)
    }
    named = [plain[name] for name in _LABEL_NAMES if name in plain]
    return next(iter([*_columns(rows, datasets.ClassLabel), *named]), None)


def is_rows(data: Any) -> bool:
    """Whether this is a Hugging Face data set; the library is not imported for it."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(data, library.Dataset)


def read_labels(rows: Any) -> tuple[Tensor | None, list[str]]:
    """The labels (N,), -1 for a hidden one, and the names of the classes, if they have names."""
    column = _label_column(rows)
    if column is None:
        return None, []
    values = rows.with_format(None)[column][:]
    names = getattr(rows.features[column], "names", [])
    known = sorted({value for value in values if value not in _HIDDEN})
    number = {value: value for value in known}
    if not names and not known:
        return None, []
    if not names and (isinstance(known[0], str) or known[0] < 0 or known[-1] >= MAX_CLASSES):
        number, names = {value: c for c, value in enumerate(known)}, [str(value) for value in known]
    return torch.tensor([number.get(value, -1) for value in values], dtype=torch.int64), list(names)


def _columns(rows: Any, kind: type) -> list[str]:
    return [name for name, feature in rows.features.items() if isinstance(feature, kind)]


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
    part, others = "", {}
    if isinstance(opened, datasets.DatasetDict):
        wanted = ("train",) if split == "train" else ("test", "validation", "valid", "val")
        there = [k for k in wanted if k in opened]
        # Public data sets often hide the labels of `test`, and hold labelled images beside it.
        key = next((k for k in there if _is_labelled(opened[k])), there[0] if there else None)
        if key is None:
            raise MissingSplitError(f"hf:{name} has no {split} split, only {', '.join(opened)}.")
        others = {k: rows for k, rows in opened.items() if k != key}
        opened, part = opened[key], key
    elif split == "test":
        raise MissingSplitError(
            f"hf:{name} is one split without test images. Save a DatasetDict with train and test."
        )
    return open_rows(f"hf:{name}", opened, part, others)


def open_rows(
    place: str, rows: Any, part: str = "", others: dict[str, Any] | None = None
) -> HuggingFaceImages:
    """The images and labels of one split."""
    import datasets

    images = _columns(rows, datasets.Image)
    if not images:
        raise UserError(f"{place} has no image column: its columns are {', '.join(rows.features)}.")
    name = Path(place.removeprefix("hf:")).name
    split = HuggingFaceImages(name, rows, images[0])
    split.place, split.split, split.others = place, part, others or {}
    return split
