"""One pass over the rows that keeps every (query, row) pair which may be among the K best.

A scorer multiplies quickly and inexactly, and says how far off it can be. The scan never drops a pair unless
K other rows are proven to score higher; what is left is scored exactly by `search`.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from adasim.neighbors.quantized import QuantizedRows
from adasim.neighbors.workspace import workspace

GROUP = 64  # columns that share one maximum: the first, cheap look at a tile
_SMALL_GROUP = 32  # where there would be few groups; the maxima of fewer columns take longer
_TABLE = 1 << 20  # places of a table that is made at once
_U = 2.0**-24  # unit roundoff of fp32


class Candidates(NamedTuple):
    """Pairs that may be among the K best: the first query's, by ascending id, then the next one's."""

    queries: Tensor  # (M,) int64
    ids: Tensor  # (M,) int64
    counts: Tensor  # (B,) int64, of each query


class TooManyCandidatesError(Exception):
    """The bound prunes too little: another engine will be faster."""


class Scorer(Protocol):
    """|score * unit - (truth + a constant per query)| <= margin."""

    dtype: torch.dtype  # of the scores
    unit: Tensor  # (B, 1) fp64
    allowance: int  # candidates per query beyond which the scan gives up, plus one in `sparsity` rows
    sparsity: int
    one_pass: int  # the largest K for which one pass over the rows is quicker than two

    def scores(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """(B, stop - start), fp32 or int32; `out` is where to put them."""

    def drop_bad_rows(self, scores: Tensor, start: int, stop: int) -> None:
        """Put -inf in the places of rows that hold a NaN or Inf."""

    def group_margins(self, start: int, stop: int, group: int) -> Tensor:
        """The largest margin of each group, broadcastable to (B, groups), fp64."""

    def margins(self, queries: Tensor, ids: Tensor) -> Tensor:
        """Margins of single pairs, fp64; `queries` and `ids` broadcast."""


class FloatScorer:
    """fp32 products. A sum of D products in any order is off by at most D u |q| |z| (Higham, 2002)."""

    dtype = torch.float32
    allowance, sparsity, one_pass = 1024, 512, 1 << 31

    def __init__(self, q: Tensor, rows: Tensor, row_norm: float | None) -> None:
        self.q, self.rows = q, rows
        self.unit = torch.ones(len(q), 1, dtype=torch.float64, device=q.device)
        self.row_norm = largest_norm(rows) if row_norm is None else row_norm
        gamma = 1.01 * (rows.shape[1] + 2) * _U  # + 2: the score itself is rounded to fp32
        norms = torch.linalg.vector_norm(q.double(), dim=1, keepdim=True)
        self.margin = gamma * norms * self.row_norm + 1e-36  # (B, 1)

    def scores(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        return torch.mm(self.q, self.rows[start:stop].float().T, out=out)

    def drop_bad_rows(self, scores: Tensor, start: int, stop: int) -> None:
        scores.masked_fill_(~torch.isfinite(self.rows[start:stop]).all(1), -torch.inf)

    def group_margins(self, start: int, stop: int, group: int) -> Tensor:
        return self.margin

    def margins(self, queries: Tensor, ids: Tensor) -> Tensor:
        return self.margin[queries, 0]


class Int8Scorer:
    """Products of int8 codes, exact in int32; the margin is the codes' own error (`QuantizedRows`)."""

    dtype = torch.int32
    allowance, sparsity, one_pass = 1024, 1024, 32

    def __init__(self, q: Tensor, quantized: QuantizedRows) -> None:
        self.quantized = quantized
        codes, self.unit, self.left_out = quantized.encode_queries(q)
        self.multiply = quantized.products_with(codes)
        self.norms = torch.linalg.vector_norm(q.double(), dim=1, keepdim=True)
        self.rounding = 4 * _U * self.norms * quantized.row_norm  # of the score to fp32, on either side

    def scores(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        return self.multiply(start, stop, out)

    def drop_bad_rows(self, scores: Tensor, start: int, stop: int) -> None:
        """Integers are finite."""

    def group_margins(self, start: int, stop: int, group: int) -> Tensor:
        error = group_max(self.quantized.error[None, start:stop], group)  # (1, groups)
        reach = group_max(self.quantized.reach[None, start:stop], group)
        return self.norms * error + self.left_out * reach + self.rounding

    def margins(self, queries: Tensor, ids: Tensor) -> Tensor:
        pairs = self.norms[queries, 0] * self.quantized.error[ids]
        return pairs + self.left_out[queries, 0] * self.quantized.reach[ids] + self.rounding[queries, 0]


class _Found(NamedTuple):
    """Pairs that may be among the K best, with what is known of their scores."""

    queries: Tensor  # (M,) int64
    ids: Tensor  # (M,) int64
    scores: Tensor  # (M,) fp64, in units of the truth
    margins: Tensor  # (M,) fp64


def scan(scorer: Scorer, n: int, k: int, tile: int) -> Candidates:
    """Every pair that may be among the K best.

    `floor` is a lower bound on each query's K-th best score: K different rows are known to reach it. A pair
    survives if its upper bound is not below the floor. A tile is first looked at by the maxima of groups, and
    by its elements only in the groups that may hold a candidate.
    """
    unit = scorer.unit
    tiles = _Tiles(scorer, GROUP if n >= 8 * k * GROUP else _SMALL_GROUP)
    # The rows that give the first floor. A large K is worth a pass of its own: a floor that rises late lets too
    # many pairs through on the way.
    first = min(n, tile) if k <= scorer.one_pass else n
    best = _lower_bounds(tiles, first, k, tile)  # (B, K), of K different rows
    floor = best[:, -1:]
    found: list[_Found] = []
    fresh: list[Tensor] = []  # lower bounds not yet in `best`
    count = 0
    for start in range(0, n, tile):
        stop = min(start + tile, n)
        pairs = tiles.candidates(start, stop, floor)
        if len(pairs.ids):
            found.append(pairs)
            count += len(pairs.ids)
            if start >= first:  # a row must not count twice
                fresh.append(tiles.lower_bounds(start, stop))
        if len(fresh) >= min(start // tile, 8):
            best, fresh = _merge_best(best, fresh), []
            floor = best[:, -1:]
        limit = len(unit) * (16 * k + scorer.allowance + stop // scorer.sparsity)
        if count > 2 * limit:
            found = [_prune(found, floor, k)]
            count = len(found[0].ids)
            if count > limit:
                raise TooManyCandidatesError
    if fresh:
        floor = _merge_best(best, fresh)[:, -1:]
    pairs = _prune(found, floor, k)
    return Candidates(pairs.queries, pairs.ids, torch.bincount(pairs.queries, minlength=len(unit)))


def _lower_bounds(tiles: _Tiles, n: int, k: int, tile: int) -> Tensor:
    """The K largest lower bounds among different ones of the first `n` rows: (B, K) fp64, padded with -inf.

    Where there are enough groups only the best of each counts, which is quicker and little worse.
    """
    scorer = tiles.scorer
    best = torch.full((len(scorer.unit), k), -torch.inf, dtype=torch.float64, device=scorer.unit.device)
    fresh: list[Tensor] = []
    for start in range(0, n, tile):
        stop = min(start + tile, n)
        if 4 * n >= 5 * k * tiles.group:
            fresh.append(tiles.lower_bounds(start, stop))
        else:
            scores = tiles.load(start, stop)[:, : stop - start]
            top, at = scores.topk(min(k, stop - start), dim=1)
            rows = torch.arange(len(scores), device=scores.device)[:, None]
            fresh.append(top * scorer.unit - scorer.margins(rows, at + start))
        if len(fresh) == 8:
            best, fresh = _merge_best(best, fresh), []
    return _merge_best(best, fresh) if fresh else best


class _Tiles:
    """Scores of one tile after another, with -inf for rows that are not finite, and the maxima of their groups.

    The latest tile is kept: that of the first floor is also the first to be scanned, and of a small memory the only
    one.
    """

    def __init__(self, scorer: Scorer, group: int) -> None:
        self.scorer, self.group = scorer, group
        self.latest: tuple[int, int] | None = None

    def load(self, start: int, stop: int) -> Tensor:
        """(B, T), with T filled up to whole groups by what no threshold lets pass."""
        if self.latest != (start, stop):
            width = -(-(stop - start) // self.group) * self.group
            unit = self.scorer.unit
            self.scores = workspace.empty("scores", (len(unit), width), self.scorer.dtype, unit.device)
            real = self.scores[:, : stop - start]
            self.scorer.scores(start, stop, out=real)
            self.scores[:, stop - start :] = _lowest(self.scorer.dtype)
            self.peaks = group_max(self.scores, self.group)  # (B, groups)
            # A sum is finite only if all its terms are.
            if self.scorer.dtype.is_floating_point and not math.isfinite(self.peaks.sum()):
                self.scorer.drop_bad_rows(real, start, stop)
                self.peaks = group_max(self.scores, self.group)
            self.margins = self.scorer.group_margins(start, stop, self.group)  # (B or 1, groups or 1)
            self.latest = start, stop
        return self.scores

    def lower_bounds(self, start: int, stop: int) -> Tensor:
        """Of the best row of each group: (B, groups) fp64."""
        self.load(start, stop)
        return self.peaks * self.scorer.unit - self.margins

    def candidates(self, start: int, stop: int, floor: Tensor) -> _Found:
        """The pairs of this tile whose upper bound is not below the floor, by query, then by id."""
        scores, unit = self.load(start, stop), self.scorer.unit
        groups = self.peaks.shape[1]
        needed = _at_least((floor - self.margins) / unit, scores.dtype)  # what a score must reach
        at = _flat_nonzero(self.peaks >= needed)  # (M,) of B x groups
        members = scores.view(-1, self.group).index_select(0, at)  # (M, GROUP)
        needed = needed.expand_as(self.peaks).reshape(-1)[at] if needed.shape[1] > 1 else needed[at // groups, 0]
        inside = _flat_nonzero(members >= needed[:, None])  # of M x GROUP
        m = inside // self.group
        at = at[m]
        queries = at // groups
        ids = (at - queries * groups) * self.group + (inside - m * self.group) + start
        truth = members.view(-1)[inside] * unit[queries, 0]
        return _Found(queries, ids, truth, self.scorer.margins(queries, ids))


def group_max(scores: Tensor, group: int = GROUP) -> Tensor:
    """Maxima of `group` neighbouring columns: (B, T) -> (B, ceil(T / group)); the last ones may be fewer."""
    missing = -scores.shape[1] % group
    if missing:
        scores = F.pad(scores, (0, missing), value=_lowest(scores.dtype))
    return scores.unflatten(1, (-1, group)).amax(2)


def best_of_each(values: Tensor, counts: Tensor, k: int) -> Tensor:
    """The K largest of each query's values, best first: (M,), the first query's before the next one's -> (B, K).

    Where there are fewer the rest is the lowest value of the type.
    """
    width = max(k, int(counts.max()))
    if len(counts) > 1 and len(counts) * width > _TABLE:  # some have very many: one after another
        each = zip(values.split(counts.tolist()), counts.split(1), strict=True)
        return torch.cat([best_of_each(own, count, k) for own, count in each])
    table = values.new_full((len(counts), width), _lowest(values.dtype))
    table[torch.arange(width, device=values.device) < counts[:, None]] = values
    return table.topk(k, dim=1).values


def _flat_nonzero(mask: Tensor) -> Tensor:
    """Places of what is true, as if `mask` had one dimension."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))  # several times as fast as torch's
    return mask.flatten().nonzero()[:, 0]


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


def _prune(found: list[_Found], floor: Tensor, k: int) -> _Found:
    """All that was found, by query and id, less what K others of the same query are proven to beat."""
    pairs = _Found(*(torch.cat(parts) for parts in zip(*found, strict=True))) if len(found) > 1 else found[0]
    if len(found) > 1:
        order = pairs.queries.argsort(stable=True)  # ids ascend from tile to tile
        pairs = _Found(*(part[order] for part in pairs))
    if 4 * len(pairs.ids) > 5 * k * len(floor):  # else there is little to gain
        counts = torch.bincount(pairs.queries, minlength=len(floor))
        own = best_of_each(pairs.scores - pairs.margins, counts, k)[:, -1:]
        floor = torch.maximum(floor, own)
    alive = _flat_nonzero(pairs.scores + pairs.margins >= floor[pairs.queries, 0])
    return pairs if len(alive) == len(pairs.ids) else _Found(*(part[alive] for part in pairs))
