"""The two timings of the neighbour memory: when partners are drawn, and when features are observed.

`previous`, as released: all partners of an epoch are drawn at its start, from the epochs before it, so that both
views are prepared ahead; features are observed around the optimiser's step. `current`, Algorithm 1 as printed: an
image is observed first, and its partner drawn right after that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from adasim.data import Batch, PairLoader
from adasim.dist.devices import image_layout
from adasim.methods import EncodedView, Method, Step
from adasim.neighbors import PairPolicy, ShardedMemory


class Forward(NamedTuple):
    """A forward pass: the batch with its partners, what was computed, and the seconds it waited for data."""

    batch: Batch
    step: Step
    waited: float = 0.0


@dataclass
class Previous:
    """Partners come from the epochs before; also for runs without a memory."""

    method: Method
    loader: PairLoader
    policy: PairPolicy
    memory: ShardedMemory | None

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """The epoch's batches from step `start` on."""
        return self.loader.epoch(epoch, self.policy.partners(epoch), start)

    def forward(self, batch: Batch, views: list[Tensor], epoch: int) -> Forward:
        return Forward(batch, self.method(views, epoch))

    def observe(self, ids: Tensor, feature: Tensor) -> Callable[[], object]:
        """Send a batch's features to the memory, before the backward pass, which hides their journey; the call that
        is returned, after the optimiser's step, searches the cache and then writes into it."""
        return _nothing if self.memory is None else self.memory.observe_async(ids, feature)


class Current(Previous):
    """Partners come from a window that includes this epoch: each is drawn after its image's own forward pass."""

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        themselves = torch.arange(len(self.loader.images))
        return self.loader.epoch(epoch, themselves, start, first_only=True)

    def forward(self, batch: Batch, views: list[Tensor], epoch: int) -> Forward:
        """View 1, the memory, the partner, and only then view 2, which is made while the student is busy."""
        assert self.memory is not None
        first = self.method.encode(views[0])
        self.memory.observe(batch.ids, first.feature)
        partners = self.policy.partners(epoch, batch.ids.cpu())
        pending = self.loader.fetch(epoch, batch.ids, partners)
        others = [EncodedView(view) for view in views[1:]]  # local crops
        for encoded in (first, *others):
            self.method.predict(encoded)
        start = time.perf_counter()
        view = pending.result()
        waited = time.perf_counter() - start
        second = self.method.encode(view.contiguous(memory_format=image_layout(view.device)))
        self.method.predict(second)
        step = self.method.loss([first, second, *others], epoch)
        return Forward(batch._replace(partners=partners.to(batch.ids.device)), step, waited)

    def observe(self, ids: Tensor, feature: Tensor) -> Callable[[], object]:
        return _nothing  # the forward pass has done it


def build_timing(
    method: Method, loader: PairLoader, policy: PairPolicy, memory: ShardedMemory | None
) -> Previous:
    """The timing that the memory was made for."""
    kind = Current if memory is not None and memory.timing == "current" else Previous
    return kind(method, loader, policy, memory)


def _nothing() -> None:
    pass
