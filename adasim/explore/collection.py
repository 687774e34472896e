"""All images of an exploration under one numbering, the training images first, then the test images; and features
that somebody else made, put in that order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adasim.data import ImageSet
from adasim.data.sources import file_key
from adasim.util.errors import UserError
from adasim.util.terminal import printable, spelled


@dataclass
class Collection:
    """Image sets side by side, with labels in one numbering."""

    sets: list[ImageSet]
    splits: list[str]
    """What each set is called."""
    names: list[str]
    """Of every image: its path below the source, `spelled`."""
    split_of: list[int]
    """The number of every image's set."""
    labels: Tensor | None
    """(N,) int64; -1 where a set has none. None where no set has."""
    classes: list[str]

    def __len__(self) -> int:
        return len(self.names)

    def place(self, i: int) -> tuple[ImageSet, int]:
        """The set of image i, and its number there."""
        number = self.split_of[i]
        return self.sets[number], i - sum(len(images) for images in self.sets[:number])

    def class_name(self, i: int) -> str:
        """The label of image i in words; "" where it has none."""
        label = -1 if self.labels is None else int(self.labels[i])
        return self.classes[label] if label >= 0 else ""

    def fitting(self, text: str) -> list[int]:
        """Images of exactly that name; else those whose path ends in it, or that it ends in.

        The name is a file's own, or as lists spell it.
        """
        text = text.removeprefix("./")
        return self._fitting(spelled(text)) or self._fitting(printable(text))

    def _fitting(self, text: str) -> list[int]:
        exact = self._by_name.get(text)
        if exact:
            return exact
        alike = self._by_last_part.get(text.rpartition("/")[2], [])
        return [i for i in alike if self.names[i].endswith(f"/{text}") or text.endswith(f"/{self.names[i]}")]

    @cached_property
    def _by_name(self) -> dict[str, list[int]]:
        return _places(self.names)

    @cached_property
    def _by_last_part(self) -> dict[str, list[int]]:
        return _places([name.rpartition("/")[2] for name in self.names])

    def fingerprint(self) -> str:
        """The same for the same images, labels and splits: verdicts belong to it."""
        parts = [
            f"{split} {images.fingerprint()}" for split, images in zip(self.splits, self.sets, strict=True)
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _places(names: Sequence[str]) -> dict[str, list[int]]:
    """{name: where it stands}"""
    places: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        places.setdefault(name, []).append(i)
    return places


def collect(sets: Sequence[ImageSet], splits: Sequence[str] = ("train", "test")) -> Collection:
    """Put image sets side by side. Classes are matched by name, in the order in which they appear."""
    names: list[str] = []
    split_of: list[int] = []
    number: dict[str, int] = {}
    labels: list[Tensor] = []
    for place, images in enumerate(sets):
        names += [spelled(file_key(images, i)) for i in range(len(images))]
        split_of += [place] * len(images)
        if images.labels is None:
            labels.append(torch.full((len(images),), -1))
        else:
            numbers = [number.setdefault(printable(name), len(number)) for name in images.classes]
            table = torch.tensor([*numbers, -1])
            labels.append(table[images.labels])
    known = any(images.labels is not None for images in sets)
    return Collection(
        list(sets),
        list(splits[: len(sets)]),
        names,
        split_of,
        torch.cat(labels) if known else None,
        list(number),
    )


# ---- features that somebody else made ----


def given_features(file: Path, collection: Collection, data: str, say: Callable[[str], None]) -> Tensor:
    """A row (D,) for each image of `data`; NaN, which `say` is told, for images that the file does not name."""
    features, files = read_features(file)
    if files:
        features = _placed(features, files, collection, file, data)
    elif len(features) != len(collection):
        train = collection.sets[0]
        divided = train.split and os.path.isdir(train.place)
        alone = f" For training images alone: --data {train.place}" if divided else ""
        raise UserError(
            f"{file} has {len(features):,} features and {data} {len(collection):,} images. One row per image is "
            f"needed, in the order of the images: training images first, then test images, each by name; or an array "
            f"files that names the image of each row.{alone}"
        )
    missing = (~torch.isfinite(features).all(1)).nonzero()[:, 0].tolist()
    if len(missing) == len(features):
        raise UserError(f"{file} has not one row of finite features. Make them anew.")
    if missing:
        first = collection.names[missing[0]]
        say(f"{file} has no features of {len(missing):,} images, such as {first}: they get no neighbours.")
    return features


def _placed(features: Tensor, files: list[str], collection: Collection, file: Path, data: str) -> Tensor:
    """Rows (N, D) in the order of the images, by the names of their files; NaN where an image has none."""
    row_of: dict[int, int] = {}
    for row, name in enumerate(files):
        known, fitting = printable(name), collection.fitting(name)
        if not fitting:
            raise UserError(
                f"Row {row:,} of {file} is of {known}, which is not among the images of {data}: these are features "
                f"of other images. Make them anew, or restore the images."
            )
        if len(fitting) > 1:
            few = " and ".join(collection.names[i] for i in fitting[:2])
            raise UserError(
                f"Row {row:,} of {file} is of {known}, and {len(fitting):,} images of {data} fit, such as {few}. "
                f"Name more of the paths in its array files, or one split alone with --data."
            )
        before = row_of.setdefault(fitting[0], row)
        if before != row:
            raise UserError(
                f"Rows {before:,} and {row:,} of {file} are both of {collection.names[fitting[0]]}. Leave one out."
            )
    placed = torch.full((len(collection), features.shape[1]), torch.nan)
    placed[list(row_of)] = features  # in the order of the rows
    return placed


def read_features(file: Path) -> tuple[Tensor, list[str]]:
    """The two-dimensional array `features` (or the only one that there is) of an .npz or .npy file; and which image
    each row is of, if an array `files` of names says so, as `adasim embed` writes it with the
    `split` that they are of."""
    try:
        held: Any = np.load(file, allow_pickle=False)
        if isinstance(held, np.ndarray):
            arrays = {"features": held}
        else:
            with held:
                arrays = {name: held[name] for name in held.files}
    except Exception as error:  # a damaged archive raises nearly anything
        reason = getattr(error, "strerror", None) or "it is no .npz file of plain arrays"
        raise UserError(f"{file} cannot be read: {reason}.") from None
    tables = {
        name: array
        for name, array in arrays.items()
        if array.ndim == 2 and array.shape[1] and array.dtype.kind in "fiu"
    }
    name = "features" if "features" in tables else next(iter(tables), "")
    if not name or (name != "features" and len(tables) > 1):
        there = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "nothing"
        raise UserError(
            f"{file} holds {there}. Features are needed as an array (images, width) named features."
        )
    features = tables[name]
    names: list[str] = []
    if (files := arrays.get("files")) is not None:
        if files.dtype.kind not in "US" or files.shape != features.shape[:1]:
            raise UserError(
                f"The array files of {file} has shape {files.shape} and type {files.dtype}. One name for each "
                f"of the {len(features):,} rows of {name} is needed; or leave it out."
            )
        split = arrays.get("split", np.array(""))
        before = f"{split}/" if split.shape == () and str(split) else ""
        names = [before + (os.fsdecode(name) if isinstance(name, bytes) else name) for name in files.tolist()]
    return torch.from_numpy(np.ascontiguousarray(features, dtype=np.float32)), names
