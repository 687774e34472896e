"""Surprising images, whose own best match is another one, and lonely ones, which are nobody's neighbour."""

from __future__ import annotations

import torch
from torch import Tensor

from adasim.explore.support import Support


def surprising(support: Support) -> tuple[Tensor, Tensor]:
    """Ids of images whose best match is another image, and by how much its probability exceeds theirs; most first."""
    excess = support.p[:, 0] - support.self_match()
    ids = (excess > 0).nonzero()[:, 0]
    order = excess[ids].argsort(descending=True, stable=True)
    return ids[order], excess[ids[order]]


def popularity(support: Support) -> Tensor:
    """(N,): in how many other images' supports an image stands."""
    listed = support.neighbours[~support.is_self() & (support.neighbours >= 0) & (support.p > 0)]
    return torch.bincount(listed, minlength=len(support))


def lonely(support: Support, distances: Tensor) -> Tensor:
    """Ids of images in nobody's support, the farthest from its nearest other image first.

    Args:
        distances: (N,), to the nearest other image; where it is not finite the image could not be looked at, and
            is left out.
    """
    ids = ((popularity(support) == 0) & torch.isfinite(distances)).nonzero()[:, 0]
    return ids[distances[ids].argsort(descending=True, stable=True)]
