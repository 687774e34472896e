"""ShardedMemory: the neighbour memory spread over the processes of a run, with the same answers bit for bit.

Rank r of R holds the contiguous rows [r N / R, (r+1) N / R) of cache and history. An observation is

    gather    every rank's ids and queries go to all                              B (D + 1) words
    search    each rank finds the K best of its own rows for all B queries
    swap      each query's R lists go to the rank that asked, which merges them   2 B K words
    gather    the merged lists go to all; the owners of the images keep them      2 B K words

(B counts the queries of all ranks; a rank receives (R-1)/R of these words, 4 bytes each.) Partners are drawn
by the owners, and only their ids travel. Nobody holds more than a share of the rows and buffers of these sizes.

Scores are exact in any order of summation (see `search`), so how the rows are split cannot change a list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from adasim.dist.collectives import Exchange
from adasim.dist.devices import to_device
from adasim.neighbors.arithmetic import merge
from adasim.neighbors.memory import Ids, NeighborMemory, SupportKind, checked_ids


def shard(num_images: int, rank: int, world: int) -> range:
    """The images whose rows `rank` of `world` holds."""
    return range(rank * num_images // world, (rank + 1) * num_images // world)


class ShardedMemory(NeighborMemory):
    """A NeighborMemory of which this process holds a share; in a single process, all of it.

    Every method is collective: all ranks call it, in the same order. `observe`, `distribution` and the draws
    take this rank's own ids (any number of them) and return their results; where an image stands in the batches of
    two ranks, the higher rank's counts, as the later place does in one process. `state_dict`, `epoch_lists` and
    `rows` are this rank's share; `load_parts` takes the shares of any other number of ranks.

    Args:
        num_images, dim, window, k: as for NeighborMemory.
        group: the processes to share with; by default all of them, or none if torch.distributed is not in use.
        options: support, timing, dtype, device, as for NeighborMemory.
    """

    def __init__(
        self,
        num_images: int,
        dim: int,
        window: int,
        k: int,
        *,
        group: ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.exchange = Exchange(group)
        rows = shard(num_images, self.exchange.rank, self.exchange.world)
        super().__init__(num_images, dim, window, k, rows=rows, **options)

    def observe(self, ids: Ids, features: Tensor) -> tuple[Tensor, Tensor]:
        """Look up this rank's part of a batch in the whole cache, then write the batch into it."""
        return self.observe_async(ids, features)()

    @torch.no_grad()
    def observe_async(self, ids: Ids, features: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Begin to observe: queries are sent now, and the call that is returned does the rest.

        What runs in between (the backward pass) hides the largest of the transfers. Neither cache nor lists
        change before the second call, which may be left out: then nothing was observed.
        """
        ids, queries = self._prepare(ids, features)
        if self.exchange.world == 1:
            return lambda: self._observe(ids, queries)
        sent = to_device(ids, queries.device, torch.int32)
        words = torch.cat([sent[:, None], queries.view(torch.int32)], 1)
        counts = self.exchange.counts(len(ids))
        arrive = self.exchange.gather_async(_padded(words, max(counts)))  # -1 is NaN as fp32

        def finish() -> tuple[Tensor, Tensor]:
            everyone = arrive().to(self.cache.device)
            lists = self._observe(everyone[:, 0].long(), everyone[:, 1:].view(torch.float32))
            own = slice(self.exchange.rank * max(counts), self.exchange.rank * max(counts) + len(ids))
            return lists[0][own], lists[1][own]

        return finish

    def _lookup(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Similarities and image ids of the K best rows of all ranks."""
        similarities, neighbours = super()._lookup(queries)  # of the rows held here
        if self.exchange.world == 1:
            return similarities, neighbours
        lists = torch.stack([similarities.view(torch.int32), neighbours.int()], 1)  # (B, 2, K)
        mine = self.exchange.swap(lists.unflatten(0, (self.exchange.world, -1)))  # (R, B/R, 2, K)
        mine = mine.permute(1, 2, 0, 3).flatten(2)  # (B/R, 2, R K)
        best = merge(mine[:, 0].view(torch.float32), mine[:, 1], self.k)
        lists = self.exchange.gather(torch.stack([best[0].view(torch.int32), best[1]], 1))
        lists = lists.to(self.cache.device)
        return lists[:, 0].view(torch.float32), lists[:, 1].long()

    def distribution(self, ids: Ids, tau: float, support: SupportKind | None = None) -> tuple[Tensor, Tensor]:
        """p_win of each image, from its owner; S is the widest of all ranks' batches."""
        if self.exchange.world == 1 or tau == 0:
            return super().distribution(ids, tau, support)
        p_win = super().distribution

        def of_equal_width(held: Tensor) -> list[Tensor]:
            neighbours, p = p_win(held, tau, support)
            wider = (0, max(self.exchange.counts(p.shape[1])) - p.shape[1])
            return [F.pad(neighbours.int(), wider, value=-1), F.pad(p, wider)]

        neighbours, p = self._ask_owners(ids, of_equal_width)
        return neighbours.long(), p

    def draw_partners(self, epoch: int, tau: float, seed: int, ids: Ids | None = None) -> Tensor:
        """One partner id per image (of all N, or of `ids`), drawn by the images' owners."""
        draw = super().draw_partners
        return self._one_id_each(ids, lambda some: draw(epoch, tau, seed, some))

    def nearest_other(self, ids: Ids | None = None) -> Tensor:
        """The best match other than the image itself in the newest list, from the images' owners."""
        return self._one_id_each(ids, super().nearest_other)

    def features(self, ids: Ids) -> Tensor:
        """The cached features of this rank's `ids`, from the images' owners."""
        if self.exchange.world == 1:
            return super().features(ids)
        cached = super().features
        return self._ask_owners(ids, lambda held: [cached(held).cpu()])[0].to(self.cache.device)

    def _one_id_each(self, ids: Ids | None, answer: Callable[[Ids | None], Tensor]) -> Tensor:
        """`answer` from the rank that holds an image; without `ids`, for all N images."""
        world = self.exchange.world
        if world == 1:
            return answer(ids)
        if ids is not None:
            return self._ask_owners(ids, lambda held: [answer(held).int()])[0].long()
        shares = [shard(self.num_images, rank, world) for rank in range(world)]
        longest = max(map(len, shares))
        answers = self.exchange.gather(_padded(answer(None).int(), longest)).view(world, longest)
        return torch.cat([a[: len(share)] for a, share in zip(answers, shares, strict=True)]).cpu().long()

    def _ask_owners(self, ids: Ids, answer: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """The rows of `answer` for this rank's `ids`, each from the rank that holds the image."""
        ids = checked_ids(ids, self.num_images).cpu()
        counts = self.exchange.counts(len(ids))
        own = slice(start := self.exchange.rank * max(counts), start + len(ids))
        everyone = self.exchange.gather(_padded(ids.int(), max(counts))).cpu().long()
        held = (everyone >= self.rows.start) & (everyone < self.rows.stop)
        found = []
        for part in answer(everyone[held]):
            # Each row has one owner: among the others' lowest numbers the maximum is the owner's, unchanged.
            lowest = -torch.inf if part.is_floating_point() else -1
            rows = part.new_full((len(everyone), *part.shape[1:]), lowest)
            rows[held] = part
            found.append(self.exchange.maximum(rows)[own])
        return found


def _padded(x: Tensor, length: int) -> Tensor:
    """x (n, ...) with rows of -1 behind it."""
    return torch.cat([x, x.new_full((length - len(x), *x.shape[1:]), -1)])
