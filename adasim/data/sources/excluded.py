"""Images left out on request: those that a file of verdicts rejects."""

from __future__ import annotations

import os
from copy import copy
from pathlib import Path

import torch

from adasim.data.images import ImageSet, Subset
from adasim.util.csv import read_csv
from adasim.util.errors import UserError
from adasim.util.terminal import printable, spelled

REJECT = "reject"
"""The verdict that leaves an image out."""


def file_name(images: ImageSet, i: int) -> str:
    """Where image i is, from the data set's folder on; `name[i]` where images are no files."""
    where, folder = images.where(i), images.place.rstrip(os.sep) + os.sep
    inside = images.place and where.startswith(folder)
    return where.removeprefix(folder).lstrip(os.sep) if inside else where


def file_key(images: ImageSet, i: int) -> str:
    """What image i is called in lists: its path below the source, split included, or `name[i]`."""
    name = file_name(images, i)
    return f"{images.split}/{name}" if images.split else name


def read_rejected(path: str | Path) -> set[str]:
    """The names of the images that a file of verdicts rejects."""
    columns, rows = read_csv(Path(path))
    if not {"file", "verdict"} <= set(columns):
        raise UserError(
            f"{path} is no list of verdicts: it has no columns file and verdict. Export one from the page of "
            f"adasim explore."
        )
    return {row["file"] for row in rows if row.get("verdict") == REJECT}


def leave_out(images: ImageSet, verdicts: str | Path | None) -> ImageSet:
    """The images without those that a file of verdicts rejects; all of them where no file is named."""
    return without_rejected(images, read_rejected(verdicts)) if verdicts else images


def without_rejected(images: ImageSet, rejected: set[str]) -> ImageSet:
    """The images that are not rejected. Where none of the names fits, all of them, and `left_out` says so."""
    if not rejected:
        return images
    keys = [file_key(images, i) for i in range(len(images))]
    names = [spelled(key) for key in keys]
    older = rejected.difference(names)  # perhaps written when backslashes were not doubled yet
    kept = torch.tensor(
        [i for i, key in enumerate(keys) if names[i] not in rejected and printable(key) not in older],
        dtype=torch.int64,
    )
    if len(kept) == len(images):
        images, first = copy(images), names[0]
        words = f"they are called like {printable(min(rejected))}, and these like {first}"
        images.left_out = _also(
            images.left_out, f"none of the {len(rejected):,} rejected by verdict ({words})"
        )
        return images
    if not len(kept):
        raise UserError(f"The verdicts reject all {len(images):,} images of {images.name}. Keep some.")
    left = Subset(images, kept)
    left.left_out = _also(images.left_out, f"{len(images) - len(kept):,} rejected by verdict")
    return left


def _also(left_out: str, more: str) -> str:
    return f"{left_out}, {more}" if left_out else more
