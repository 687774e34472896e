"""Exact top-K inner product of B queries against N rows, in tiles, on any device.

A fast, inexact product (an fp32 GEMM, or an int8 one that is several times as fast) with a proven error bound
leaves a few candidates per query (`scan`); these are scored again in fp64 and ranked. So the answer does not
depend on the engine, the tile size, the number of threads or how the rows are split:

    score(q, z) = the fp64 inner product rounded to fp32;   order: score descending, then id ascending.

For vectors on the grid of 2^-24 with norms of at most 1 (what `NeighborMemory` keeps; every fp16 vector is on
it) an fp64 sum is exact in any order, so this identity is a theorem. For other inputs it holds except where a
true score lies within about 1e-15 of a rounding boundary of fp32.

Nothing of size B x N is ever held.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adasim.neighbors.keys import pack, unpack
from adasim.neighbors.precision import ieee_products
from adasim.neighbors.quantized import QuantizedRows
from adasim.neighbors.scan import (
    GROUP,
    Candidates,
    FloatScorer,
    Int8Scorer,
    TooManyCandidatesError,
    best_of_each,
    group_max,
    scan,
)
from adasim.neighbors.workspace import workspace

_TILE_SCORES = 1 << 21  # scores per tile: 8 MB, still in the cache when they are looked at
_QUERIES = 512  # queries per pass over the rows
_PAIRS = 1024  # candidates rescored at once


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
        quantized: an int8 copy of the same (finite) rows. With it the int8 engine runs wherever it is the
            faster one on this device; the answer is the same.
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
    similarities = queries.new_full((len(queries), k), -torch.inf, dtype=torch.float32)
    ids = torch.full((len(queries), k), -1, dtype=torch.int64, device=queries.device)
    finite = torch.isfinite(queries).all(1).nonzero()[:, 0]
    if len(rows) == 0 or len(finite) == 0:
        return similarities, ids
    with ieee_products(queries.device):
        for block in finite.split(_QUERIES):
            best = _search_block(queries[block].float(), rows, k, quantized, row_norm)
            similarities[block], ids[block] = best
    return similarities, ids


def merge(similarities: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The K best of several lists laid side by side, (B, M) each, in the order of `search`."""
    order = ids.argsort(dim=1, stable=True)
    similarities, ids = similarities.gather(1, order), ids.gather(1, order)
    order = similarities.argsort(dim=1, descending=True, stable=True)[:, :k]
    return similarities.gather(1, order), ids.gather(1, order)


@torch.no_grad()
def _search_block(
    q: Tensor, rows: Tensor, k: int, quantized: QuantizedRows | None, row_norm: float | None
) -> tuple[Tensor, Tensor]:
    tile = _TILE_SCORES // max(len(q), 64) // GROUP * GROUP
    if quantized is not None and quantized.worth_trying():
        try:
            return _rank(q, rows, scan(Int8Scorer(q, quantized), len(rows), k, tile), k)
        except TooManyCandidatesError:
            quantized.failed()
    try:
        return _rank(q, rows, scan(FloatScorer(q, rows, row_norm), len(rows), k, tile), k)
    except TooManyCandidatesError:  # so many near ties that fp32 cannot tell them apart
        return _dense(q, rows, k, tile)


def _rank(q: Tensor, rows: Tensor, candidates: Candidates, k: int) -> tuple[Tensor, Tensor]:
    """Score the candidates in fp64, then take each query's K best."""
    scores = _exact_scores(q, rows, candidates)
    keys = pack(scores, candidates.ids)
    keys.masked_fill_(~torch.isfinite(scores), torch.iinfo(torch.int64).min)
    return _unpacked(best_of_each(keys, candidates.counts, k))


def _exact_scores(q: Tensor, rows: Tensor, candidates: Candidates) -> Tensor:
    """fp64 inner products of the pairs, rounded to fp32: (M,)."""
    q64, dim = q.double(), q.shape[1]
    scores = q.new_empty(len(candidates.ids))
    start = 0
    for b, ids in zip(candidates.queries.split(_PAIRS), candidates.ids.split(_PAIRS), strict=True):
        z = workspace.empty("rows", (len(ids), dim), rows.dtype, q.device)
        products, factors = (
            workspace.empty(name, (len(ids), dim), torch.float64, q.device) for name in ("products", "factors")
        )
        torch.index_select(rows, 0, ids, out=z)
        torch.index_select(q64, 0, b, out=factors)
        scores[start : start + len(ids)] = products.copy_(z).mul_(factors).sum(1)
        start += len(ids)
    return scores.add_(0.0)  # no negative zero


def _dense(q: Tensor, rows: Tensor, k: int, tile: int) -> tuple[Tensor, Tensor]:
    """fp64 products throughout, for rows so alike that no filter helps (a collapsed encoder, an empty cache).

    A score and its id are packed into one integer whose order is that of `search`, so that topk breaks ties.
    """
    q64 = q.double()
    best = torch.full((len(q), k), torch.iinfo(torch.int64).min, device=q.device)
    for start in range(0, len(rows), tile):
        z = rows[start : start + tile].double()
        scores = (q64 @ z.T).float() + 0.0  # (B, T); + 0.0: no negative zero
        peaks = group_max(scores).amax(1)
        if not torch.isfinite(peaks).all():
            scores.masked_fill_(~torch.isfinite(z).all(1), -torch.inf)
            peaks = group_max(scores).amax(1)
        # Later ids lose ties, so only a score above the K-th best so far can enter.
        b = (peaks > unpack(best[:, -1])[0]).nonzero()[:, 0]
        if len(b):
            keys = pack(scores[b], torch.arange(start, start + len(z), device=q.device))
            best[b] = torch.cat([best[b], keys], 1).topk(k, dim=1).values
    return _unpacked(best)


def _unpacked(keys: Tensor) -> tuple[Tensor, Tensor]:
    similarities, ids = unpack(keys)
    return similarities, torch.where(torch.isfinite(similarities), ids, -1)
