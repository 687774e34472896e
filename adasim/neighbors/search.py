"""Exact top-K inner product of B queries against N rows, in tiles, on any device.

A fast, inexact product with a proven error bound leaves a few candidates per query, which are scored again in fp64
and ranked: on a CPU by `search_cpu`, with fp32 or int8 products, elsewhere by `search_gpu`. So the answer does not
depend on the engine, the device, the tile size, the number of threads or how the rows are split:

    score(q, z) = the fp64 inner product rounded to fp32;   order: score descending, then id ascending.

For vectors on the grid of 2^-24 with norms of at most 1 (what `NeighborMemory` keeps; every fp16 vector is on
it) an fp64 sum is exact in any order, so this identity is a theorem. For other inputs it holds except where a
true score lies within about 1e-15 of a rounding boundary of fp32.

Nothing of size B x N is ever held where that is more than 34 MB.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adasim.neighbors.arithmetic import ieee_products, merge, search_in_fp64
from adasim.neighbors.quantized import Int8Product, QuantizedRows
from adasim.neighbors.search_cpu import FloatProduct, TooManyCandidatesError, search_on_cpu, tile_rows
from adasim.neighbors.search_gpu import search_on_gpu

__all__ = ["merge", "search"]

_QUERIES = 512  # queries per pass over the rows
_FP64_TILE = 2048  # rows multiplied at once in fp64: more would be fresh memory each time


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
