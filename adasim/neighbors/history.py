"""ListHistory: each image's top-K lists of the last epochs, and the partners drawn from them.

No features here: `NeighborMemory` looks them up in its cache, and hands over the lists. All tensors stay in main
memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from operator import index
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from adasim.neighbors.arguments import Ids, check_tau, checked_ids
from adasim.neighbors.window import Ranker, on_grid, softmax_of_sums
from adasim.util.seeding import uniform

_CHUNK = 512  # images whose windows are ranked at once
_TOO_COARSE = (
    "torch.float16, as adasim 0.1 kept similarities: too coarse for the gate where features crowd. "
    "Begin with a new memory"
)


class ListHistory:
    """The lists of the epoch in progress, and a ring of those of the w epochs before it.

    Args:
        num_images, window, k, support, timing, rows: as for NeighborMemory.
    """

    def __init__(
        self,
        num_images: int,
        window: int,
        k: int,
        *,
        support: Literal["topk", "union"] = "topk",
        timing: Literal["previous", "current"] = "previous",
        rows: range | None = None,
    ) -> None:
        num_images, window, k = map(index, (num_images, window, k))
        if not 1 <= k <= num_images:
            raise ValueError(f"k={k} must be between 1 and the number of images, {num_images}")
        if window < 1:
            raise ValueError(f"window={window} must be at least 1")
        if num_images >= 2**31:
            raise ValueError(f"num_images={num_images} must be below 2^31: ids are kept as int32")
        if support not in ("topk", "union") or timing not in ("previous", "current"):
            raise ValueError(f"unknown support={support!r} or timing={timing!r}")
        rows = range(num_images) if rows is None else rows
        if rows.step != 1 or not 0 <= rows.start <= rows.stop <= num_images:
            raise ValueError(f"rows={rows} must be a range within the {num_images} images")
        self.num_images, self.window, self.k = num_images, window, k
        self.support, self.timing, self.rows = support, timing, rows
        # A ring over epochs, one row per image so that drawing reads memory in order; -1 is an empty place.
        self.history_ids = torch.full((len(rows), window, k), -1, dtype=torch.int32)
        # fp32: 16 bits cannot tell similarities near 1 apart.
        self.history_similarities = torch.zeros(len(rows), window, k)
        # The epoch in progress.
        self.current_ids = torch.full((len(rows), k), -1, dtype=torch.int32)
        self.current_similarities = torch.zeros(len(rows), k)
        self.epochs = 0  # finished ones
        self._observing = False

    # ---- the epoch ----

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
        return {
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

    def _keep_lists(self, places: Tensor, neighbours: Tensor, similarities: Tensor) -> None:
        """Take lists into the epoch in progress."""
        self.current_ids[places] = neighbours.int()
        # Cosines exceed 1 by rounding at most; -inf pads lists of fewer than K finite rows.
        self.current_similarities[places] = on_grid(similarities.clamp(-1, 1))
        self._observing = True

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
        if isinstance(places, Tensor) and not len(places):
            return torch.empty(0, self.k, dtype=torch.long), torch.empty(0, self.k, dtype=torch.double)
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
