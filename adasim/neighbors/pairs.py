"""Pair policies: who is whose partner in an epoch. View 1 shows the image, view 2 its partner.

A policy has one method, `partners(epoch, ids=None)`: one image id per image (or per given id), as a pure
function of the memory and of (seed, epoch, id).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from adasim.neighbors.memory import NeighborMemory
from adasim.seeding import uniform


class PairPolicy(Protocol):
    def partners(self, epoch: int, ids: Tensor | None = None) -> Tensor:
        """Partner ids, int64, of all images or of `ids`."""


@dataclass
class Standard:
    """Two views of one image."""

    num_images: int

    def partners(self, epoch: int, ids: Tensor | None = None) -> Tensor:
        return torch.arange(self.num_images) if ids is None else ids.clone()


@dataclass
class Nearest:
    """+NN: always the best match other than the image itself, from the first finished epoch on."""

    memory: NeighborMemory

    def partners(self, epoch: int, ids: Tensor | None = None) -> Tensor:
        return self.memory.nearest_other(ids)


@dataclass
class AdaSim:
    """j* ~ p_win if the image's best match over the window is itself, otherwise a standard pair."""

    memory: NeighborMemory
    tau: float
    seed: int

    def partners(self, epoch: int, ids: Tensor | None = None) -> Tensor:
        return self.memory.draw_partners(epoch, self.tau, self.seed, ids)


@dataclass
class Oracle:
    """With probability q a standard pair, otherwise a random image of the same class (itself allowed).

    q falls linearly from 1 in the first epoch to p in the last.
    """

    labels: Tensor  # (N,)
    epochs: int
    p: float
    seed: int
    _by_class: Tensor = field(init=False)  # image ids sorted by class
    _first: Tensor = field(init=False)  # where each image's class starts in it
    _size: Tensor = field(init=False)  # how many images its class has

    def __post_init__(self) -> None:
        self._by_class = self.labels.argsort(stable=True)
        sizes = torch.bincount(self.labels)
        self._size = sizes[self.labels]
        self._first = (sizes.cumsum(0) - sizes)[self.labels]

    def partners(self, epoch: int, ids: Tensor | None = None) -> Tensor:
        ids = torch.arange(len(self.labels)) if ids is None else ids
        q = 1 + (self.p - 1) * epoch / max(self.epochs - 1, 1)
        u = uniform(self.seed, "oracle", epoch, ids, 2)
        at = self._first[ids] + (u[:, 1] * self._size[ids]).long()
        return torch.where(u[:, 0] < q, ids, self._by_class[at])
