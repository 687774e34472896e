"""One pass over the rows that keeps every (query, row) pair which may be among the K best.

A scorer multiplies quickly and inexactly, and says how far off it can be. The scan never drops a pair unless
K other rows are proven to score higher; what is left is scored exactly by `search`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from adasim.neighbors.quantized import QuantizedRows

GROUP = 64  # columns that share one maximum: the first, cheap look at a tile
_U = 2.0**-24  # unit roundoff of fp32


class Candidates(NamedTuple):
    """Pairs that may be among the K best, in no particular order."""

    queries: Tensor  # (M,) int64
    ids: Tensor  # (M,) int64


class TooManyCandidatesError(Exception):
    """The bound prunes too little: another engine will be faster."""


class Scorer(Protocol):
    """|score * unit - (truth + a constant per query)| <= margin."""

    unit: Tensor  # (B, 1) fp64
    allowance: int  # candidates per query beyond which the scan gives up, plus one in `sparsity` rows
    sparsity: int

    def scores(self, start: int, stop: int) -> Tensor:
        """(B, stop - start), fp32 or int32."""

    def without_bad_rows(self, scores: Tensor, start: int, stop: int) -> Tensor:
        """The same with -inf for rows that hold a NaN or Inf."""

    def group_margins(self, start: int, stop: int) -> Tensor:
        """The largest margin of each group, broadcastable to (B, groups), fp64."""

    def margins(self, queries: Tensor, ids: Tensor) -> Tensor:
        """Margins of single pairs, fp64; `queries` and `ids` broadcast."""


class FloatScorer:
    """fp32 products. A sum of D products in any order is off by at most D u |q| |z| (Higham, 2002)."""

    allowance, sparsity = 1024, 512  # near ties are rare in fp32

    def __init__(self, q: Tensor, rows: Tensor, row_norm: float | None) -> None:
        self.q, self.rows = q, rows
        self.unit = torch.ones(len(q), 1, dtype=torch.float64, device=q.device)
        self.row_norm = largest_norm(rows) if row_norm is None else row_norm
        gamma = 1.01 * (rows.shape[1] + 2) * _U  # + 2: the score itself is rounded to fp32
        norms = torch.linalg.vector_norm(q.double(), dim=1, keepdim=True)
        self.margin = gamma * norms * self.row_norm + 1e-36  # (B, 1)

    def scores(self, start: int, stop: int) -> Tensor:
        return self.q @ self.rows[start:stop].float().T

    def without_bad_rows(self, scores: Tensor, start: int, stop: int) -> Tensor:
        return scores.masked_fill(~torch.isfinite(self.rows[start:stop]).all(1), -torch.inf)

    def group_margins(self, start: int, stop: int) -> Tensor:
        return self.margin

    def margins(self, queries: Tensor, ids: Tensor) -> Tensor:
        return self.margin[queries, 0]


class Int8Scorer:
    """Products of int8 codes, exact in int32; the margin is the codes' own error (`QuantizedRows`)."""

    allowance, sparsity = 1024, 1024  # beyond this, rescoring costs more than int8 saves

    def __init__(self, q: Tensor, quantized: QuantizedRows) -> None:
        self.quantized = quantized
        self.codes, self.unit, self.left_out = quantized.encode_queries(q)
        self.norms = torch.linalg.vector_norm(q.double(), dim=1, keepdim=True)
        self.rounding = 4 * _U * self.norms * quantized.row_norm  # of the score to fp32, on either side

    def scores(self, start: int, stop: int) -> Tensor:
        return torch._int_mm(self.codes, self.quantized.codes[start:stop].T)

    def without_bad_rows(self, scores: Tensor, start: int, stop: int) -> Tensor:
        return scores  # integers are finite

    def group_margins(self, start: int, stop: int) -> Tensor:
        error = group_max(self.quantized.error[None, start:stop])
        reach = group_max(self.quantized.reach[None, start:stop])
        return self.norms * error + self.left_out * reach + self.rounding

    def margins(self, queries: Tensor, ids: Tensor) -> Tensor:
        pairs = self.norms[queries, 0] * self.quantized.error[ids]
        return pairs + self.left_out[queries, 0] * self.quantized.reach[ids] + self.rounding[queries, 0]


