"""What is measured on: labelled training and test images, whose classes are matched by name."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from adasim.data import ImageSet, describe, leave_out, open_images
from adasim.data.images import match_classes
from adasim.data.masks import open_masked
from adasim.util import seeding
from adasim.util.errors import MissingSplitError, UserError
from adasim.util.terminal import few

Source = str | ImageSet
"""What a person names, or images that are there already."""

_TEST_SHARE = 5  # one image in five is held out when a data set has no test split


@dataclass
class Split:
    """Training and test images; both may be the same data set with different ids."""

    name: str
    train: ImageSet
    test: ImageSet
    train_ids: Tensor
    test_ids: Tensor
    note: str | None = None  # a sentence on how the split came about, where nobody asked for it

    def fingerprint(self) -> str:
        """A hash of the images, their labels and the split."""
        digest = hashlib.sha256()
        digest.update(self.train.fingerprint().encode() + self.train_ids.numpy().tobytes())
        digest.update(self.test.fingerprint().encode() + self.test_ids.numpy().tobytes())
        return digest.hexdigest()

    def sentences(self) -> list[str]:
        """What images these are, what was left out, and how they were divided, if nobody said."""
        if self.test is self.train:
            return [describe(self.train, used=()), *filter(None, [self.note])]
        return [describe(images, used=None) for images in (self.train, self.test)]


def open_split(
    data: Source | None,
    train: Source | None,
    test: Source | None,
    *,
    size: int,
    seed: int = 0,
    masks: bool = False,
    exclude: Path | None = None,
) -> Split:
    """`data`'s own train and test split, or the two sources named instead; else one image in five is held out.

    Args:
        size: side of the images that `synthetic` draws.
        seed: random seed of the images held out.
        masks: images with masks, whose labels do not matter; without it each image must have a label.
        exclude: a file of verdicts, whose rejected images are left out.
    """
    source = data if train is None else train
    if source is None and test is not None:
        raise UserError(f"--test {data_name(test)} needs --train or --data beside it.")
    if source is None:
        things = "images and masks" if masks else "images"
        raise UserError(f"Which {things}? Name them with --data, or with --train and --test.")

    def opened(source: Source, split: str) -> ImageSet:
        if masks and isinstance(source, str):
            return leave_out(open_masked(source, size=size, split=split), exclude)
        images = open_source(source, size=size, split=split, exclude=exclude)
        if masks and images.mask(0) is None:
            raise UserError(f"{images.name} has no masks, which this evaluation needs.")
        if not masks:
            require_labels(images)
        return images

    images, name = opened(source, "train"), data_name(source)
    try:
        held = opened(source if test is None else test, "test")
    except MissingSplitError as error:
        if test is None:
            train_ids, test_ids = hold_out(None if masks else images.labels, len(images), seed)
            note = f"{error} Here {len(test_ids)} of the {len(images)} images are held out at random as test images."
            return Split(name, images, images, train_ids, test_ids, note)
        if test == source:
            raise
        held = opened(test, "train")  # a source that is not divided is test images as a whole
    name = name if test is None else f"{name} to {data_name(test)}"
    return Split(name, images, held, torch.arange(len(images)), torch.arange(len(held)))


def open_source(source: Source, *, size: int, split: str = "train", exclude: Path | None = None) -> ImageSet:
    """The images of a name (see `open_images`), or those given, which are training images.

    What the verdicts in `exclude` reject is left out.
    """
    if isinstance(source, str):
        return leave_out(open_images(source, size=size, split=split), exclude)
    if split == "test":
        raise MissingSplitError(f"{source.name} has no test images of its own.")
    return leave_out(source, exclude)


def open_all(source: Source, *, size: int, exclude: Path | None = None) -> list[ImageSet]:
    """All splits of a source: its training and test images, and what else there is."""
    splits = [open_source(source, size=size)]
    with suppress(MissingSplitError):  # not divided: all of it is there already
        splits.append(open_source(source, size=size, split="test"))
    splits += splits[0].more_splits({images.split for images in splits})
    return [leave_out(images, exclude) for images in splits]


def hold_out(
    labels: Tensor | None, count: int, seed: int, way_out: str = "Name test images with --test."
) -> tuple[Tensor, Tensor]:
    """Ids of four fifths and one fifth of the images, class by class; a class below five images only trains."""
    order = seeding.permutation(seed, "held out", 0, count)
    groups = torch.zeros(count, dtype=torch.int64) if labels is None else labels
    held = torch.zeros(count, dtype=torch.bool)
    for group in groups.unique():
        members = order[groups[order] == group]
        held[members[: len(members) // _TEST_SHARE]] = True
    if not held.any():
        raise UserError(f"Every class has fewer than five images, too few to hold one out. {way_out}")
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


def require_labels(images: ImageSet) -> Tensor:
    """The labels; images without any are refused."""
    if images.labels is None:
        raise UserError(
            f"{images.name} has no labels, which this evaluation needs. Sort the images into one folder per "
            f"class, or give an .npz file with labels; or measure what needs none: adasim eval views."
        )
    return images.labels


def match_test_labels(split: Split, labels: Tensor, train_labels: Tensor) -> Tensor:
    """The test images' labels in the training set's numbering; a class that training never shows is refused."""
    if missing := int((labels < 0).sum()):
        raise UserError(
            f"{missing:,} of the {len(labels):,} test images of {split.test.name} have no label. Name labelled ones "
            f"with --test."
        )
    matched = match_classes(labels, split.test.classes, split.train.classes)
    unseen = labels[~torch.isin(matched, train_labels)].unique().tolist()
    if not unseen:
        return matched
    known = split.train.classes
    if {name.count("/") for name in split.test.classes} != {name.count("/") for name in known}:
        raise UserError(
            f"The class folders of the test images, such as {split.test.classes[unseen[0]]!r}, nest otherwise than "
            f"those of the training images, such as {known[0]!r}. Lay out both in the same way."
        )
    names = few([repr(split.test.classes[label]) for label in unseen], 5)
    raise UserError(
        f"The test images show {'classes' if len(unseen) > 1 else 'the class'} {names} that no training image has. "
        f"Leave those images out, or train on a split with every class."
    )


def data_name(source: Source) -> str:
    """A short name for tables: `photos` for /data/photos/ and photos.npz, `cifar10` for hf:user/cifar10."""
    if isinstance(source, ImageSet):
        return source.name
    if source.partition(":")[0] == "synthetic":
        return source
    return Path(source.removeprefix("hf:")).name.removesuffix(".npz") or source
