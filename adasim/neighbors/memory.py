"""NeighborMemory: the feature cache, the top-K lists of the last w epochs, and the partners drawn from them.

memory = NeighborMemory(num_images, dim, window=10, k=3)
for epoch in range(epochs):
    partners = memory.draw_partners(epoch, tau=0.2, seed=0)   # (N,): whose view is view 2 of image i
    for ids in batches:
        ...                                                   # views of ids and of partners[ids], a step
        memory.observe(ids, features_of_view_1)
    memory.end_epoch()

window.py has the arithmetic of p_win, search.py the exact search. A run has the subclass of sharded.py, which asks
the process that holds an image and otherwise does what stands here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from adasim.dist.devices import to_device
from adasim.neighbors.arithmetic import exact_device
from adasim.neighbors.search import QuantizedRows, search
from adasim.neighbors.window import CHUNK, on_grid, p_win, ranked_sums
from adasim.util.seeding import uniform

Ids: TypeAlias = "Tensor | np.ndarray | Sequence[int]"
"""Image ids: one row of whole numbers of any type."""
SupportKind: TypeAlias = Literal["topk", "union"]

INT8_FROM = 1 << 24  # elements of the cache from which an int8 copy pays


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
        device: of the cache; a device without fp64 (Apple's mps) leaves it on the CPU. The lists stay in main memory.
        rows: the images whose features and lists are held here, all by default; `ShardedMemory` gives each
            process its own. Neighbours are then found, and partners drawn, among and for these alone.

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
        support: SupportKind = "topk",
        timing: Literal["previous", "current"] = "previous",
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rows: range | None = None,
    ) -> None:
        num_images, dim, window, k = map(index, (num_images, dim, window, k))
        if not 1 <= num_images < 2**31:
            raise ValueError(f"num_images={num_images} must be between 1 and 2^31 - 1: ids are kept as int32")
        if dim < 1 or window < 1:
            raise ValueError(f"dim={dim} and window={window} must be at least 1")
        if not 1 <= k <= num_images:
            raise ValueError(f"k={k} must be between 1 and the number of images, {num_images}")
        if support not in ("topk", "union") or timing not in ("previous", "current"):
            raise ValueError(f"unknown support={support!r} or timing={timing!r}")
        self.num_images, self.dim, self.window, self.k = num_images, dim, window, k
        self.support, self.timing = support, timing
        self.rows = rows = range(num_images) if rows is None else rows
        device = exact_device(device)
        dtype = dtype or (torch.float32 if device.type == "cpu" else torch.float16)
        self.cache = torch.zeros(len(rows), dim, dtype=dtype, device=device)
        # The lists of finished epochs: a ring over epochs, one row per image so that drawing reads memory in order.
        # -1 is an empty place. fp32: 16 bits cannot tell similarities near 1 apart.
        self.history_ids = torch.full((len(rows), window, k), -1, dtype=torch.int32)
        self.history_similarities = torch.zeros(len(rows), window, k)
        # Those of the epoch in progress.
        self.current_ids = torch.full((len(rows), k), -1, dtype=torch.int32)
        self.current_similarities = torch.zeros(len(rows), k)
        self.epochs = 0  # finished ones
        self._observing = False
        self._quantized: QuantizedRows | None = None

    def __repr__(self) -> str:
        dtype = str(self.cache.dtype).removeprefix("torch.")
        return (
            f"{type(self).__name__}(num_images={self.num_images}, dim={self.dim}, window={self.window}, "
            f"k={self.k}: {self.epochs} epochs finished, {dtype} cache on {self.cache.device})"
        )

    def to(self, device: torch.device | str) -> Self:
        """Move the cache to a device (the CPU, if that has no fp64); the lists stay in main memory."""
        self.cache = self.cache.to(exact_device(device))
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
            Similarities and neighbours, (B, K) each, best first; -inf and -1 for a row that was skipped.
        """
        return self._observe(*self._prepare(ids, features))

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
        slot = self.epochs % self.window
        self.history_ids[:, slot] = self.current_ids
        self.history_similarities[:, slot] = self.current_similarities
        self.current_ids.fill_(-1)
        self.current_similarities.zero_()
        self.epochs += 1
        self._observing = False
        self._refresh_int8()

    # ---- p_win and the draw ----

    def distribution(self, ids: Ids, tau: float, support: SupportKind | None = None) -> tuple[Tensor, Tensor]:
        """p_win of each image: neighbour ids (B, S) int64 and probabilities (B, S) fp64, best first.

        Padding is -1 and 0. tau=0 puts all probability on the image itself.

        Args:
            support: the memory's own by default. S is K with "topk", with "union" the largest union of the batch.
        """
        _check_tau(tau)
        if support not in (None, "topk", "union"):
            raise ValueError(f"unknown support={support!r}")
        ids = checked_ids(ids, self.num_images).cpu()
        if tau == 0:
            return ids[:, None], torch.ones(len(ids), 1, dtype=torch.float64)
        neighbours, sums = self._ranked(self._places(ids), support)
        return neighbours, p_win(neighbours, sums, self.window, tau)

    def draw_partners(self, epoch: int, tau: float, seed: int, ids: Ids | None = None) -> Tensor:
        """One partner id per image, int64: j* ~ p_win if the image's best match is itself (the gate), else the image.

        The identity while fewer than w epochs are finished, and for tau=0. A pure function of the lists and
        of (seed, epoch, id): drawing for a few `ids` gives what drawing for all would.

        Args:
            epoch: the epoch that is about to begin (or is in progress), counted from 0: `memory.epochs`.
            tau: temperature of p_win; the paper uses 0.2.
            seed: random seed.
            ids: the images to draw for; all by default.
        """
        _check_tau(tau)
        if index(epoch) != self.epochs:
            raise ValueError(
                f"epoch={epoch}, but this memory has finished {self.epochs} epochs: epochs count from 0, each ends "
                f"with end_epoch(), and a loop that is resumed loads the memory's state, too"
            )
        partners = self._ids_or_all(ids).clone()
        if tau == 0 or self.epochs < self.window:
            return partners
        u = uniform(seed, "partner", epoch, partners)  # (N, 1)
        for start in range(0, len(partners), CHUNK):
            chunk = slice(start, start + CHUNK)
            own = partners[chunk]
            neighbours, sums = self._ranked(chunk if ids is None else self._places(own))
            p = p_win(neighbours, sums, self.window, tau)
            gate = neighbours[:, 0] == own
            at = (p.cumsum(1) <= u[chunk]).sum(1).clamp_(max=p.shape[1] - 1)
            drawn = neighbours.gather(1, at[:, None])[:, 0]
            partners[chunk] = torch.where(gate & (drawn >= 0), drawn, own)
        return partners

    def nearest_other(self, ids: Ids | None = None) -> Tensor:
        """The best match other than the image itself in the newest list (+NN); itself if there is none."""
        ids = self._ids_or_all(ids)
        if self.epochs == 0:
            return ids.clone()
        places = self._places(ids)
        if self.timing == "current" and self._observing:
            newest = self.current_ids[places].long()  # (B, K), best first
        else:
            newest = self.history_ids[places, (self.epochs - 1) % self.window].long()
        return _first_other(newest, [ids], ids)

    def features(self, ids: Ids) -> Tensor:
        """The cached features of images (B, D), fp32, of unit norm; zeros of one that was never observed."""
        return self.cache[self._places(checked_ids(ids, self.num_images)).to(self.cache.device)].float()

    def best_other(self, *but: Tensor) -> Tensor:
        """The candidate with the largest p_win that is in none of `but`, for each image held here; or -1.

        Without the partners j* of the epoch this is the paper's second neighbour, which is the image itself wherever
        another one was drawn; without the images, too, it is always another one. tau does not change who is best.
        """
        best = torch.full_like(but[0], -1)
        for start in range(0, len(best), CHUNK):
            chunk = slice(start, start + CHUNK)
            best[chunk] = _first_other(self._ranked(chunk)[0], [one[chunk] for one in but], best[chunk])
        return best

    # ---- state ----

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, as tensors that share memory with this object."""
        names = ("cache", "current_ids", "current_similarities", "history_ids", "history_similarities")
        position = {"epochs": torch.tensor(self.epochs), "observing": torch.tensor(self._observing)}
        return {name: getattr(self, name) for name in names} | position

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a state of the same shape; raises ValueError naming the first difference."""
        for name, tensor in self.state_dict().items():
            shape = tuple(state[name].shape) if name in state else "nothing"
            if shape != tensor.shape:
                raise ValueError(f"memory state {name}: expected {tuple(tensor.shape)}, got {shape}")
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
        lists = {"ids": self.history_ids, "similarities": self.history_similarities}
        return {name: history[:, epoch % self.window].contiguous() for name, history in lists.items()}

    def load_epoch_lists(self, epoch: int, lists: dict[str, Tensor], first: int = 0) -> None:
        """Put one epoch's lists back; `first` is the image of their first row."""
        for name, history in (("ids", self.history_ids), ("similarities", self.history_similarities)):
            self._copy_rows(history[:, epoch % self.window], first, lists[name], name)

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

    # ---- parts of an observation ----

    def _prepare(self, ids: Ids, features: Tensor) -> tuple[Tensor, Tensor]:
        """Ids, and unit-norm queries on the grid, fp32; a row that is not finite becomes NaN throughout."""
        ids = checked_ids(ids, self.num_images)
        features = torch.as_tensor(features)
        if features.shape != (len(ids), self.dim):
            raise ValueError(f"features must be ({len(ids)}, {self.dim}), got {tuple(features.shape)}")
        features = features.detach().to(self.cache.device, torch.float32)
        valid = torch.isfinite(features).all(1, keepdim=True)
        queries = F.normalize(torch.where(valid, features, 0.0), dim=1)
        return ids, torch.where(valid, on_grid(queries), torch.nan)

    def _observe(self, ids: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Look the queries up, then keep them and their lists, of images held here."""
        lists = self._lookup(queries)
        # The lists are kept in main memory: what decides who is written goes there with them, in one transfer.
        there = to_device(ids, queries.device, torch.int32)
        found = [there[:, None], queries[:, :1].isnan().int(), lists[0].view(torch.int32), lists[1].int()]
        words = torch.cat(found, 1).cpu()  # (B, 2 + 2 K)
        ids, skipped = words[:, 0].long(), words[:, 1].bool()
        batch = torch.from_numpy(self._to_write(ids.numpy(), skipped.numpy()))
        places, (similarities, neighbours) = self._places(ids[batch]), words[batch, 2:].split(self.k, 1)
        self.current_ids[places] = neighbours
        # Cosines exceed 1 by rounding at most; -inf pads lists of fewer than K finite rows.
        similarities = similarities.contiguous().view(torch.float32)
        self.current_similarities[places] = on_grid(similarities.clamp(-1, 1))
        self._observing = True
        batch, places = to_device(torch.stack([batch, places]), self.cache.device)
        written = queries[batch].to(self.cache.dtype)
        self.cache[places] = written
        if self._quantized is not None and len(written):
            self._quantized.write(places, written)
        return lists

    def _lookup(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Similarities and image ids of the K best rows; a NaN query finds nothing."""
        similarities, places = search(queries, self.cache, self.k, quantized=self._quantized, row_norm=1.001)
        first = self.rows.start
        return similarities, torch.where(places >= 0, places + first, -1) if first else places

    def _to_write(self, ids: Any, skipped: Any) -> Any:
        """Which places of a batch to keep: finite ones of images held here; of one that stands twice, the last."""
        order = np.argsort(ids, kind="stable")
        order = order[~skipped[order] & (ids[order] >= self.rows.start) & (ids[order] < self.rows.stop)]
        return order[np.append(ids[order][1:] != ids[order][:-1], True)[: len(order)]]

    def _refresh_int8(self) -> None:
        """Give a CPU's search an int8 copy of the cache. It can always be rebuilt, so it is not part of the state."""
        self._quantized = None  # make room first
        if self.cache.device.type == "cpu" and self.cache.numel() >= INT8_FROM and self.epochs > 0:
            self._quantized = QuantizedRows(self.cache)

    # ---- parts of the draw ----

    def _ids_or_all(self, ids: Ids | None) -> Tensor:
        if ids is None:
            return torch.arange(self.rows.start, self.rows.stop)
        return checked_ids(ids, self.num_images).cpu()

    def _places(self, ids: Tensor) -> Tensor:
        """Where the images' rows stand in the tensors of this memory."""
        return ids - self.rows.start if self.rows.start else ids

    def _ranked(self, places: slice | Tensor, support: SupportKind | None = None) -> tuple[Tensor, Tensor]:
        """Candidates and their sums over the window of these places; a slice is read without a copy."""
        lists, similarities = self.history_ids[places], self.history_similarities[places]
        if self.timing == "current" and self._observing:  # the oldest epoch makes room for this one
            lists, similarities = lists.clone(), similarities.clone()
            slot = self.epochs % self.window
            lists[:, slot] = self.current_ids[places]
            similarities[:, slot] = self.current_similarities[places]
        k = self.k if (support or self.support) == "topk" else None
        return ranked_sums(lists.flatten(1), similarities.flatten(1), k)


def checked_ids(ids: Ids, num_images: int) -> Tensor:
    """Image ids as int64 (B,), on the device they came on.

    >>> checked_ids([2, 0], num_images=3)
    tensor([2, 0])
    """
    ids = torch.as_tensor(ids)
    if ids.ndim == 1 and len(ids) == 0:  # torch takes an empty list for floats
        return ids.long()
    if ids.ndim != 1 or ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        what = f"{str(ids.dtype).removeprefix('torch.')} of shape {tuple(ids.shape)}"
        raise ValueError(f"ids must be one row of whole numbers, got {what}")
    ids = ids.long()
    low, high = torch.stack(ids.aminmax()).tolist()  # one answer to wait for, where ids are on a device
    if low < 0 or high >= num_images:
        raise ValueError(f"ids must lie between 0 and {num_images - 1}, got {low if low < 0 else high}")
    return ids


def _check_tau(tau: float) -> None:
    if not tau >= 0:
        raise ValueError(f"tau={tau} must be 0 (standard pairs) or above; the paper uses 0.2")


def _first_other(lists: Tensor, but: list[Tensor], instead: Tensor) -> Tensor:
    """The first of each list (B, S) that is in none of `but` (B,) and no padding; if there is none, `instead`."""
    other = lists >= 0
    for one in but:
        other &= lists != one[:, None]
    first = lists.gather(1, other.int().argmax(1, keepdim=True))[:, 0]
    return torch.where(other.any(1), first, instead)
