"""Pairs for a `DataLoader` of your own: partners travel to its workers with the index, so they never go stale.

    pairs = PairDataset(images, transform)
    loader = DataLoader(pairs, batch_size=128, sampler=PairSampler(memory, tau=0.2), num_workers=4,
                        persistent_workers=True)
    for epoch in range(epochs):
        for ids, view_1, view_2 in loader:      # the sampler draws the epoch's partners here
            ...
            memory.observe(ids, features_of_view_1)
        memory.end_epoch()

A data set that holds the partners itself is copied into the workers once; with `persistent_workers=True` partners
that are assigned later never reach them, and nothing shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset, Sampler

from adasim.neighbors.memory import NeighborMemory
from adasim.util import seeding


class PairSampler(Sampler[tuple[int, int]]):
    """(image id, partner id) of all images in a new random order for every epoch.

    Partners are drawn when an epoch begins, in the process that trains. Order and partners are a function of the
    seed and of the memory's state alone, so a loop that restores the memory goes on with the same epochs.

    Args:
        memory: whose partners to draw; `memory.epochs` is the epoch that comes next.
        tau: temperature of p_win; 0 means standard pairs.
        seed: random seed of order and partners.
        rank, world: this process takes every `world`-th image, all processes equally many.
    """

    def __init__(
        self, memory: NeighborMemory, tau: float, seed: int = 0, *, rank: int = 0, world: int = 1
    ) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} must be at least 0 and below world={world}")
        self.memory, self.tau, self.seed, self.rank, self.world = memory, tau, seed, rank, world

    def __len__(self) -> int:
        return self.memory.num_images // self.world

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = self.memory.epochs
        partners = self.memory.draw_partners(epoch, self.tau, self.seed)
        order = seeding.permutation(self.seed, "order", epoch, self.memory.num_images)
        mine = order[self.rank : len(self) * self.world : self.world]
        return zip(mine.tolist(), partners[mine].tolist(), strict=True)


class PairDataset(Dataset[tuple[int, Any, Any]]):
    """Turns an index (i, j) into (i, view 1 of image i, view 2 of image j); use it with a `PairSampler`.

    Args:
        images: any map-style data set; of items like (image, label) the first entry is the image.
        first: makes view 1 of an image.
        second: makes view 2; by default `first`.
    """

    def __init__(
        self, images: Any, first: Callable[[Any], Any], second: Callable[[Any], Any] | None = None
    ) -> None:
        self.images, self.first, self.second = images, first, second or first

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, pair: tuple[int, int]) -> tuple[int, Any, Any]:
        if not isinstance(pair, tuple):
            raise TypeError(f"PairDataset is indexed by (image, partner), got {pair!r}. Give a PairSampler.")
        i, j = pair
        image = self._image(i)
        partner = image if j == i else self._image(j)
        return i, self.first(image), self.second(partner)

    def _image(self, i: int) -> Any:
        item = self.images[i]
        return item[0] if isinstance(item, tuple | list) else item
