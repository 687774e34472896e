"""The windowed distribution p_win of the paper, for many images at once.

From an image's w top-K lists, laid side by side as M = w K entries, come

    m_win(j) = (1/w) * sum of j's similarities over the lists;  absent counts as 0, the divisor is always w;
    support  = the K best j (ties to the smaller id), or all of them;
    p_win(j) = softmax over the support of m_win(j) / tau.

Similarities are multiples of 2^-24 of at most 1 in size (`on_grid`), which fp32 holds exactly: sums are kept as
integers in that unit, exact in any order. Grouping is a sort of the M ids; sums are differences of a running
total.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 512  # images whose windows are ranked at once
UNIT = 2.0**-24  # of the integer sums: fp32's spacing below 1, where similarities of neighbours lie
_SPARE = 6  # candidates beyond the K best that are compared exactly


def on_grid(x: Tensor) -> Tensor:
    """fp32 values rounded to multiples of 2^-24; exact for everything of at most 1 in size."""
    return x.mul(1 / UNIT).round_().mul_(UNIT)


class Ranker:
    """Ranks the windows of images, CHUNK at a time, in buffers that are made once.

    Fresh memory for every chunk would cost more than the arithmetic.
    """

    def __init__(self, window: int, k: int) -> None:
        rows, width = CHUNK, window * k
        self.columns = torch.arange(width, dtype=torch.int32)
        self.keys, self.units, self.ordered = (torch.empty(rows, width, dtype=torch.int32) for _ in range(3))
        # A sum of w similarities of up to 2^24 units; from w = 128 on it does not fit into 32 bits.
        self.running = torch.empty(rows, width, dtype=torch.int32 if window < 128 else torch.int64)
        self.position = torch.empty(rows, width, dtype=torch.int64)
        self.floats = torch.empty(rows, width)
        # Positions beyond 2^14 do not fit beside the mark of `_ends_of_runs` in 16 bits.
        self.ends = torch.empty(rows, width, dtype=torch.int16 if width < 1 << 14 else torch.int32)
        self.places = self.columns.to(self.ends.dtype)

    def ranked_sums(self, ids: Tensor, similarities: Tensor, k: int | None) -> tuple[Tensor, Tensor]:
        """Each image's candidates, best first, with the sums of their similarities.

        Args:
            ids: (C, M) int32; -1 is padding. Within one list an id stands once.
            similarities: (C, M) fp32, on the grid and at most 1 in size.
            k: how many candidates to keep; None keeps all.

        Returns:
            neighbours (C, S) int64, padded with -1, and sums (C, S) int64 in units of 2^-24, padded with 0.
        """
        C, M = ids.shape
        if C > CHUNK:
            pairs = zip(ids.split(CHUNK), similarities.split(CHUNK), strict=True)
            parts = [self.ranked_sums(*pair, k) for pair in pairs]
            width = max(neighbours.shape[1] for neighbours, _ in parts)
            neighbours = [F.pad(found, (0, width - found.shape[1]), value=-1) for found, _ in parts]
            return torch.cat(neighbours), torch.cat(
                [F.pad(sums, (0, width - sums.shape[1])) for _, sums in parts]
            )
        if C == 0:
            return torch.empty(0, k or M, dtype=torch.long), torch.empty(0, k or M, dtype=torch.long)
        units, ordered, running = self.units[:C], self.ordered[:C], self.running[:C]
        ids, position = self._sort_ids(ids)
        units.copy_(torch.mul(similarities, 1 / UNIT, out=self.floats[:C]))
        torch.gather(units, 1, position, out=ordered)
        # int32 may wrap around in the running total; its differences, sums of one image, do not.
        torch.cumsum(ordered, 1, dtype=running.dtype, out=running)
        ends = self._ends_of_runs(ids)  # (C, width)
        inside = ends < M
        ends.clamp_(max=M - 1)
        candidates = ids.gather(1, ends)  # ascending
        sums = running.gather(1, ends)
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
    # Sums are sorted: the first is the largest.
    weights = (logits - logits[:, :1]).exp_().mul_(neighbours >= 0)
    return weights.div_(weights.sum(1, keepdim=True).clamp_(min=1e-300))


def _best_first(candidates: Tensor, sums: Tensor, k: int | None) -> tuple[Tensor, Tensor]:
    """Order (C, width) candidates with ascending ids by sum, then by id; padding is -1 and goes last."""
    width = candidates.shape[1]
    keep = width if k is None else k
    at, valid = _best_columns(sums, candidates >= 0, min(keep, width))
    neighbours = candidates.gather(1, at).masked_fill_(~valid, -1).long()
    best = sums.gather(1, at).masked_fill_(~valid, 0).long()
    missing = max(0, keep - width)
    return F.pad(neighbours, (0, missing), value=-1), F.pad(best, (0, missing))


def _best_columns(sums: Tensor, real: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Columns of each row's `keep` largest sums, ties to the smaller column; and which of them are `real`.

    A key orders by sum, then by smaller column. With all bits of the sum it needs 64, whose sort is ten times as
    slow as that of 32. So the leading bits choose a few more columns than needed, and all bits rank those.
    """
    width = sums.shape[1]
    bits = max(1, (width - 1).bit_length())
    columns = torch.arange(width, dtype=torch.int32)
    shift = max(0, bits + int(sums.abs().max()).bit_length() - 30)
    coarse = _descending(_keys((sums >> shift).int(), columns, real, bits))[:, : keep + _SPARE]
    at, valid = _columns(coarse, bits)
    if shift:
        at, valid = _columns(_descending(_keys(sums.gather(1, at).long(), at, valid, bits)), bits)
        # Where the last one compared looks like the K-th, those behind it might belong to the best as well.
        leading = coarse >> bits
        unsure = (leading[:, -1] == leading[:, keep - 1]) & valid[:, keep - 1]
        if coarse.shape[1] < width and unsure.any():
            keys = _keys(sums[unsure].long(), columns, real[unsure], bits).topk(keep, dim=1).values
            at[unsure, :keep], valid[unsure, :keep] = _columns(keys, bits)
    return at[:, :keep], valid[:, :keep]


def _keys(sums: Tensor, columns: Tensor, real: Tensor, bits: int) -> Tensor:
    """Integers that order by sum, then by smaller column; what is not real goes last."""
    keys = (sums << bits) | ((1 << bits) - 1 - columns)
    return keys.masked_fill_(~real, torch.iinfo(keys.dtype).min)


def _columns(keys: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The inverse of `_keys`: columns, and which are real; the others are 0."""
    real = keys > torch.iinfo(keys.dtype).min
    low = (1 << bits) - 1
    return (low - (keys & low)).long().masked_fill_(~real, 0), real


def _descending(keys: Tensor) -> Tensor:
    keys.numpy().sort(axis=1)  # in place, with SIMD; torch's sort is many times slower
    return keys.flip(1)
