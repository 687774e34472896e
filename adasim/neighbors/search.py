"""Exact top-K inner product of B queries against N rows, in tiles, on any device.

A fast, inexact product with a proven error bound leaves a few candidates per query, which are scored again in fp64
and ranked: on a CPU below, with fp32 or int8 products, elsewhere by `search_gpu`. So the answer does not
depend on the engine, the device, the tile size, the number of threads or how the rows are split:

    score(q, z) = the fp64 inner product rounded to fp32;   order: score descending, then id ascending.

For vectors on the grid of 2^-24 with norms of at most 1 (what `NeighborMemory` keeps; every fp16 vector is on
it) an fp64 sum is exact in any order, so this identity is a theorem. For other inputs it holds except where a
true score lies within about 1e-15 of a rounding boundary of fp32.

Nothing of size B x N is ever held where that is more than 34 MB.

On a CPU the product (fp32, or int8 with a copy of the rows) says how far off it can be. One pass over the rows,
tile by tile, keeps every pair of a query and a row unless K other rows are proven to score higher. After the product
little is left to do, in many small steps: there numpy's calls cost a fraction of torch's.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from adasim.neighbors.arithmetic import (
    NO_ROW,
    buffers,
    error_of_products,
    ieee_products,
    largest_norm,
    merge,
    pack,
    scores_of_pairs,
    search_in_fp64,
    unpack,
)
from adasim.neighbors.quantized import Int8Product, QuantizedRows
from adasim.neighbors.search_gpu import search_on_gpu

__all__ = ["merge", "search"]

_QUERIES = 512  # queries per pass over the rows
_FP64_TILE = 2048  # rows multiplied at once in fp64: more would be fresh memory each time
_GROUP = 64  # columns that share one maximum: the first, cheap look at a tile
_SMALL_GROUP = 32  # where there would be few groups; the maxima of fewer columns take longer
_TILE_SCORES = 1 << 22  # 17 MB: still in a large cache when they are looked at
_ONE_TILE = 1 << 23  # scores up to which there is one tile alone: 34 MB
_TABLE = 1 << 20  # places of a table that is made at once

Array = np.ndarray[Any, Any]


@torch.no_grad()
def search(
    queries: Tensor,
    rows: Tensor,
    k: int,
    *,
    quantized: QuantizedRows | None = None,
    row_norm: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The K largest inner products of each query with the rows, best first.

    Args:
        queries: (B, D), any floating type.
        rows: (N, D) on the same device, fp32 or fp16. A row with a NaN or Inf is never returned. The device must
            have fp64 (`exact_device`); autocast and TF32 are off for the length of the search.
        k: how many; where there are fewer finite rows the result is padded.
        quantized: an int8 copy of the same (finite) rows, for CPUs. With it the int8 engine runs wherever it is
            the faster one; the answer is the same.
        row_norm: an upper bound on the norms of the rows, if known; saves measuring them.

    Returns:
        similarities (B, K) fp32 and ids (B, K) int64. Ties go to the smaller id. Padding, and every entry of
        a non-finite query, is -inf and -1.

    >>> search(torch.tensor([[0.0, 2.0, 1.0, 0.0]]), torch.eye(4), 3)
    (tensor([[2., 1., 0.]]), tensor([[1, 2, 0]]))
    """
    if queries.ndim != 2 or rows.ndim != 2 or queries.shape[1] != rows.shape[1]:
        raise ValueError(
            f"search needs (B, D) and (N, D); got {tuple(queries.shape)} and {tuple(rows.shape)}"
        )
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")
    with ieee_products(queries.device):
        if len(queries) and len(rows) and queries.device.type != "cpu":
            return search_on_gpu(queries, rows, k, row_norm)
        if 0 < len(queries) <= _QUERIES and len(rows) and math.isfinite(queries.sum()):
            return _search_block(queries.float(), rows, k, quantized, row_norm)  # as nearly always
        similarities = queries.new_full((len(queries), k), -torch.inf, dtype=torch.float32)
        ids = torch.full((len(queries), k), -1, device=queries.device)
        finite = torch.isfinite(queries).all(1).nonzero()[:, 0] if len(rows) else ids[:0, 0]
        for block in finite.split(_QUERIES) if len(finite) else ():
            best = _search_block(queries[block].float(), rows, k, quantized, row_norm)
            similarities[block], ids[block] = best
        return similarities, ids


