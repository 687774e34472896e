"""What can be measured of features without labels: retrieval of augmented views, near duplicates."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import normalize

from adasim.eval.tensors import check_features
from adasim.neighbors import search

_BLOCK = 1024  # images compared with all others at a time


class Retrieval(NamedTuple):
    """Percent of the views whose own image is the nearest, or among the five nearest."""

    top1: float
    top5: float


class Duplicates(NamedTuple):
    """Pairs of images that are nearly alike."""

    pairs: int
    """How many."""
    nearest: list[tuple[int, int, float]]
    """Some of them, the most similar first: the two rows and their cosine similarity."""
    mean: float
    """Mean cosine similarity of all pairs, near duplicates or not; NaN of a single image."""


def view_retrieval(views: Any, images: Any, own: Any) -> Retrieval:
    """Search each view's own image among all images by cosine similarity.

    Args:
        views: (M, D) features of augmented views.
        images: (N, D) features of the images.
        own: (M,) which row of `images` each view is of.
    """
    views, images = check_features(views, "views"), check_features(images, "images")
    own = torch.as_tensor(own)
    found = search(normalize(views, dim=1), normalize(images, dim=1), 5)[1]  # (M, 5)
    hits = found == own[:, None]
    return Retrieval(*(100 * float(hits[:, :k].any(1).double().mean()) for k in (1, 5)))


def near_duplicates(features: Any, above: float, shown: int = 5) -> Duplicates:
    """All pairs of rows of the features (N, D) whose cosine similarity is at least `above`."""
    rows = normalize(check_features(features, "features"), dim=1)
    count, total = 0, 0.0
    nearest: list[tuple[int, int, float]] = []
    for first in range(0, len(rows), _BLOCK):
        block = rows[first : first + _BLOCK] @ rows[first:].T  # (b, N - first)
        later = torch.ones_like(block, dtype=torch.bool).triu_(1)  # each pair once
        total += float(block[later].double().sum())
        i, j = (later & (block >= above)).nonzero(as_tuple=True)
        count += len(i)
        best = block[i, j].argsort(descending=True, stable=True)[:shown]
        nearest += [
            (first + int(a), first + int(b), float(block[a, b]))
            for a, b in zip(i[best], j[best], strict=True)
        ]
    pairs = len(rows) * (len(rows) - 1) // 2
    nearest.sort(key=lambda pair: -pair[2])
    return Duplicates(count, nearest[:shown], total / pairs if pairs else float("nan"))
