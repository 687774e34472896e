"""Exact top-K inner product of B queries against N rows, in tiles, on any device.

    score(q, z) = the fp64 inner product rounded to fp32;   order: score descending, then id ascending.

A fast, inexact product with a proven error bound leaves a few candidates per query, which are scored again in fp64
and ranked. So the answer does not depend on the product, the device, the tile size, the number of threads or how the
rows are split. On a CPU the product is one of fp32, or of int8 where a copy of the rows is given:

    for each tile of rows
        scores    inexact ones, (B, T); of each group of rows the largest is looked at first
        floor     K different rows are proven to score at least this
        keep      every pair of a query and a row whose upper bound is not below the floor
    score what was kept in fp64, and rank it

After the product little is left to do, in many small steps: there numpy's calls cost a fraction of torch's. Where
the bound prunes too little (rows that are all alike) the next product is tried: int8, fp32, then fp64 throughout.
`search_gpu` does the same for accelerators, in few large operations.

For vectors on the grid of 2^-24 with norms of at most 1 (what `NeighborMemory` keeps; every fp16 vector is on it) an
fp64 sum is exact in any order, so the identity of all answers is a theorem. For other inputs it holds except where a
true score lies within about 1e-15 of a rounding boundary of fp32.

Nothing of size B x N is ever held where that is more than 34 MB.
"""

from __future__ import annotations

import math
import timeit
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from adasim.neighbors.arithmetic import (
    NO_ROW,
    U,
    buffer,
    error_of_products,
    ieee_products,
    pack,
    row_norms,
    scores_of_pairs,
    search_in_fp64,
    unpack,
)
from adasim.neighbors.search_gpu import search_on_gpu

_QUERIES = 512  # queries per pass over the rows
_FP64_TILE = 2048  # rows multiplied at once in fp64: more would be fresh memory each time
_TILE_SCORES = 1 << 22  # 17 MB: still in a large cache when they are looked at
_ONE_TILE = 1 << 23  # scores up to which there is one tile alone: 34 MB
_LOWEST = torch.iinfo(torch.int32).min

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
        quantized: an int8 copy of the same rows, for CPUs. With it the int8 product is used wherever it is the
            faster one; the answer is the same.
        row_norm: an upper bound on the norms of the rows, if known and all rows are finite; saves measuring them.

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
        if row_norm is None:
            norms = row_norms(rows)
            if not (finite := norms.isfinite()).all():
                similarities, places = search(queries, rows[finite], k)
                ids = finite.nonzero()[:, 0]
                return similarities, torch.where(places >= 0, F.pad(ids, (0, 1), value=-1)[places], -1)
            row_norm = float(norms.max()) if len(rows) else 0.0
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
    q: Tensor, rows: Tensor, k: int, quantized: QuantizedRows | None, row_norm: float
) -> tuple[Tensor, Tensor]:
    if quantized is not None and quantized.worth_trying():
        try:
            return search_by(Int8Product(q, quantized), q, rows, k)
        except TooManyCandidatesError:
            quantized.pause = 31  # the next searches do not try it
    try:
        return search_by(FloatProduct(q, rows, row_norm), q, rows, k)
    except TooManyCandidatesError:  # so many near ties that fp32 cannot tell them apart
        return search_in_fp64(q, rows, k, _FP64_TILE)


class TooManyCandidatesError(Exception):
    """The bound prunes too little: another product will be faster."""


