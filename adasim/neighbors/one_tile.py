"""The search of a memory so small that all its scores fit into a CPU's cache: `scan` and ranking in one go.

The same proofs as in `scan`. But a product of a millisecond leaves no time for hundreds of calls around it, and
what is to be done after the product is small: there numpy's calls cost a fraction of torch's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adasim.neighbors.exact import exact_scores
from adasim.neighbors.scan import GROUP, SMALL_GROUP, Scorer, TooManyCandidatesError, group_max
from adasim.neighbors.workspace import workspace

_NONE = np.iinfo(np.int64).min  # the key of no row

Array = np.ndarray[Any, Any]


def search_one_tile(q: Tensor, rows: Tensor, k: int, scorer: Scorer) -> tuple[Tensor, Tensor]:
    """Similarities (B, K) and ids (B, K) of each query's K best rows, in the order of `search`; on a CPU.

    Raises:
        TooManyCandidatesError: the scorer's bound prunes too little.
    """
    queries, ids = _candidates(scorer, len(rows), k)
    scores = exact_scores(q, rows, torch.from_numpy(queries), torch.from_numpy(ids)).numpy()
    keys = _pack(scores, ids)
    if not math.isfinite(scores.sum()):  # a sum is finite only if all its terms are
        keys[~np.isfinite(scores)] = _NONE
    table = _table(keys, np.bincount(queries, minlength=len(q)), k, _NONE)
    table.sort(axis=1)
    return _unpack(table[:, : -k - 1 : -1])


def _candidates(scorer: Scorer, n: int, k: int) -> tuple[Array, Array]:
    """Queries and ids, (M,) each, of every pair that may be among the K best: by query, then by id."""
    group = GROUP if n >= 3 * k * GROUP else SMALL_GROUP
    scores, peaks = _scores_and_peaks(scorer, n, group)  # (B, T), (B, groups)
    batch, groups = peaks.shape
    unit, margins = scorer.unit.numpy(), scorer.group_margins(0, n, group).numpy()
    # A lower bound on each query's K-th best score: the best rows of K groups reach it.
    if margins.shape[1] == 1:
        floor = _about_kth_largest(peaks, k) * unit - margins  # (B, 1)
    else:
        floor = _about_kth_largest(peaks * unit - margins, k)
    needed = _at_least((floor - margins) / unit, scores.dtype)  # what a score must reach
    at = np.flatnonzero(peaks >= needed)  # of B x groups
    members = scores.reshape(-1, group)[at]  # (M, group)
    needed = (
        np.broadcast_to(needed, peaks.shape).reshape(-1)[at]
        if needed.shape[1] > 1
        else needed[at // groups, 0]
    )
    inside = np.flatnonzero(members >= needed[:, None])  # of M x group
    if len(inside) > batch * (2 * k + 64 + n // 8):
        raise TooManyCandidatesError
    m = inside // group
    at = at[m]
    queries = at // groups
    ids = (at - queries * groups) * group + (inside - m * group)
    if 4 * len(ids) <= 5 * k * batch:  # little to gain
        return queries, ids
    truth = members.reshape(-1)[inside] * unit[queries, 0]
    margin = scorer.margins(torch.from_numpy(queries), torch.from_numpy(ids)).numpy()
    own = _table(truth - margin, np.bincount(queries, minlength=batch), k, -np.inf)
    alive = truth + margin >= np.maximum(floor, _about_kth_largest(own, k))[queries, 0]
    return queries[alive], ids[alive]


def _scores_and_peaks(scorer: Scorer, n: int, group: int) -> tuple[Array, Array]:
    """All scores, (B, n) filled up to whole groups by what no threshold lets pass, and the groups' maxima."""
    width = -(-n // group) * group
    scores = workspace.empty("scores", (len(scorer.unit), width), scorer.dtype, scorer.unit.device)
    real = scores[:, :n]
    scorer.scores(0, n, out=real)
    if width > n:
        scores[:, n:] = -torch.inf if scorer.dtype.is_floating_point else torch.iinfo(scorer.dtype).min
    peaks = group_max(scores, group)
    if scorer.dtype.is_floating_point and not math.isfinite(peaks.sum()):
        scorer.drop_bad_rows(real, 0, n)
        peaks = group_max(scores, group)
    return scores.numpy(), peaks.numpy()


def _at_least(threshold: Array, dtype: np.dtype[Any]) -> Array:
    """As in `scan`: a threshold in the scores' own type, which lets pass at least what the exact one would."""
    if dtype.kind == "f":
        return np.maximum(threshold, np.finfo(dtype).min).astype(dtype)
    return np.clip(np.floor(threshold), np.iinfo(dtype).min + 1, np.iinfo(dtype).max).astype(dtype)


def _about_kth_largest(values: Array, k: int) -> Array:
    """(B, 1), fp64, or a little less: numpy is quick at fp32. -inf where there are fewer than K."""
    width = values.shape[1]
    if width < k:
        return np.full((len(values), 1), -np.inf)
    short = np.partition(values.astype(np.float32, copy=False), width - k, axis=1)[:, width - k, None]
    return np.nextafter(short, np.float32(-np.inf)).astype(np.float64)


def _table(values: Array, counts: Array, k: int, filling: float) -> Array:
    """Values of one query after the other, (M,), as rows that are filled up: (B, at least K)."""
    width = max(k, int(counts.max(initial=0)))
    table = np.full((len(counts), width), filling, dtype=values.dtype)
    table[np.arange(width) < counts[:, None]] = values
    return table


def _pack(scores: Array, ids: Array) -> Array:
    """As `keys.pack`: integers that sort by score, then by smaller id."""
    bits = scores.view(np.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.astype(np.int64) << 32) | (0x7FFFFFFF - ids)


def _unpack(keys: Array) -> tuple[Tensor, Tensor]:
    """Similarities and ids; -inf and -1 of no row."""
    bits = (keys >> 32).astype(np.int32)
    scores = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(np.float32)
    ids = 0x7FFFFFFF - (keys & 0x7FFFFFFF)
    nothing = keys == _NONE
    if nothing.any():
        scores[nothing], ids[nothing] = -np.inf, -1
    return torch.from_numpy(scores), torch.from_numpy(ids)
