"""The support of every image: its neighbours and their probabilities p_win, from whatever is at hand.

Everything the explorer says about neighbours and labels is computed from these two tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from adasim.neighbors import NeighborMemory
from adasim.neighbors.search import QuantizedRows, search
from adasim.neighbors.window import on_grid

WIDTH = 32
"""Neighbours of an image that are kept at most: the window's union may hold w K of them."""
NEAREST = 30
"""Nearest images by features that are kept of each: the voters on its label."""
_CHUNK = 8192
_QUERIES = 512  # images whose neighbours are looked up at once


@dataclass(frozen=True)
class Support:
    """Neighbours (N, S) int64, best first and padded with -1, and their probabilities (N, S) fp64."""

    neighbours: Tensor
    p: Tensor

    def __len__(self) -> int:
        return len(self.neighbours)

    def is_self(self) -> Tensor:
        """(N, S): where an image stands in its own support."""
        return self.neighbours == torch.arange(len(self))[:, None]

    def self_match(self) -> Tensor:
        """(N,): the probability that an image is its own match; NaN where nothing is known of it."""
        own = (self.p * self.is_self()).sum(1)
        return torch.where((self.neighbours >= 0).any(1), own, torch.nan)

    def best(self, k: int) -> Support:
        """The k best of each image alone, so that their probabilities sum to 1 again."""
        return Support(*_at_most(k, self.neighbours, self.p))

    def others(self) -> Tensor:
        """(N, S): the probabilities without the image itself, so that they sum to 1 again; all 0 where it is alone.

        An image always agrees with its own label: that part says nothing.
        """
        p = self.p * (~self.is_self() & (self.neighbours >= 0))
        return p / p.sum(1, keepdim=True).clamp(min=1e-300)


def support_of_memory(
    memory: NeighborMemory,
    tau: float,
    *,
    form: Literal["topk", "union"] = "union",
    width: int | None = WIDTH,
) -> Support:
    """p_win over the window's lists, by default over their union (the paper's printed form), the `width` best of each
    image."""
    parts = [
        _at_most(width, *memory.distribution(ids, tau, form))
        for ids in torch.arange(memory.num_images).split(_CHUNK)
    ]
    return _stacked(parts)


def support_of_features(nearest: Nearest, k: int = 10, tau: float = 0.2) -> Support:
    """p_win with a window of one: an image, which is its own best match, and its k nearest others."""
    return Support(*_one_view(nearest, 0, k, tau))


def with_more(support: Support, nearest: Nearest, tau: float = 0.2) -> Support:
    """Supports of further images, found by one comparison of features, below those that a window gave.

    They get as many neighbours as the first images have in the middle, so that neither are more certain by that.

    Args:
        support: of the first images, which stay as they are.
        nearest: of all images, the first ones included.
    """
    k = max(1, int((support.neighbours >= 0).sum(1).median()) - 1)
    return _stacked([(support.neighbours, support.p), _one_view(nearest, len(support), k, tau)])


@dataclass(frozen=True)
class Nearest:
    """The nearest other images of each, the nearest first: cosine distances (N, K) and ids (N, K), inf and -1 as
    padding."""

    distances: Tensor
    ids: Tensor


def nearest_others(
    features: Tensor, k: int = NEAREST, advance: Callable[[int], None] = lambda count: None
) -> Nearest:
    """Compare every image with every other, once. A row that is not finite has no neighbours and is nobody's."""
    unit = unit_rows(features)
    all_finite = bool(torch.isfinite(unit[:, 0]).all())
    quantized = QuantizedRows(unit) if all_finite and len(unit) > _CHUNK else None
    k = min(k, max(0, len(unit) - 1))
    distances, ids = torch.full((len(unit), k), torch.inf), torch.full((len(unit), k), -1)
    for block in torch.arange(len(unit)).split(_QUERIES) if k else ():
        similarities, found = search(
            unit[block], unit, k + 1, quantized=quantized, row_norm=1.0 if all_finite else None
        )
        own = found == block[:, None]
        own[:, -1] |= ~own.any(1)  # among more equal images than there are places an image may miss itself
        found, similarities = (of[~own].view(len(block), k) for of in (found, similarities))
        distances[block] = torch.where(found >= 0, (1 - similarities).clamp(min=0), torch.inf)
        ids[block] = found
        advance(len(block))
    return Nearest(distances, ids)


def unit_rows(features: Tensor) -> Tensor:
    """L2-normalised rows on the grid of the memory, on which inner products are exact; others become NaN."""
    features = features.float()
    valid = torch.isfinite(features).all(1, keepdim=True)
    return torch.where(valid, on_grid(F.normalize(torch.where(valid, features, 0.0), dim=1)), torch.nan)


def _one_view(nearest: Nearest, first: int, k: int, tau: float) -> tuple[Tensor, Tensor]:
    """Neighbours and p_win of the images from `first` on: themselves and the k nearest others."""
    distances, ids = nearest.distances[first:, :k], nearest.ids[first:, :k]
    known = (ids >= 0).any(1) if ids.shape[1] else torch.ones(len(ids), dtype=torch.bool)
    own = torch.where(known, torch.arange(first, first + len(ids)), -1)
    neighbours = torch.cat([own[:, None], ids], 1)
    logits = -F.pad(distances.double(), (1, 0)).div(tau).masked_fill(neighbours < 0, torch.inf)
    return neighbours, torch.softmax(logits, 1).nan_to_num(0.0)  # NaN: a row without any


def _at_most(width: int | None, neighbours: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    if width is None or neighbours.shape[1] <= width:
        return neighbours, p
    neighbours, p = neighbours[:, :width], p[:, :width]
    return neighbours, p / p.sum(1, keepdim=True).clamp(min=1e-300)


def _stacked(parts: list[tuple[Tensor, Tensor]]) -> Support:
    width = max(neighbours.shape[1] for neighbours, _ in parts)
    return Support(
        torch.cat([F.pad(ids, (0, width - ids.shape[1]), value=-1) for ids, _ in parts]),
        torch.cat([F.pad(p, (0, width - p.shape[1])) for _, p in parts]),
    )
