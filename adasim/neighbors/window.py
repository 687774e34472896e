"""The windowed distribution p_win of the paper, for many images at once.

From an image's w top-K lists, laid side by side as M = w K entries, come

    m_win(j) = (1/w) * sum of j's similarities over the lists;  absent counts as 0, the divisor is always w;
    support  = the K best j (ties to the smaller id), or all of them;
    p_win(j) = softmax over the support of m_win(j) / tau.

Similarities are multiples of 2^-24 of at most 1 in size (`on_grid`), which fp32 holds exactly: sums are kept as
integers in that unit, exact in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

CHUNK = 256  # images whose windows are ranked at once: few enough to stay in a CPU's cache
UNIT = 2.0**-24  # of the integer sums: fp32's spacing below 1, where similarities of neighbours lie
_NOBODY = -1 << 62  # the key of a place without a candidate

Array = np.ndarray[Any, Any]


def on_grid(x: Tensor) -> Tensor:
    """fp32 values rounded to multiples of 2^-24; exact for everything of at most 1 in size."""
    return x.mul(1 / UNIT).round_().mul_(UNIT)


def p_win(neighbours: Tensor, sums: Tensor, window: int, tau: float) -> Tensor:
    """Softmax of m_win / tau over the support, (C, S) fp64, from `ranked_sums`.

    Padding gets 0, and so does all of an image that was never seen.
    """
    logits = sums.double().mul_(UNIT / window / tau)
    # Sums are sorted: the first is the largest.
    weights = (logits - logits[:, :1]).exp_().mul_(neighbours >= 0)
    return weights.div_(weights.sum(1, keepdim=True).clamp_(min=1e-300))


def ranked_sums(ids: Tensor, similarities: Tensor, k: int | None) -> tuple[Tensor, Tensor]:
    """Each image's candidates, best first, with the sums of their similarities.

    Args:
        ids: (C, M) int32; -1 is padding. Within one list an id stands once.
        similarities: (C, M) fp32, on the grid and at most 1 in size.
        k: how many candidates to keep; None keeps all.

    Returns:
        neighbours (C, S) int64, padded with -1, and sums (C, S) int64 in units of 2^-24, padded with 0.
    """
    chunks = zip(ids.split(CHUNK), similarities.split(CHUNK), strict=True)
    parts = [_ranked(some.numpy(), sims.numpy(), k) for some, sims in chunks if len(some)]
    if len(parts) == 1:
        return torch.from_numpy(parts[0][0]), torch.from_numpy(parts[0][1])
    width = max((part[0].shape[1] for part in parts), default=k or ids.shape[1])
    neighbours = torch.full((len(ids), width), -1)
    sums = torch.zeros(len(ids), width, dtype=torch.long)
    for i, part in enumerate(parts):
        place = slice(i * CHUNK, i * CHUNK + len(part[0]))
        neighbours[place, : part[0].shape[1]], sums[place, : part[1].shape[1]] = map(torch.from_numpy, part)
    return neighbours, sums


def _ranked(ids: Array, similarities: Array, k: int | None) -> tuple[Array, Array]:
    C, M = ids.shape
    ids, order = _sorted_ids(ids)
    units = (similarities * np.float32(1 / UNIT)).astype(np.int32)
    totals = np.cumsum(units.take(order), dtype=np.int64)  # over all entries of all images
    # Where the runs of equal ids end: the sum of a run is the difference of totals.
    last = np.ones((C, M), dtype=bool)
    np.not_equal(ids[:, 1:], ids[:, :-1], out=last[:, :-1])
    ends = np.flatnonzero(last)
    candidates, sums = ids.reshape(-1)[ends], np.diff(totals[ends], prepend=0)
    counts = last.sum(1)
    if not (real := candidates >= 0).all():  # padding is the first run of an image
        candidates, sums = candidates[real], sums[real]
        counts -= ids[:, 0] < 0
    if k is not None and counts.max() > 4 * k:
        candidates, sums, counts = _leading(candidates, sums, counts, k)
    # Each image's candidates in a row of a table, by keys that order by sum, then by smaller id.
    first = counts.cumsum() - counts
    width = max(k or 1, int(counts.max()))
    bits = width.bit_length()
    low = (1 << bits) - 1
    column = np.arange(len(candidates)) - np.repeat(first, counts)  # ids ascend with it
    table = np.full((C, width), _NOBODY)
    table[np.arange(width) < counts[:, None]] = (sums << bits) + (low - column)
    table.sort(axis=1)
    best = table[:, ::-1][:, :k]
    real = best > _NOBODY
    at = np.where(real, first[:, None] + (low - (best & low)), -1)
    return np.append(candidates, -1)[at].astype(np.int64), np.where(real, best >> bits, 0)


def _leading(candidates: Array, sums: Array, counts: Array, k: int) -> tuple[Array, Array, Array]:
    """The candidates whose sums reach the K-th of their image in its leading 32 bits: others need no 64-bit key."""
    nobody = np.iinfo(np.int32).min
    inside = np.arange(counts.max()) < counts[:, None]  # (C, width)
    table = np.full(inside.shape, nobody, dtype=np.int32)
    table[inside] = sums >> max(0, int(np.abs(sums).max()).bit_length() - 31)
    kth = np.partition(table, -k, axis=1)[:, -k, None]
    leading = table >= np.maximum(kth, nobody + 1)
    return candidates[leading[inside]], sums[leading[inside]], leading.sum(1)


def _sorted_ids(ids: Array) -> tuple[Array, Array]:
    """Ids of each row (C, M) in ascending order, and where they stood, counted over all rows."""
    C, M = ids.shape
    bits = (M - 1).bit_length()
    if int(ids.max()) >> (31 - bits):
        order = ids.argsort(axis=1)
        return np.take_along_axis(ids, order, 1), order + np.arange(0, C * M, M)[:, None]
    # Id and position fit into one int32, which numpy sorts with SIMD, several times as fast.
    keys = (ids << bits) + np.arange(M, dtype=np.int32)
    keys.sort(axis=1)
    order = keys & ((1 << bits) - 1)
    return keys >> bits, order + np.arange(0, C * M, M)[:, None]
