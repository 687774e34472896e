"""Which images a gallery shows: random ones, the paper's two kinds of intriguing ones, or those that are named."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from adasim.explore.collection import Collection
from adasim.gallery import KINDS
from adasim.gallery.opening import Supports
from adasim.util.errors import UserError
from adasim.util.seeding import permutation


@dataclass(frozen=True)
class Picked:
    """The images of a gallery, and in words what they have in common."""

    ids: list[int]
    kind: str
    """One of KINDS, or "picked" for images that were named."""
    title: str
    choice: str
    """How many there are to choose from."""


def pick(supports: Supports, asked: str, count: int, seed: int) -> Picked:
    """The images that are asked for: up to `count` of a kind in a random order, or all that are named.

    A greater count adds images and keeps the others. Images of which nothing is known are never chosen.

    Args:
        asked: one of KINDS; or ids and file names, with commas between them.
    """
    total = f"{len(supports.best):,} images"
    if asked not in KINDS:
        ids = named(supports.collection, asked)
        for i in ids:
            if supports.best[i] < 0:
                raise UserError(
                    f"Nothing is known of image {i} ({supports.collection.names[i]}): it could not be read, or has "
                    f"not been looked at yet. Pick another."
                )
        return Picked(ids, "picked", "Images and their support", f"{len(ids):,} of {total}")
    if asked == "other-class" and supports.collection.labels is None:
        raise UserError("--pick other-class needs labels, and these images have none. Use --pick intriguing.")
    among = candidates(supports, asked)
    if not among.any():
        raise UserError(_none(supports, asked))
    order = permutation(seed, "gallery", 0, len(among))
    ids = order[among[order]][:count].tolist()
    found = int(among.sum())
    if asked == "random":
        return Picked(ids, asked, "Random images and their support", f"{len(ids):,} of {total}")
    title = (
        "The best match is another image" if asked == "intriguing" else "The best match is of another class"
    )
    return Picked(ids, asked, title, f"{len(ids):,} of {found:,} such images among {total}")


def candidates(supports: Supports, kind: str) -> Tensor:
    """(N,) bool: which images are of a kind.

    "intriguing": the best match by p_win is another image, so that the gate is shut. "other-class": that best match
    is of another class than the image; both have a label.
    """
    best, known = supports.best, supports.best >= 0
    if kind == "random":
        return known
    if kind == "intriguing":
        return known & (best != torch.arange(len(best)))
    labels = supports.collection.labels
    assert labels is not None
    theirs = labels[best.clamp(min=0)]
    return known & (labels >= 0) & (theirs >= 0) & (theirs != labels)


def named(collection: Collection, asked: str) -> list[int]:
    """The ids that a list names: "3, 17", "cat/01.jpg,cat/02.jpg". A file name may be the end of a path, or have
    more before it, as long as one image alone fits; it may hold commas if it stands alone.
    """
    asked = asked.strip()
    if not re.fullmatch(r"[\d,\s]*", asked) and len(alone := collection.fitting(asked)) == 1:
        return alone
    parts = [part.strip() for part in asked.split(",") if part.strip()]
    if not parts:
        raise UserError(f"--pick names no image. It takes {', '.join(KINDS)}, or ids and file names.")
    return list(dict.fromkeys(_one(collection, part) for part in parts))


def _one(collection: Collection, part: str) -> int:
    if re.fullmatch(r"-?\d+", part, re.ASCII):
        if not 0 <= int(part) < len(collection):
            raise UserError(f"There is no image {part}: ids run from 0 to {len(collection) - 1:,}.")
        return int(part)
    fitting = collection.fitting(part)
    if not fitting:
        raise UserError(
            f"No image is called {part}. --pick takes {', '.join(KINDS)}, or ids and file names with commas between "
            f"them."
        )
    if len(fitting) > 1:
        few = " and ".join(collection.names[i] for i in fitting[:2])
        raise UserError(f"{len(fitting):,} images fit {part}, such as {few}. Name more of the path, or ids.")
    return fitting[0]


def _none(supports: Supports, kind: str) -> str:
    """Why there is no image of a kind."""
    if kind == "random":
        return "Nothing is known of any of these images: none could be read."
    if not supports.windowed:
        return (
            "No image has another one as its best match: features of one view each always match themselves best. "
            "Use --backbone, which compares several views, or --pick random."
        )
    what = "another one" if kind == "intriguing" else "one of another class"
    return f"None of the {len(supports.best):,} images has {what} as its best match. Use --pick random, or name some."