def search_by(
    product: FloatProduct | Int8Product, q: Tensor, rows: Tensor, k: int, tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """Similarities and ids (B, K) as `search` has them; `tile` rows are looked at together.

    Raises:
        TooManyCandidatesError: the product's bound prunes too little.
    """
    if tile is None:
        one_tile = len(q) * len(rows) <= _ONE_TILE
        tile = len(rows) if one_tile else _TILE_SCORES // max(len(q), 64) // 64 * 64
    queries, places, scores = candidates(product, len(rows), k, tile)
    ids = places if product.order is None else product.order.numpy()[places]

    def best(pairs: Array) -> Array:
        """Keys (B, K) of the best of some pairs, by their exact scores."""
        at, of = torch.from_numpy(ids[pairs]), queries[pairs]
        keys = pack(scores_of_pairs(q, rows, torch.from_numpy(of), at), at).numpy()
        return _best_of_each(keys, np.bincount(of, minlength=len(q)), k, NO_ROW)

    if len(ids) <= 2 * k * len(q):
        return unpack(torch.from_numpy(best(np.arange(len(ids)))))
    # Exact scores of the most promising ones are a higher floor than any bound: most others need none.
    values = scores * product.unit.numpy()[queries, 0]
    kth = _best_of_each(values, np.bincount(queries, minlength=len(q)), k, -np.inf)[:, -1]
    promising = values >= kth[queries]
    first = best(promising.nonzero()[0])
    floor = unpack(torch.from_numpy(first[:, -1]))[0].double().numpy() - product.offset.numpy()[:, 0]
    margins = product.margins_of(torch.from_numpy(queries), torch.from_numpy(places)).numpy()
    others = (~promising & (values + margins >= floor[queries])).nonzero()[0]
    both = np.concatenate([first, best(others)], axis=1)
    both.sort(axis=1)
    return unpack(torch.from_numpy(both[:, : -k - 1 : -1].copy()))


def candidates(product: FloatProduct | Int8Product, n: int, k: int, tile: int) -> tuple[Array, ...]:
    """Queries, the product's places of rows and inexact scores, (M,) each, of every pair that may be among the K
    best, by query."""
    unit = product.unit.numpy()  # (B, 1)
    # Only the best row of each group counts for the floor; with enough groups that is quicker and little worse.
    group = next(g for g in (64, 32, 1) if g == 1 or 4 * min(n, tile) >= 5 * k * g)
    tiles = [(start, min(start + tile, n)) for start in range(0, n, tile)]

    def scored(start: int, stop: int) -> tuple[Array, Array, Array]:
        """Scores (B, T) of a tile's rows, their maxima (B, groups) and margins (B, groups or 1)."""
        scores = product.scores(start, stop, -(-(stop - start) // group) * group)
        peaks = scores.unflatten(1, (-1, group)).amax(2) if group > 1 else scores
        return scores.numpy(), peaks.numpy(), product.margins(start, stop, group).numpy()

    # Lower bounds on the scores of K rows, least first.
    best = np.full((len(unit), k), -np.inf, dtype=np.float32)
    two_passes = k > product.one_pass and len(tiles) > 1
    for start, stop in tiles if two_passes else ():
        _, peaks, margins = scored(start, stop)
        best = _largest(k, best, peaks * unit - margins)
    parts: list[tuple[Array, ...]] = []  # queries, ids and scores of what was kept
    for start, stop in tiles:
        scores, peaks, margins = scored(start, stop)
        if not two_passes:
            best = _largest(k, best, peaks * unit - margins)
        floor = np.nextafter(best[:, :1], np.float32(-np.inf)).astype(np.float64)
        needed = _at_least((floor - margins) / unit, scores.dtype)  # what a score must reach
        at = np.flatnonzero(peaks >= needed)  # of B x groups
        members = scores.reshape(-1, group)[at]  # (M, group)
        needed = np.broadcast_to(needed, peaks.shape)[at // peaks.shape[1], at % peaks.shape[1]]
        inside = np.flatnonzero(members >= needed[:, None])  # of M x group
        limit = len(unit) * (16 * k + min(64 + stop // 8, 1024 + stop // 512))
        if len(inside) > 8 * limit:
            raise TooManyCandidatesError
        m = inside // group
        queries = at[m] // peaks.shape[1]
        ids = (at[m] - queries * peaks.shape[1]) * group + (inside - m * group) + start
        parts.append((queries, ids, members.reshape(-1)[inside]))
        if sum(len(part[1]) for part in parts) > 2 * limit:
            parts = [_prune(product, parts, k)]
            if len(parts[0][1]) > limit:
                raise TooManyCandidatesError
    return _prune(product, parts, k)


def _prune(product: FloatProduct | Int8Product, parts: list[tuple[Array, ...]], k: int) -> tuple[Array, ...]:
    """The pairs of all parts, by query, less those that K others are proven to beat by their own margins."""
    queries, ids, scores = map(np.concatenate, zip(*parts, strict=True))
    if len(parts) > 1:
        order = queries.astype(np.int16).argsort(kind="stable")  # of 16 bits numpy makes a radix sort
        queries, ids, scores = queries[order], ids[order], scores[order]
    if len(ids) <= 1.25 * k * len(product.unit):  # little to gain
        return queries, ids, scores
    margins = product.margins_of(torch.from_numpy(queries), torch.from_numpy(ids)).numpy()
    values = scores * product.unit.numpy()[queries, 0]
    counts = np.bincount(queries, minlength=len(product.unit))
    kth = _best_of_each(values - margins, counts, k, -np.inf)[:, -1]
    alive = values + margins >= kth[queries]
    return queries[alive], ids[alive], scores[alive]


def _best_of_each(values: Array, counts: Array, k: int, filling: float) -> Array:
    """The K largest of each query's values, best first: (M,), the first query's before the next one's -> (B, K).

    Where there are fewer the rest is `filling`.
    """
    width = max(k, int(counts.max()))
    if len(counts) > 1 and len(counts) * width > 1 << 20:  # some have very many: one after another
        each = np.split(values, counts.cumsum()[:-1])
        return np.concatenate([_best_of_each(own, np.array([len(own)]), k, filling) for own in each])
    table = np.full((len(counts), width), filling, dtype=values.dtype)
    table[np.arange(width) < counts[:, None]] = values
    table.sort(axis=1)
    return table[:, : -k - 1 : -1].copy()


def _largest(k: int, best: Array, more: Array) -> Array:
    """The K largest of both, least first; as fp32, at which numpy is quick."""
    both = np.concatenate([best, more.astype(np.float32, copy=False)], axis=1)
    return np.partition(both, -k, axis=1)[:, -k:]


def _at_least(threshold: Array, dtype: np.dtype[Any]) -> Array:
    """A threshold in the scores' own type that lets pass at least what the exact one would, and no filled-up place.

    Integers round down. fp32 may round up by half a unit in the last place, which the margin covers.
    """
    if dtype.kind == "f":
        return np.maximum(threshold, np.finfo(dtype).min).astype(dtype)
    return np.clip(np.floor(threshold), np.iinfo(dtype).min + 1, np.iinfo(dtype).max).astype(dtype)


# ---- products: |score * unit - (truth - offset)| <= margin; unit and offset are of a query ----


class FloatProduct:
    """fp32, with finite rows whose norms are at most `row_norm`."""

    order = None  # places are the rows' own
    one_pass = 1 << 31  # the largest K for which one pass over the rows is quicker than two

    def __init__(self, q: Tensor, rows: Tensor, row_norm: float) -> None:
        self.q, self.rows = q, rows
        self.unit, self.offset = torch.ones(len(q), 1, dtype=torch.float64), torch.zeros(len(q), 1)
        norms = torch.linalg.vector_norm(q, dim=1, keepdim=True, dtype=torch.float64)
        # 1 %: a threshold rounded to fp32 may be up to half a unit in the last place too high.
        self.margin = 1.01 * error_of_products(q.shape[1], q.dtype) * norms * row_norm + 1e-36  # (B, 1)

    def scores(self, start: int, stop: int, width: int) -> Tensor:
        """Of rows start to stop, filled up to (B, width) with the lowest value."""
        scores = buffer("scores", (len(self.q), width), torch.float32)
        torch.mm(self.q, self.rows[start:stop].float().T, out=scores[:, : stop - start])
        scores[:, stop - start :] = -torch.inf
        return scores

    def margins(self, start: int, stop: int, group: int) -> Tensor:
        """The largest margin of each group of rows, broadcastable to (B, groups), fp64."""
        return self.margin

    def margins_of(self, queries: Tensor, ids: Tensor) -> Tensor:
        """Margins of single pairs, (M,) fp64."""
        return self.margin[queries, 0]


class Int8Product:
    """int8 codes, whose products are exact in int32. The margin is the codes' own error.

    With mu a vector near the rows' mean and s a scale, each row is stored as codes a (int8, clipped) and

        z = mu + s a + e,      error = |e|,      reach = |s a|;

    a query, with a scale of its own, as q = t b + f. The integers give q.z up to a constant per query, and

        |q.z - q.mu - s t (a.b)| = |q.e + f.(s a)| <= |q| error + |f| reach        (Cauchy-Schwarz).

    Taking off the mean costs nothing (it moves all scores of a query alike) and is what keeps the bound tight
    when features crowd around a common direction, as they do in every encoder. `error` is measured, not
    estimated, and rows lie in its order, so clipped outliers only loosen the bound of the few groups that they share.
    """

    one_pass = 32  # with a larger K a floor that rises late lets too many pairs through on the way

    def __init__(self, q: Tensor, quantized: QuantizedRows) -> None:
        self.quantized, self.order = quantized, quantized.order
        scale = q.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
        codes = (q / scale).round_().clamp_(-127, 127)
        self.codes = codes.to(torch.int8)
        self.unit = scale.double() * quantized.scale
        self.offset = q.double() @ quantized.mean.double()[:, None]
        self.norms = torch.linalg.vector_norm(q.double(), dim=1, keepdim=True)
        left_out = q.double() - codes.double() * scale.double()
        self.left_out = torch.linalg.vector_norm(left_out, dim=1, keepdim=True)
        self.rounding = 4 * U * self.norms * quantized.row_norm  # of the score to fp32, on either side

    def scores(self, start: int, stop: int, width: int) -> Tensor:
        scores = torch._int_mm(self.codes, self.quantized.codes[start:stop].T)
        missing = width - scores.shape[1]
        return F.pad(scores, (0, missing), value=_LOWEST) if missing else scores

    def margins(self, start: int, stop: int, group: int) -> Tensor:
        error, reach = (
            F.pad(bound[start:stop], (0, -(stop - start) % group)).view(-1, group).amax(1)  # (groups,)
            for bound in (self.quantized.error, self.quantized.reach)
        )
        return self.norms * error + self.left_out * reach + self.rounding

    def margins_of(self, queries: Tensor, ids: Tensor) -> Tensor:
        pairs = self.norms[queries, 0] * self.quantized.error[ids]
        return pairs + self.left_out[queries, 0] * self.quantized.reach[ids] + self.rounding[queries, 0]


class QuantizedRows:
    """int8 codes of finite (N, D) rows, for CPUs; `write` after a few rows have changed."""

    def __init__(self, rows: Tensor) -> None:
        self.codes = torch.zeros(rows.shape, dtype=torch.int8)
        self.error, self.reach = torch.zeros(len(rows)), torch.zeros(len(rows))
        self.order = self.place = torch.arange(len(rows))  # the row at each place, the place of each row
        sample = rows[:: max(1, len(rows) // 4096)].float()  # which chooses mean and scale
        self.mean = sample.mean(0)
        self.scale = _best_scale(sample - self.mean)
        self.row_norm = 0.0  # no row is longer
        self.pause = 0  # searches for which int8 is not tried
        for ids in torch.arange(len(rows)).split(1 << 14):
            self.write(ids, rows[ids])
        by_error = self.error.argsort()
        for some in self.codes.split(64, dim=1):  # a few columns at a time, of which a copy is small
            some.copy_(some[by_error])
        self.error, self.reach, self.order = self.error[by_error], self.reach[by_error], self.order[by_error]
        self.place = self.order.argsort()

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Convert the rows that were just written at `ids`."""
        centred = rows.float() - self.mean
        codes = (centred / self.scale).round_().clamp_(-127, 127)
        reach = codes * self.scale
        error = torch.linalg.vector_norm(centred - reach, dim=1)
        # The lines above round: relatively in the norms (D u), absolutely in the differences (a few u |z|).
        slack = 1 + 2 * (rows.shape[1] + 4) * U
        size = torch.linalg.vector_norm(centred, dim=1) + torch.linalg.vector_norm(self.mean)
        places = self.place[ids]
        self.codes[places] = codes.to(torch.int8)
        self.error[places] = error * slack + 8 * U * size
        self.reach[places] = torch.linalg.vector_norm(reach, dim=1) * slack
        self.row_norm = max(self.row_norm, float(size.max()) * slack)

    def worth_trying(self) -> bool:
        """False where int8 is slow, and for a while after the bound pruned too little."""
        if self.pause:
            self.pause -= 1
            return False
        return int8_is_faster(self.codes.shape[1])


def _best_scale(centred: Tensor) -> float:
    """The scale with the least mean error on a sample: fine steps against clipped outliers."""
    largest = float(centred.abs().max()) or 127.0

    def mean_error(scale: float) -> float:
        codes = (centred / scale).round_().clamp_(-127, 127)
        return float(torch.linalg.vector_norm(centred - codes * scale, dim=1).mean())

    return min((largest / 127 * 2.0 ** (-i / 2) for i in range(12)), key=mean_error)


@lru_cache
def int8_is_faster(dim: int) -> bool:
    """Measure once per width whether an int8 product beats fp32 by enough to pay for rescoring."""
    if dim == 1:  # torch 2.6 has a wrong product of this width
        return False
    a8, b8 = (torch.ones(n, dim, dtype=torch.int8) for n in (128, 4096))
    a, b = a8.float(), b8.float()
    # Of several rounds, the one least disturbed by others.
    int8 = min(timeit.repeat(lambda: torch._int_mm(a8, b8.T), number=1, repeat=6))
    return int8 * 1.5 < min(timeit.repeat(lambda: a @ b.T, number=1, repeat=6))
