"""One pass over the rows that keeps every (query, row) pair which may be among the K best.

A scorer multiplies quickly and inexactly, and says how far off it can be. The scan never drops a pair unless
K other rows are proven to score higher; what is left is scored exactly by `search`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

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
    one_pass: int  # the largest K for which one pass over the rows is quicker than two

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

    allowance, sparsity, one_pass = 1024, 512, 1 << 31

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

    allowance, sparsity, one_pass = 1024, 1024, 32

    def __init__(self, q: Tensor, quantized: QuantizedRows) -> None:
        self.quantized = quantized
        codes, self.unit, self.left_out = quantized.encode_queries(q)
        self.multiply = quantized.products_with(codes)
        self.norms = torch.linalg.vector_norm(q.double(), dim=1, keepdim=True)
        self.rounding = 4 * _U * self.norms * quantized.row_norm  # of the score to fp32, on either side

    def scores(self, start: int, stop: int) -> Tensor:
        return self.multiply(start, stop)

    def without_bad_rows(self, scores: Tensor, start: int, stop: int) -> Tensor:
        return scores  # integers are finite

    def group_margins(self, start: int, stop: int) -> Tensor:
        error = group_max(self.quantized.error[None, start:stop])  # (1, groups)
        reach = group_max(self.quantized.reach[None, start:stop])
        return self.norms * error + self.left_out * reach + self.rounding

    def margins(self, queries: Tensor, ids: Tensor) -> Tensor:
        pairs = self.norms[queries, 0] * self.quantized.error[ids]
        return pairs + self.left_out[queries, 0] * self.quantized.reach[ids] + self.rounding[queries, 0]


def scan(scorer: Scorer, n: int, k: int, tile: int) -> Candidates:
    """Every pair that may be among the K best.

    `floor` is a lower bound on each query's K-th best score: K different rows are known to reach it. A pair
    survives if its upper bound is not below the floor. A tile is first looked at by the maxima of groups, and
    by its elements only in the groups that may hold a candidate.
    """
    unit, scores_of = scorer.unit, _Tiles(scorer)
    # The rows that give the first floor. A large K is worth a pass of its own: a floor that rises late lets too
    # many pairs through on the way.
    first = min(n, tile) if k <= scorer.one_pass else n
    best = _lower_bounds(scorer, scores_of, first, k, tile)  # (B, K), of K different rows
    floor = best[:, -1:]
    found: list[tuple[Tensor, Tensor, Tensor]] = []  # queries, ids, upper bounds
    fresh: list[Tensor] = []  # lower bounds not yet in `best`
    count = 0
    for start in range(0, n, tile):
        stop = min(start + tile, n)
        scores = scores_of(start, stop)  # (B, T)
        peaks = group_max(scores)  # (B, groups)
        margins = scorer.group_margins(start, stop)
        needed = _at_least((floor - margins) / unit, scores.dtype)  # what a score must reach
        b, group = (peaks >= needed).nonzero(as_tuple=True)
        if len(b):
            members = grouped(scores)[b, group]  # (M, GROUP)
            m, c = (members >= needed.expand_as(peaks)[b, group][:, None]).nonzero(as_tuple=True)
            queries, ids = b[m], group[m] * GROUP + c + start
            upper = members[m, c] * unit[queries, 0] + scorer.margins(queries, ids)
            alive = upper >= floor[queries, 0]
            found.append((queries[alive], ids[alive], upper[alive]))
            count += len(found[-1][0])
            if start >= first:  # a row must not count twice
                fresh.append(peaks * unit - margins)
        if len(fresh) >= min(start // tile, 8):
            best, fresh = _merge_best(best, fresh), []
            floor = best[:, -1:]
        limit = len(unit) * (16 * k + scorer.allowance + stop // scorer.sparsity)
        if count > 2 * limit:
            found = _prune(found, floor)
            count = len(found[0][0])
            if count > limit:
                raise TooManyCandidatesError
    if fresh:
        floor = _merge_best(best, fresh)[:, -1:]
    queries, ids, _ = _prune(found, floor)[0]
    return Candidates(queries, ids)


def _lower_bounds(scorer: Scorer, scores_of: _Tiles, n: int, k: int, tile: int) -> Tensor:
    """The K largest lower bounds among different ones of the first `n` rows: (B, K) fp64, padded with -inf.

    Of many rows only the best of each group counts, which is quicker and little worse.
    """
    best = torch.full((len(scorer.unit), k), -torch.inf, dtype=torch.float64, device=scorer.unit.device)
    fresh: list[Tensor] = []
    for start in range(0, n, tile):
        stop = min(start + tile, n)
        scores = scores_of(start, stop)
        if n >= 8 * k * GROUP:
            fresh.append(group_max(scores) * scorer.unit - scorer.group_margins(start, stop))
        else:
            top, at = scores.topk(min(k, stop - start), dim=1)
            rows = torch.arange(len(scores), device=scores.device)[:, None]
            fresh.append(top * scorer.unit - scorer.margins(rows, at + start))
        if len(fresh) == 8:
            best, fresh = _merge_best(best, fresh), []
    return _merge_best(best, fresh) if fresh else best


class _Tiles:
    """Scores of one tile after another, with -inf for rows that are not finite.

    The latest tile is kept: that of the first floor is also the first to be scanned, and of a small memory the only
    one.
    """

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.latest: tuple[int, int] | None = None

    def __call__(self, start: int, stop: int) -> Tensor:
        if self.latest != (start, stop):
            scores = self.scorer.scores(start, stop)
            if scores.dtype.is_floating_point and not torch.isfinite(group_max(scores)).all():
                scores = self.scorer.without_bad_rows(scores, start, stop)
            self.latest, self.scores = (start, stop), scores
        return self.scores


def group_max(scores: Tensor) -> Tensor:
    """Maxima of GROUP neighbouring columns: (B, T) -> (B, ceil(T / GROUP))."""
    return grouped(scores).amax(2)


def grouped(scores: Tensor) -> Tensor:
    """(B, T) -> (B, groups, GROUP); the last group is filled up with what no threshold lets pass."""
    missing = -scores.shape[1] % GROUP
    if missing:
        scores = F.pad(scores, (0, missing), value=_lowest(scores.dtype))
    return scores.unflatten(1, (-1, GROUP))


def _at_least(threshold: Tensor, dtype: torch.dtype) -> Tensor:
    """A threshold in the scores' own type that lets pass at least what the exact one would.

    Integers round down, but never to the value of a filled-up place. fp32 may round up by half a unit in the
    last place, which the 1% of slack in `FloatScorer.margin` covers.
    """
    if dtype.is_floating_point:
        return threshold.to(dtype).clamp_(min=torch.finfo(dtype).min)
    return threshold.floor_().clamp_(_lowest(dtype) + 1, torch.iinfo(dtype).max).to(dtype)


def _lowest(dtype: torch.dtype) -> float:
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


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