def _search_block(
    q: Tensor, rows: Tensor, k: int, quantized: QuantizedRows | None, row_norm: float | None
) -> tuple[Tensor, Tensor]:
    tile = tile_rows(len(q), len(rows))
    if quantized is not None and quantized.worth_trying():
        try:
            return search_on_cpu(q, rows, k, Int8Product(q, quantized), tile)
        except TooManyCandidatesError:
            quantized.failed()
    try:
        return search_on_cpu(q, rows, k, FloatProduct(q, rows, row_norm), tile)
    except TooManyCandidatesError:  # so many near ties that fp32 cannot tell them apart
        return search_in_fp64(q, rows, k, _FP64_TILE)


class TooManyCandidatesError(Exception):
    """The bound prunes too little: another product will be faster."""


class Product(Protocol):
    """Inexact scores: |score * unit - (truth + a constant per query)| <= margin."""

    unit: Tensor  # (B, 1) fp64
    one_pass: int  # the largest K for which one pass over the rows is quicker than two

    def scores(self, start: int, stop: int, width: int) -> Tensor:
        """Of rows start to stop, fp32 or int32; filled up to (B, width) with the lowest value of the type."""

    def group_margins(self, start: int, stop: int, group: int) -> Tensor:
        """The largest margin of each group of rows, broadcastable to (B, groups), fp64."""

    def margins(self, queries: Tensor, ids: Tensor) -> Tensor:
        """Margins of single pairs, fp64; `queries` and `ids` broadcast."""


class FloatProduct:
    """fp32; a row that holds a NaN or Inf scores -inf."""

    one_pass = 1 << 31

    def __init__(self, q: Tensor, rows: Tensor, row_norm: float | None) -> None:
        self.q, self.rows = q, rows
        self.unit = torch.ones(len(q), 1, dtype=torch.float64)
        row_norm = float(largest_norm(rows)) if row_norm is None else row_norm
        norms = torch.linalg.vector_norm(q, dim=1, keepdim=True, dtype=torch.float64)
        # 1 %: a threshold rounded to fp32 may be up to half a unit in the last place too high.
        self.margin = 1.01 * error_of_products(q.shape[1], q.dtype) * norms * row_norm + 1e-36  # (B, 1)

    def scores(self, start: int, stop: int, width: int) -> Tensor:
        scores = buffers.empty("scores", (len(self.q), width), torch.float32)
        real = scores[:, : stop - start]
        torch.mm(self.q, self.rows[start:stop].float().T, out=real)
        scores[:, stop - start :] = -torch.inf
        return scores

    def group_margins(self, start: int, stop: int, group: int) -> Tensor:
        return self.margin

    def margins(self, queries: Tensor, ids: Tensor) -> Tensor:
        return self.margin[queries, 0]


def search_on_cpu(q: Tensor, rows: Tensor, k: int, product: Product, tile: int) -> tuple[Tensor, Tensor]:
    """Similarities (B, K) and ids (B, K) of each query's K best rows, in the order of `search`.

    Args:
        product: of `q` and `rows`.
        tile: rows that are looked at together, see `tile_rows`.

    Raises:
        TooManyCandidatesError: the product's bound prunes too little.
    """
    queries, ids = candidates(product, rows, k, tile)
    counts = np.bincount(queries, minlength=len(q))
    at = torch.from_numpy(ids)
    keys = pack(scores_of_pairs(q, rows, torch.from_numpy(queries), at), at)
    return unpack(torch.from_numpy(_best_of_each(keys.numpy(), counts, k, NO_ROW)))


