"""NeighborMemory: the feature cache, the history of top-K lists, and the partners drawn from them.

memory = NeighborMemory(num_images, dim, window=10, k=3)
for epoch in range(epochs):
    partners = memory.draw_partners(epoch, tau=0.2, seed=0)   # (N,): whose view is view 2 of image i
    for ids in batches:
        ...                                                   # views of ids and of partners[ids], a step
        memory.observe(ids, features_of_view_1)
    memory.end_epoch()
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from operator import index
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from adasim.neighbors.arguments import Ids, check_tau, checked_ids
from adasim.neighbors.means import MeanFeatures
from adasim.neighbors.precision import exact_device
from adasim.neighbors.quantized import QuantizedRows
from adasim.neighbors.search import search
from adasim.neighbors.window import Ranker, on_grid, softmax_of_sums
from adasim.seeding import uniform

_CHUNK = 512  # images whose windows are ranked at once
_TOO_COARSE = (
    "torch.float16, as adasim 0.1 kept similarities: too coarse for the gate where features crowd. "
    "Begin with a new memory"
)
_INT8_FROM = 1 << 24  # elements of the cache from which an int8 copy pays


class NeighborMemory:
    """One feature per image, and each image's nearest neighbours over the last epochs.

    Args:
        num_images: N; ids run from 0 to N-1.
        dim: D, the width of the features.
        window: w, how many epochs of lists are averaged.
        k: K, the length of a list and, with support="topk", of the distribution.
        support: "topk", the K best of the window's union, as in the released code; "union", all of it, as
            printed in the paper.
        timing: "previous", the window is the w epochs before the current one, as in the released code;
            "current", it includes the current epoch (the paper's Algorithm 1), so an image's partner can be
            drawn once it has been observed.
        dtype: of the cache; by default fp16 on an accelerator and fp32 on a CPU.
        device: of the cache; a device without fp64 (Apple's mps) leaves it on the CPU. The history stays in
            main memory.
        rows: the images whose features and lists are held here, all by default; `ShardedMemory` gives each
            process its own. Neighbours are then found, and partners drawn, among and for these alone.
        mean_decay: keep a running mean of each image's features too, with this decay per epoch (`MeanFeatures`).
        lists: whether neighbours are looked up at all. Without, an image's list holds the image alone, k must be 1,
            and an observation costs next to nothing: for policies that need the means alone.

    >>> memory = NeighborMemory(num_images=4, dim=2, window=1, k=2)
    >>> features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    >>> for epoch in range(2):
    ...     _ = memory.observe(torch.arange(4), features)
    ...     memory.end_epoch()
    >>> memory.distribution(torch.tensor([0]), tau=0.2)[0]
    tensor([[0, 1]])
    """

    def __init__(
        self,
        num_images: int,
        dim: int,
        window: int,
        k: int,
        *,
        support: Literal["topk", "union"] = "topk",
        timing: Literal["previous", "current"] = "previous",
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rows: range | None = None,
        mean_decay: float | None = None,
        lists: bool = True,
    ) -> None:
        num_images, dim, window, k = map(index, (num_images, dim, window, k))
        if not 1 <= k <= num_images:
            raise ValueError(f"k={k} must be between 1 and the number of images, {num_images}")
        if not lists and k != 1:
            raise ValueError(f"k={k} must be 1 in a memory without lists")
        if window < 1 or dim < 1:
            raise ValueError(f"window={window} and dim={dim} must be at least 1")
        if num_images >= 2**31:
            raise ValueError(f"num_images={num_images} must be below 2^31: ids are kept as int32")
        if support not in ("topk", "union") or timing not in ("previous", "current"):
            raise ValueError(f"unknown support={support!r} or timing={timing!r}")
        rows = range(num_images) if rows is None else rows
        if rows.step != 1 or not 0 <= rows.start <= rows.stop <= num_images:
            raise ValueError(f"rows={rows} must be a range within the {num_images} images")
        device = exact_device(device)
        self.num_images, self.dim, self.window, self.k = num_images, dim, window, k
        self.support, self.timing, self.rows, self.lists = support, timing, rows, lists
        dtype = dtype or (torch.float32 if device.type == "cpu" else torch.float16)
        self.cache = torch.zeros(len(rows), dim, dtype=dtype, device=device)
        # A ring over epochs, one row per image so that drawing reads memory in order; -1 is an empty place.
        self.history_ids = torch.full((len(rows), window, k), -1, dtype=torch.int32)
        # fp32: 16 bits cannot tell similarities near 1 apart.
        self.history_similarities = torch.zeros(len(rows), window, k)
        # The epoch in progress.
        self.current_ids = torch.full((len(rows), k), -1, dtype=torch.int32)
        self.current_similarities = torch.zeros(len(rows), k)
        self.means: MeanFeatures | None = None
        if mean_decay is not None:
            self.means = MeanFeatures(num_images, rows, dim, mean_decay, device)
        self.epochs = 0  # finished ones
        self._observing = False
        self._quantized: QuantizedRows | None = None

    def __repr__(self) -> str:
        cache = f"{str(self.cache.dtype).removeprefix('torch.')} cache on {self.cache.device}"
        held = (
            "" if len(self.rows) == self.num_images else f", images {self.rows.start} to {self.rows.stop - 1}"
        )
        return (
            f"{type(self).__name__}(num_images={self.num_images}, dim={self.dim}, window={self.window}, "
            f"k={self.k}: {self.epochs} epochs finished, {cache}{held})"
        )

    def to(self, device: torch.device | str) -> Self:
        """Move the cache to a device (the CPU, if that has no fp64); the history stays in main memory."""
        self.cache = self.cache.to(exact_device(device))
        if self.means is not None:
            self.means.values = self.means.values.to(self.cache.device)
        self._quantized = None
        self._refresh_int8()
        return self

    # ---- the epoch ----

    @torch.no_grad()
    def observe(self, ids: Ids, features: Tensor) -> tuple[Tensor, Tensor]:
        """Look up the neighbours of a batch in the cache, then write the batch into it.

        The order is what makes the gate work: image i is compared with its own row of the epoch before.

        Args:
            ids: (B,) image ids: a tensor of any integer type, an array or a list. If one stands twice, its
                last place counts.
            features: (B, D), the encoder's features of view 1; they are L2-normalised here. A row that is not
                finite is skipped: it changes neither cache nor lists.

        Returns:
            similarities (B, K) fp32 and neighbours (B, K) int64, best first.
        """
        ids, queries = self._prepare(ids, features)
        similarities, neighbours = self._lookup(queries) if self.lists else itself(ids, queries)
        self._write(ids, queries, similarities, neighbours)
        return similarities, neighbours

    def end_epoch(self) -> None:
        """Let this epoch's lists join the window. An image that was not observed adds an empty list.

        Raises:
            RuntimeError: nothing was observed since the last call. The window would lose an epoch for nothing.
        """
        if not self._observing:
            raise RuntimeError(
                f"end_epoch() without observe(): nothing was observed since epoch {self.epochs} began. "
                f"Call end_epoch once, after all batches of an epoch."
            )
        if self.means is not None:
            self.means.update(self.cache, self.current_ids[:, 0] >= 0)
        slot = self.epochs % self.window
        self.history_ids[:, slot] = self.current_ids
        self.history_similarities[:, slot] = self.current_similarities
        self.current_ids.fill_(-1)
        self.current_similarities.zero_()
        self.epochs += 1
        self._observing = False
        self._refresh_int8()

    # ---- the distribution ----

    def distribution(self, ids: Ids, tau: float) -> tuple[Tensor, Tensor]:
        """p_win of each image: neighbour ids (B, S) int64 and probabilities (B, S) fp64, best first.

        Padding is -1 and 0. S is K, or with support="union" the largest union of the batch. tau=0 puts all
        probability on the image itself.
        """
        check_tau(tau)
        ids = checked_ids(ids, self.num_images).cpu()
        if tau == 0:
            return ids[:, None], torch.ones(len(ids), 1, dtype=torch.float64)
        return self._distribution(self._places(ids), tau)

    def draw_partners(self, epoch: int, tau: float, seed: int, ids: Ids | None = None) -> Tensor:
        """One partner id per image, int64: j* ~ p_win if the image's best match is itself, else the image.

        The identity while fewer than w epochs are finished, and for tau=0. A pure function of the history and
        of (seed, epoch, id): drawing for a few `ids` gives what drawing for all would.

        Args:
            epoch: the epoch that is about to begin (or is in progress), counted from 0: `memory.epochs`.
            tau: temperature of p_win; the paper uses 0.2.
            seed: random seed.
            ids: the images to draw for; all by default.
        """
        check_tau(tau)
        if index(epoch) != self.epochs:
            raise ValueError(
                f"epoch={epoch}, but this memory has finished {self.epochs} epochs: epochs count from 0, each ends "
                f"with end_epoch(), and a loop that is resumed loads the memory's state, too"
            )
        partners = self._held() if ids is None else checked_ids(ids, self.num_images).cpu().clone()
        if tau == 0 or self.epochs < self.window:
            return partners
        u = uniform(seed, "partner", epoch, partners)  # (N, 1)
        for start in range(0, len(partners), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            own = partners[chunk]
            neighbours, p = self._distribution(chunk if ids is None else self._places(own), tau)
            gate = neighbours[:, 0] == own
            at = (p.cumsum(1) <= u[chunk]).sum(1).clamp_(max=p.shape[1] - 1)
            drawn = neighbours.gather(1, at[:, None])[:, 0]
            partners[chunk] = torch.where(gate & (drawn >= 0), drawn, own)
        return partners

    def nearest_other(self, ids: Ids | None = None) -> Tensor:
        """The best match other than the image itself in the newest list (+NN); itself if there is none."""
        ids = self._held() if ids is None else checked_ids(ids, self.num_images).cpu()
        if self.epochs == 0:
            return ids.clone()
        places = self._places(ids)
        if self.timing == "current" and self._observing:
            lists = self.current_ids[places].long()  # (B, K), best first
        else:
            lists = self.history_ids[places, (self.epochs - 1) % self.window].long()
        other = (lists != ids[:, None]) & (lists >= 0)
        best = lists.gather(1, other.int().argmax(1, keepdim=True))[:, 0]
        return torch.where(other.any(1), best, ids)

    def best_other(self, partners: Tensor) -> Tensor:
        """The candidate with the largest p_win other than `partners`, for each image held here; -1 if there is none.

        With the partners j* of the epoch this is the paper's second neighbour. tau does not change who is best.
        """
        best = torch.full_like(partners, -1)
        for start in range(0, len(partners), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            candidates, _ = self._ranked(chunk)  # (C, S), best first
            other = (candidates != partners[chunk, None]) & (candidates >= 0)
            found = candidates.gather(1, other.int().argmax(1, keepdim=True))[:, 0]
            best[chunk] = torch.where(other.any(1), found, -1)
        return best

    # ---- state ----

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, as tensors that share memory with this object."""
        means = {} if self.means is None else {"means": self.means.values}
        return means | {
            "cache": self.cache,
            "current_ids": self.current_ids,
            "current_similarities": self.current_similarities,
            "history_ids": self.history_ids,
            "history_similarities": self.history_similarities,
            "epochs": torch.tensor(self.epochs),
            "observing": torch.tensor(self._observing),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a state of the same shape; raises ValueError naming the first difference."""
        mine = self.state_dict()
        for name, tensor in mine.items():
            if name not in state or state[name].shape != tensor.shape:
                got = tuple(state[name].shape) if name in state else "nothing"
                raise ValueError(f"memory state {name}: expected {tuple(tensor.shape)}, got {got}")
            if name.endswith("similarities") and state[name].dtype == torch.float16:
                raise ValueError(f"memory state {name} is {_TOO_COARSE}")
        self.load_parts([(self.rows.start, state)])

    def load_parts(self, parts: Iterable[tuple[int, dict[str, Tensor]]]) -> None:
        """Take over the states of memories that held other ranges of rows, as another number of processes does.

        Args:
            parts: the first image of each state, and the state; one at a time is looked at. What they hold of
                this memory's rows is copied, the rest ignored; a tensor they do not name stays as it is.

        Raises:
            ValueError: a tensor has another shape, or a row of this memory is in none of the parts.
        """
        covered = torch.zeros(len(self.rows), dtype=torch.bool)
        mine = self.state_dict()
        for first, state in parts:
            for name in mine.keys() & state.keys():
                if mine[name].ndim == 0:
                    mine[name].copy_(state[name])
                else:
                    covered[self._copy_rows(mine[name], first, state[name], name)] = True
        if not covered.all():
            raise ValueError(f"no part of the state holds image {self.rows[int((~covered).int().argmax())]}")
        self.epochs = int(mine["epochs"])
        self._observing = bool(mine["observing"])
        self._refresh_int8()

    def epoch_lists(self, epoch: int) -> dict[str, Tensor]:
        """The lists of one finished epoch of the window, as `load_epoch_lists` takes them."""
        slot = epoch % self.window
        return {
            "ids": self.history_ids[:, slot].contiguous(),
            "similarities": self.history_similarities[:, slot].contiguous(),
        }

    def load_epoch_lists(self, epoch: int, lists: dict[str, Tensor], first: int = 0) -> None:
        """Put one epoch's lists back; `first` is the image of their first row."""
        if lists["similarities"].dtype == torch.float16:
            raise ValueError(f"the lists of epoch {epoch} are {_TOO_COARSE}")
        slot = epoch % self.window
        self._copy_rows(self.history_ids[:, slot], first, lists["ids"], "ids")
        self._copy_rows(self.history_similarities[:, slot], first, lists["similarities"], "similarities")

    # ---- parts ----

    def _prepare(self, ids: Ids, features: Tensor) -> tuple[Tensor, Tensor]:
        """Ids, and unit-norm queries on the grid, fp32; a row that is not finite becomes NaN throughout."""
        ids = checked_ids(ids, self.num_images)
        features = torch.as_tensor(features)
        if features.shape != (len(ids), self.dim):
            raise ValueError(f"features must be ({len(ids)}, {self.dim}), got {tuple(features.shape)}")
        features = features.detach().to(self.cache.device, torch.float32)
        if features.device.type == "cpu" and math.isfinite(
            features.sum()
        ):  # no row to be skipped, as nearly always
            norms = torch.linalg.vector_norm(features, dim=1, keepdim=True).clamp_(
                min=1e-12
            )  # as F.normalize
            return ids, on_grid(features / norms)
        valid = torch.isfinite(features).all(1, keepdim=True)
        queries = F.normalize(torch.where(valid, features, 0.0), dim=1)
        return ids, torch.where(valid, on_grid(queries), torch.nan)

    def _lookup(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Similarities and image ids of the K best rows held here; a NaN query finds nothing."""
        similarities, places = search(
            queries, self.cache, self.k, quantized=self._quantized, row_norm=1 + 1e-3
        )
        return similarities, torch.where(places >= 0, places + self.rows.start, -1)

    def _write(self, ids: Tensor, queries: Tensor, similarities: Tensor, neighbours: Tensor) -> None:
        """Keep features and lists of the images held here."""
        skipped = torch.isnan(queries[:, 0])
        # The lists are kept in main memory: what decides who is written goes there with them, in one transfer.
        ids, skipped, similarities, neighbours = _on_cpu(ids, skipped, similarities, neighbours)
        batch = self._to_write(ids, skipped)
        places = self._places(ids[batch])
        self.current_ids[places] = neighbours[batch].int()
        # Cosines exceed 1 by rounding at most; -inf pads lists of fewer than K finite rows.
        self.current_similarities[places] = on_grid(similarities[batch].clamp(-1, 1))
        self._observing = True
        if isinstance(batch, slice):
            places = places.to(self.cache.device, non_blocking=True)
        else:
            batch, places = torch.stack([batch, places]).to(self.cache.device, non_blocking=True)
        written = queries[batch].to(self.cache.dtype)
        self.cache[places] = written
        if self._quantized is not None and len(written):
            self._quantized.write(places, written)

    def _to_write(self, ids: Tensor, skipped: Tensor) -> slice | Tensor:
        """Which of a batch to keep: finite ones of images held here; of one that stands twice, the last."""
        if len(ids):
            ascending = np.sort(ids.numpy())
            held = ascending[0] >= self.rows.start and ascending[-1] < self.rows.stop
            distinct = not (ascending[1:] == ascending[:-1]).any()
            if held and distinct and not skipped.any():
                return slice(None)  # all, as nearly always where there is one process
        kept = (ids >= self.rows.start) & (ids < self.rows.stop) & ~skipped
        batch = kept.nonzero()[:, 0]
        return batch[_last_occurrence(ids[batch])]

    def _held(self) -> Tensor:
        return torch.arange(self.rows.start, self.rows.stop)

    def _places(self, ids: Tensor) -> Tensor:
        """Where the images' rows stand in the tensors of this memory."""
        return ids - self.rows.start if self.rows.start else ids

    def _copy_rows(self, mine: Tensor, first: int, theirs: Tensor, name: str) -> slice:
        """Copy the images that both tensors hold; returns where they stand in mine."""
        if theirs.shape[1:] != mine.shape[1:]:
            raise ValueError(
                f"memory state {name}: expected rows of {tuple(mine.shape[1:])}, got {tuple(theirs.shape[1:])}"
            )
        start = max(self.rows.start, first)
        stop = max(start, min(self.rows.stop, first + len(theirs)))
        place = slice(start - self.rows.start, stop - self.rows.start)
        mine[place] = theirs[start - first : stop - first]
        return place

    def _distribution(self, places: slice | Tensor, tau: float) -> tuple[Tensor, Tensor]:
        neighbours, sums = self._ranked(places)
        return neighbours, softmax_of_sums(neighbours, sums, self.window, tau)

    def _ranked(self, places: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Candidates and their sums over the window of these places; a slice is read without a copy."""
        lists, similarities = self.history_ids[places], self.history_similarities[places]
        if self.timing == "current" and self._observing:  # the oldest epoch makes room for this one
            lists, similarities = lists.clone(), similarities.clone()
            slot = self.epochs % self.window
            lists[:, slot] = self.current_ids[places]
            similarities[:, slot] = self.current_similarities[places]
        k = self.k if self.support == "topk" else None
        if len(lists) <= _CHUNK:
            return self._ranker.ranked_sums(lists.flatten(1), similarities.flatten(1), k)
        parts = zip(lists.flatten(1).split(_CHUNK), similarities.flatten(1).split(_CHUNK), strict=True)
        ranked = [self._ranker.ranked_sums(part, values, k) for part, values in parts]
        width = max(neighbours.shape[1] for neighbours, _ in ranked)
        neighbours = [F.pad(found, (0, width - found.shape[1]), value=-1) for found, _ in ranked]
        sums = [F.pad(found, (0, width - found.shape[1])) for _, found in ranked]
        return torch.cat(neighbours), torch.cat(sums)

    @cached_property
    def _ranker(self) -> Ranker:
        return Ranker(_CHUNK, self.window, self.k)

    def _refresh_int8(self) -> None:
        """Give a CPU's search an int8 copy of the cache. It can always be rebuilt, so it is not part of the state."""
        few = self.cache.numel() < _INT8_FROM or self.epochs == 0
        if self.cache.device.type != "cpu" or few or not self.lists:
            return
        if self._quantized is None:
            self._quantized = QuantizedRows(self.cache)
        else:
            self._quantized.refresh(self.cache)


def itself(ids: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Lists that hold the image alone."""
    return torch.ones(len(ids), 1, device=queries.device), ids[:, None].to(queries.device)


def _on_cpu(ids: Tensor, skipped: Tensor, similarities: Tensor, neighbours: Tensor) -> tuple[Tensor, ...]:
    """The same tensors on the CPU; where they are on a device, Python waits for it once."""
    if similarities.device.type == "cpu":
        return ids.cpu(), skipped, similarities, neighbours
    there = [skipped[:, None].int(), similarities.view(torch.int32), neighbours.int()]
    if ids.device.type != "cpu":
        there.append(ids[:, None].int())
    k = similarities.shape[1]
    words = torch.cat(there, 1).cpu()  # (B, 2 K + 1 or + 2)
    ids = ids if ids.device.type == "cpu" else words[:, -1].long()
    similarities = words[:, 1 : k + 1].contiguous().view(torch.float32)
    return ids, words[:, 0].bool(), similarities, words[:, k + 1 : 2 * k + 1].long()


def _last_occurrence(ids: Tensor) -> Tensor:
    """Positions of each distinct id's last place."""
    order = ids.argsort(stable=True)
    ordered = ids[order]
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return order[last]
