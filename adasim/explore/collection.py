"""All images of an exploration under one numbering: the training images first, then the test images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from adasim.data import ImageSet, leave_out, open_images
from adasim.data.sources.excluded import file_key
from adasim.util.errors import MissingSplitError, UserError
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
    found: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        found.setdefault(name, []).append(i)
    return found


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


def open_collection(source: str, *, size: int, say: Callable[[str], None]) -> Collection:
    """The images of a source: its training and its test split, or all of them where it is not divided."""
    sets = [open_images(source, size=size)]
    test = open_test(source, size=size, say=say)
    return collect([*sets, test] if test is not None else sets)


def open_test(
    source: str, *, size: int, exclude: str | None = None, say: Callable[[str], None]
) -> ImageSet | None:
    """The test images of a source, if it has any, without those that the verdicts in `exclude` reject; where they
    cannot be opened, `say` is told why."""
    try:
        return leave_out(open_images(source, size=size, split="test"), exclude)
    except MissingSplitError:
        return None
    except UserError as error:
        say(f"Without the test images: {error}")
        return None