def tile_rows(queries: int, rows: int) -> int:
    """Rows of a tile."""
    return rows if queries * rows <= _ONE_TILE else _TILE_SCORES // max(queries, 64) // _GROUP * _GROUP


class _Pairs(NamedTuple):
    """Pairs that may be among the K best, by query, then by id: (M,) each."""

    queries: Array
    ids: Array
    scores: Array  # inexact ones


def candidates(product: Product, rows: Tensor, k: int, tile: int) -> tuple[Array, Array]:
    """Queries and ids, (M,) each, of every pair that may be among the K best: by query, then by id.

    `best` are lower bounds on the scores of K different rows, so the least of them is one on the K-th best score: the
    floor. A pair survives if its upper bound is not below the floor.
    """
    n, batch = len(rows), len(product.unit)
    group = _GROUP if n >= 3 * k * _GROUP else _SMALL_GROUP
    # The rows that give the first floor. A large K may be worth a pass of its own: a floor that rises late lets too
    # many pairs through on the way.
    first = min(n, tile) if k <= product.one_pass else n
    by_groups = (
        4 * first >= 5 * k * group
    )  # only the best row of each group counts: quicker, and little worse
    best = np.empty((batch, 0), dtype=np.float32)
    for start in range(0, first, tile):
        latest = _Tile(product, rows, start, min(start + tile, n), group)
        best = _largest(k, best, latest.group_bounds() if by_groups else latest.row_bounds())
    parts: list[_Pairs] = []
    for start in range(0, n, tile):
        stop = min(start + tile, n)
        if latest.start != start:
            latest = _Tile(product, rows, start, stop, group)
        if start >= first:  # a row must not count twice
            best = _largest(k, best, latest.group_bounds())
        limit = batch * (16 * k + min(64 + stop // 8, 1024 + stop // 512))
        parts.append(latest.candidates(_below(best), 8 * limit))
        if sum(len(part.ids) for part in parts) > 2 * limit:
            parts = [_prune(product, parts, best)]
            if len(parts[0].ids) > limit:
                raise TooManyCandidatesError
    pairs = _prune(product, parts, best)
    return pairs.queries, pairs.ids


class _Tile:
    """Scores of the rows from start to stop, filled up to whole groups, and the maxima of the groups."""

    def __init__(self, product: Product, rows: Tensor, start: int, stop: int, group: int) -> None:
        self.product, self.start, self.stop = product, start, stop
        scores = product.scores(start, stop, -(-(stop - start) // group) * group)
        peaks = group_max(scores, group)
        if scores.is_floating_point() and not math.isfinite(peaks.sum()):  # finite only if all its terms are
            scores[:, : stop - start].masked_fill_(~torch.isfinite(rows[start:stop]).all(1), -torch.inf)
            peaks = group_max(scores, group)
        self.scores, self.peaks, self.unit = scores.numpy(), peaks.numpy(), product.unit.numpy()
        self.margins = product.group_margins(start, stop, group).numpy()  # (B or 1, groups or 1)

    def group_bounds(self) -> Array:
        """Lower bounds on the score of each group's best row: (B, groups)."""
        return self.peaks * self.unit - self.margins

    def row_bounds(self) -> Array:
        """Lower bounds on the score of each row: (B, T)."""
        queries, ids = torch.arange(len(self.unit))[:, None], torch.arange(self.start, self.stop)
        return self.scores[:, : len(ids)] * self.unit - self.product.margins(queries, ids).numpy()

    def candidates(self, floor: Array, most: int) -> _Pairs:
        """The pairs whose upper bound is not below the floor, by query, then by id; gives up if more than `most`."""
        groups = self.peaks.shape[1]
        group = self.scores.shape[1] // groups
        needed = _at_least((floor - self.margins) / self.unit, self.scores.dtype)  # what a score must reach
        at = np.flatnonzero(self.peaks >= needed)  # of B x groups
        members = self.scores.reshape(-1, group)[at]  # (M, group)
        needed = np.broadcast_to(needed, self.peaks.shape)[at // groups, at % groups]
        inside = np.flatnonzero(members >= needed[:, None])  # of M x group
        if len(inside) > most:
            raise TooManyCandidatesError
        m = inside // group
        at = at[m]
        queries = at // groups
        ids = (at - queries * groups) * group + (inside - m * group) + self.start
        return _Pairs(queries, ids, members.reshape(-1)[inside])


def group_max(scores: Tensor, group: int) -> Tensor:
    """Maxima of `group` neighbouring columns: (B, T) -> (B, T / group)."""
    return scores.unflatten(1, (-1, group)).amax(2)


def _prune(product: Product, parts: list[_Pairs], best: Array) -> _Pairs:
    """The pairs of all parts, by query and id, less what K others of the same query are proven to beat."""
    pairs = parts[0]
    if len(parts) > 1:
        pairs = _Pairs(*map(np.concatenate, zip(*parts, strict=True)))
        order = pairs.queries.argsort(kind="stable")  # ids ascend from tile to tile
        pairs = _Pairs(*(part[order] for part in pairs))
    if 4 * len(pairs.ids) <= 5 * best.size:  # little to gain
        return pairs
    scores = pairs.scores * product.unit.numpy()[pairs.queries, 0]
    margins = product.margins(torch.from_numpy(pairs.queries), torch.from_numpy(pairs.ids)).numpy()
    counts = np.bincount(pairs.queries, minlength=len(best))
    kth = _best_of_each(scores - margins, counts, best.shape[1], -np.inf)[:, -1:]
    alive = scores + margins >= np.maximum(_below(best), kth)[pairs.queries, 0]
    return _Pairs(*(part[alive] for part in pairs))


def _largest(k: int, best: Array, more: Array) -> Array:
    """The K largest of both, least first, filled up with -inf; as fp32, at which numpy is quick."""
    more = more.astype(np.float32, copy=False)
    both = np.concatenate([best, more], axis=1) if best.size else more
    missing = k - both.shape[1]
    if missing > 0:
        both = np.pad(both, ((0, 0), (missing, 0)), constant_values=-np.inf)
    return np.partition(both, -k, axis=1)[:, -k:]


def _below(best: Array) -> Array:
    """A little less than the least of `best`, which were rounded to fp32: (B, 1) fp64."""
    return np.nextafter(best[:, :1], np.float32(-np.inf)).astype(np.float64)


def _best_of_each(values: Array, counts: Array, k: int, filling: float) -> Array:
    """The K largest of each query's values, best first: (M,), the first query's before the next one's -> (B, K).

    Where there are fewer the rest is `filling`.
    """
    width = max(k, int(counts.max()))
    if len(counts) > 1 and len(counts) * width > _TABLE:  # some have very many: one after another
        each = np.split(values, counts.cumsum()[:-1])
        return np.concatenate([_best_of_each(own, np.array([len(own)]), k, filling) for own in each])
    table = np.full((len(counts), width), filling, dtype=values.dtype)
    table[np.arange(width) < counts[:, None]] = values
    table.sort(axis=1)
    return table[:, : -k - 1 : -1].copy()


def _at_least(threshold: Array, dtype: np.dtype[Any]) -> Array:
    """A threshold in the scores' own type that lets pass at least what the exact one would, and no filled-up place.

    Integers round down. fp32 may round up by half a unit in the last place, which the margin covers.
    """
    if dtype.kind == "f":
        return np.maximum(threshold, np.finfo(dtype).min).astype(dtype)
    return np.clip(np.floor(threshold), np.iinfo(dtype).min + 1, np.iinfo(dtype).max).astype(dtype)