def scan(scorer: Scorer, n: int, k: int, tile: int) -> Candidates:
    """Every pair that may be among the K best.

    `floor` is a lower bound on each query's K-th best score: K different rows are known to reach it. A pair
    survives if its upper bound is not below the floor. The first tile looks at every element; later ones look
    at the maxima of groups, and at elements only in the groups that may hold a candidate.
    """
    unit = scorer.unit
    B, device = len(unit), unit.device
    best = torch.full(
        (B, k), -torch.inf, dtype=torch.float64, device=device
    )  # lower bounds of K different rows
    floor = best[:, -1:]
    found: list[tuple[Tensor, Tensor, Tensor]] = []  # queries, ids, upper bounds
    fresh: list[Tensor] = []  # lower bounds not yet in `best`
    count = 0
    for number, start in enumerate(range(0, n, tile)):
        stop = min(start + tile, n)
        scores = scorer.scores(start, stop)  # (B, T)
        peaks = group_max(scores) * unit  # (B, groups) fp64
        if not torch.isfinite(peaks).all():
            scores = scorer.without_bad_rows(scores, start, stop)
            peaks = group_max(scores) * unit
        if number == 0:
            top, at = scores.topk(min(k, stop), dim=1)
            rows = torch.arange(B, device=device)[:, None]
            best = _merge_best(best, [top * unit - scorer.margins(rows, at)])
            floor = best[:, -1:]
        margins = scorer.group_margins(start, stop)
        b, group = (peaks + margins >= floor).nonzero(as_tuple=True)
        if len(b) == 0:
            continue
        columns = group[:, None] * GROUP + torch.arange(GROUP, device=device)  # (M, GROUP)
        inside = columns < stop - start
        columns.clamp_(max=stop - start - 1)
        upper = scores[b[:, None], columns] * unit[b] + scorer.margins(b[:, None], columns + start)
        m, c = ((upper >= floor[b]) & inside).nonzero(as_tuple=True)
        found.append((b[m], columns[m, c] + start, upper[m, c]))
        count += len(m)
        if number:
            fresh.append(peaks - margins)
        if len(fresh) >= min(number, 8):
            best, fresh = _merge_best(best, fresh), []
            floor = best[:, -1:]
        limit = B * (16 * k + scorer.allowance + stop // scorer.sparsity)
        if count > 2 * limit:
            found = _prune(found, floor)
            count = len(found[0][0])
            if count > limit:
                raise TooManyCandidatesError
    if fresh:
        floor = _merge_best(best, fresh)[:, -1:]
    queries, ids, _ = _prune(found, floor)[0]
    return Candidates(queries, ids)


def group_max(x: Tensor) -> Tensor:
    """Maxima of GROUP neighbouring columns: (B, T) -> (B, ceil(T / GROUP))."""
    tail = x.shape[1] % GROUP
    whole = x[:, : x.shape[1] - tail]
    peaks = whole.unflatten(1, (-1, GROUP)).amax(2)
    return torch.cat([peaks, x[:, -tail:].amax(1, keepdim=True)], 1) if tail else peaks


def largest_norm(rows: Tensor, chunk: int = 1 << 14) -> float:
    """Norm of the longest finite row."""
    norms = [
        torch.linalg.vector_norm(rows[i : i + chunk].double(), dim=1) for i in range(0, len(rows), chunk)
    ]
    finite = [float(n[torch.isfinite(n)].max()) for n in norms if torch.isfinite(n).any()]
    return max(finite, default=0.0)


def _merge_best(best: Tensor, more: list[Tensor]) -> Tensor:
    return torch.cat([best, *more], 1).topk(best.shape[1], dim=1).values


def _prune(found: list[tuple[Tensor, Tensor, Tensor]], floor: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    queries, ids, upper = (torch.cat(parts) for parts in zip(*found, strict=True))
    alive = upper >= floor[queries, 0]
    return [(queries[alive], ids[alive], upper[alive])]
