"""The windowed distribution p_win of the paper, for many images at once.

From an image's w top-K lists, laid side by side as M = w K entries, come

    m_win(j) = (1/w) * sum of j's similarities over the lists;  absent counts as 0, the divisor is always w;
    support  = the K best j (ties to the smaller id), or all of them;
    p_win(j) = softmax over the support of m_win(j) / tau.

Similarities are fp16 values of at most 1, so all are multiples of 2^-24: sums are kept as integers in that
unit, exact in any order. Grouping is a sort of the M ids; sums are differences of a running total.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

UNIT = 2.0**-24  # of the integer sums: the spacing of fp16's smallest numbers


class Ranker:
    """Ranks the windows of up to `rows` images at a time, in buffers that are made once.

    Fresh memory for every chunk would cost more than the arithmetic.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.columns = torch.arange(width, dtype=torch.int32)
        self.keys, self.units, self.running = (torch.empty(rows, width, dtype=torch.int32) for _ in range(3))
        self.position = torch.empty(rows, width, dtype=torch.int64)
        self.floats = torch.empty(rows, width)
        # Positions beyond 2^14 do not fit beside the mark of `_ends_of_runs` in 16 bits.
        self.ends = torch.empty(rows, width, dtype=torch.int16 if width < 1 << 14 else torch.int32)
        self.places = self.columns.to(self.ends.dtype)

    def ranked_sums(self, ids: Tensor, similarities: Tensor, k: int | None) -> tuple[Tensor, Tensor]:
        """Each image's candidates, best first, with the sums of their similarities.

        Args:
            ids: (C, M) int32; -1 is padding. Within one list an id stands once.
            similarities: (C, M) fp16, at most 1 in size.
            k: how many candidates to keep; None keeps all.

        Returns:
            neighbours (C, S) int64, padded with -1, and sums (C, S) int64 in units of 2^-24, padded with 0.
        """
        C, M = ids.shape
        units, running = self.units[:C], self.running[:C]
        ids, position = self._sort_ids(ids)
        units.copy_(self.floats[:C].copy_(similarities).mul_(1 / UNIT))
        torch.gather(units, 1, position, out=running)
        # int32 may wrap around in the running total; its differences, sums of at most w units, do not.
        torch.cumsum(running, 1, dtype=torch.int32, out=units)
        ends = self._ends_of_runs(ids)  # (C, width)
        inside = ends < M
        ends.clamp_(max=M - 1)
        candidates = ids.gather(1, ends)  # ascending
        sums = units.gather(1, ends)
        sums[:, 1:] -= sums[:, :-1].clone()
        return _best_first(candidates.masked_fill_(~inside, -1), sums, k)

    def _sort_ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids of each row in ascending order, and where they stood."""
        C, M = ids.shape
        keys, position = self.keys[:C], self.position[:C]
        bits = (M - 1).bit_length()
        if int(ids.max()) >> (31 - bits):
            torch.sort(ids, dim=1, out=(keys, position))
            return keys, position
        # Id and position fit into one int32, which numpy sorts with SIMD.
        torch.add(self.columns, ids, alpha=1 << bits, out=keys)
        keys.numpy().sort(axis=1)
        position.copy_(torch.bitwise_and(keys, (1 << bits) - 1, out=self.units[:C]))
        return torch.bitwise_right_shift(keys, bits, out=keys), position

    def _ends_of_runs(self, ids: Tensor) -> Tensor:
        """Where runs of equal ids end in sorted rows (C, M): int64 (C, width), padded with M or more."""
        ends = self.ends[: len(ids)]
        far = 1 << 14 if ends.dtype == torch.int16 else 1 << 30
        flat = ids.view(-1)
        torch.eq(flat[1:], flat[:-1], out=ends.view(-1)[:-1])  # 1 where a run goes on
        ends[:, -1] = 0  # no run goes on in the next row
        ends.mul_(far).add_(self.places)
        ends.numpy().sort(axis=1)  # with SIMD, this compacts faster than a search for the ends would
        width = int((ends.amin(0) < far).sum())
        return ends[:, :width].long()


def softmax_of_sums(neighbours: Tensor, sums: Tensor, window: int, tau: float) -> Tensor:
    """p_win over the support, (C, S) fp64; padding gets 0, and so does all of an image that was never seen."""
    logits = sums.double().mul_(UNIT / window / tau)
    weights = (
        (logits - logits[:, :1]).exp_().mul_(neighbours >= 0)
    )  # sums are sorted: the first is the largest
    return weights.div_(weights.sum(1, keepdim=True).clamp_(min=1e-300))


def _best_first(candidates: Tensor, sums: Tensor, k: int | None) -> tuple[Tensor, Tensor]:
    """Order (C, width) candidates with ascending ids by sum, then by id; padding is -1 and goes last."""
    width = candidates.shape[1]
    keep = width if k is None else k
    bits = (width - 1).bit_length() if width > 1 else 1
    real = candidates >= 0
    # One integer orders by sum, then by smaller column, which is smaller id.
    column = (1 << bits) - 1 - torch.arange(width, dtype=torch.int32)
    shift = max(0, bits + int(sums.abs().max()).bit_length() - 30)
    if int(sums.bitwise_and((1 << shift) - 1).max()) == 0:  # the bits that would not fit into int32 are 0
        keys = ((sums >> shift) << bits) | column
        keys.masked_fill_(~real, torch.iinfo(torch.int32).min)
        keys.numpy().sort(axis=1)
        top = keys[:, -keep:].flip(1)
        at = ((1 << bits) - 1 - (top & ((1 << bits) - 1))).long()
        valid = top > torch.iinfo(torch.int32).min
    else:
        wide = (sums.long() << bits) | column
        wide.masked_fill_(~real, torch.iinfo(torch.int64).min)
        top, at = wide.topk(min(keep, width), dim=1)
        valid = top > torch.iinfo(torch.int64).min
    at.masked_fill_(~valid, 0)
    neighbours = candidates.gather(1, at).masked_fill_(~valid, -1).long()
    best = sums.gather(1, at).masked_fill_(~valid, 0).long()
    missing = max(0, keep - width)
    return F.pad(neighbours, (0, missing), value=-1), F.pad(best, (0, missing))
