"""Exact search on an accelerator: a few dozen large operations, and one question to the device.

What costs time there is not arithmetic but starting operations and waiting for their answers, so nothing depends on
a number that Python would have to read:

    1  a fast product of all queries with a tile of rows; of each _GROUP of 64 rows only the largest score is kept
    2  each query's best groups: one top-k of (B, N / 64)
    3  the product again, now keeping all 64 scores of the groups that were chosen; the best rows of these
    4  those rows again in fp64, and ranked as `search` says
    5  a proof, for all queries at once, that no other row belongs there; only now Python asks who has none

The product is inexact by at most a `margin` for each query (below). A row that was left out scored no more than the
next group of step 2, or the next row of step 3. If the larger of the two, plus the margin, is below the exact K-th
score, the list is right, ties and all: a row left out cannot even tie. A query without that proof is searched again
with fp32 products and many more candidates, and if that fails as well (rows that are all alike, an empty cache), in
fp64 throughout.

**How inexact.** A query is scaled to s, whose largest entry is 1, and rounded to f, in the type of the product; R
bounds the norms of the rows. By Cauchy-Schwarz the rounding moves a score by at most |s - f| R, which is measured.
The sum of D products then loses at most

    fp32, any order           D u |f| R             u = 2^-24 (Higham, 2002)
    fp16 on tensor cores      (2 D + 16) 2u |f| R

Products of fp16 numbers are exact in fp32. A tensor core adds b of them (4 on V100, 8 on A100, 16 on H100) and the
running sum in one go: it aligns all to the largest, cuts each off below 2^-23 of that one or finer, adds, and cuts
the sum to 24 bits (Fasi, Higham, Mikaitis and Pranesh, 2021, doi 10.7717/peerj-cs.330; for later generations
arXiv 2512.07004; subnormal fp16 numbers are kept). So every product is cut once and the running sum twice in each
block: D + 2 ceil(D / b) cuts, at most 1.5 D + 2 from b = 4 on. Each is below 2^-23 of a number that is itself at
most the sum of all |products| <= |f| R. The rest of (2 D + 16) is for kernels that split the sum and add the parts
in fp32.

Nothing of size B x N is held: the maxima are B N / 64 numbers (1,024 queries, 1.28 million rows: 82 MB), a tile of
scores 134 MB.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from adasim.neighbors.arithmetic import (
    error_of_products,
    merge,
    row_norms,
    scores_of_lists,
    search_in_fp64,
)

_GROUP = 64  # rows that share one maximum
_TILE_SCORES = 1 << 25  # of one product: 134 MB of fp32; fewer would mean more operations
_EXACT_NUMBERS = 1 << 26  # fp64 numbers made at once: 537 MB
_DENSE_SCORES = 1 << 23  # fp64 scores made at once
_MEMBERS = 1 << 24  # scores kept of the chosen groups
_QUERIES = 1024  # searched at once
# Candidates beyond K, groups as well as rows. The second number is for what a first attempt could not prove.
_SPARE = (64, 256)
# Rows whose products might overflow in fp32 get an infinite bound, so that nothing inexact is believed.
_TOO_LONG = 1e30


_Lists = tuple[Tensor, Tensor, Tensor]
"""Of B queries: similarities (B, K) fp32, ids (B, K) int64, and who is proven, (B,) bool."""


def search_on_gpu(queries: Tensor, rows: Tensor, k: int, row_norm: float | None) -> tuple[Tensor, Tensor]:
    """`search` on a device that is not a CPU; arguments and answers are its own. There is at least one row."""
    queries = queries.float()
    bad = ~(queries.abs().amax(1) < torch.inf)  # of a NaN nothing is true
    queries = queries.masked_fill(bad[:, None], 0.0)
    bound = torch.tensor(row_norm or 0.0)
    if row_norm is None:
        bound = row_norms(rows).nan_to_num_(nan=0.0, posinf=0.0).amax()  # of finite rows
    bound = torch.where(bound < _TOO_LONG, bound, torch.inf)
    mixed = rows.dtype == torch.float16 and _has_mixed_product(rows.device)
    first = torch.float16 if mixed else torch.float32
    similarities, ids, proven = _attempt(queries, rows, k, bound, first, _SPARE[0])
    left = (~(proven | bad)).nonzero()[:, 0]
    if len(left):
        again = _attempt(queries[left], rows, k, bound, torch.float32, _SPARE[1])
        similarities[left], ids[left], proven = again
        left = left[(~proven).nonzero()[:, 0]]
    if len(left):
        tile = max(_GROUP, _DENSE_SCORES // len(left))
        similarities[left], ids[left] = search_in_fp64(queries[left], rows, k, tile)
    return similarities.masked_fill(bad[:, None], -torch.inf), ids.masked_fill(bad[:, None], -1)


def buffer_bytes(rows: int, dim: int, queries: int, k: int) -> int:
    """About how much memory a search takes beside its rows of fp16, if its proofs succeed."""
    queries, groups = min(queries, _QUERIES), -(-rows // _GROUP)
    chosen = queries * min(k + _SPARE[0], groups)
    maxima, tile = 4 * queries * groups, 4 * min(_TILE_SCORES, queries * groups * _GROUP)
    again = (2 + 8) * min(_EXACT_NUMBERS, chosen * dim)  # as they are, and in fp64
    return maxima + max(tile + 2 * 4 * chosen * _GROUP, again)


# ---- one attempt: steps 1 to 5 ----


def _attempt(q: Tensor, rows: Tensor, k: int, row_norm: Tensor, dtype: torch.dtype, spare: int) -> _Lists:
    groups = -(-len(rows) // _GROUP)
    members = min(k + spare, groups)
    block = min(_QUERIES, max(1, _MEMBERS // (members * _GROUP)))
    if len(q) > block:
        parts = [_attempt(some, rows, k, row_norm, dtype, spare) for some in q.split(block)]
        similarities, ids, proven = map(torch.cat, zip(*parts, strict=True))
        return similarities, ids, proven
    tiles = _Tiles(q, rows, row_norm, dtype)
    peaks = torch.empty(len(q), groups, device=q.device)
    for start, stop in tiles.groups:
        torch.amax(tiles.scores(start, stop), 2, out=peaks[:, start:stop])
    chosen, next_group = _best(peaks, members)  # (B, G), (B,)

    tile, place = chosen // tiles.size, chosen % tiles.size
    scores = peaks  # of the chosen groups, (B, G, _GROUP)
    for number, (start, stop) in reversed(list(enumerate(tiles.groups))):  # the last one is still there
        at = place if stop - start == tiles.size else place.clamp(max=stop - start - 1)
        here = tiles.scores(start, stop).gather(1, at[:, :, None].expand(-1, -1, _GROUP))
        first = stop == groups  # what it says of groups in other tiles will be overwritten
        scores = here if first else torch.where((tile == number)[:, :, None], here, scores)
    at, next_row = _best(scores.flatten(1), min(k + spare, members * _GROUP))  # (B, M), (B,)
    ids = torch.add(at % _GROUP, chosen.gather(1, at // _GROUP), alpha=_GROUP)

    tiles.latest = None  # make room
    exact = scores_of_lists(tiles.q, rows, ids.clamp(max=len(rows) - 1), _EXACT_NUMBERS)
    if len(rows) % _GROUP:  # the last group has fewer rows than places
        exact.masked_fill_(ids >= len(rows), -torch.inf)
    missing = max(0, k - ids.shape[1])
    if missing:
        exact, ids = F.pad(exact, (0, missing), value=-torch.inf), F.pad(ids, (0, missing))
    similarities, ids = merge(exact, ids, k)
    ids = ids.masked_fill(similarities == -torch.inf, -1)
    reached = torch.maximum(next_group, next_row) + tiles.margin  # no row that was left out scores more
    # -inf: nothing was left out but rows that are not finite.
    return similarities, ids, (reached < similarities[:, -1] / tiles.unit) | (reached == -torch.inf)


class _Tiles:
    """Inexact scores of scaled queries with tiles of rows: |score - truth / unit| <= margin."""

    def __init__(self, q: Tensor, rows: Tensor, row_norm: Tensor, dtype: torch.dtype) -> None:
        self.rows, self.dtype = rows, dtype
        self.size = max(1, _TILE_SCORES // len(q) // _GROUP)  # groups of one tile
        count = -(-len(rows) // _GROUP)
        self.groups = [(start, min(start + self.size, count)) for start in range(0, count, self.size)]
        self.q = q.double()
        largest = self.q.abs().amax(1, keepdim=True).clamp_(min=2.0**-60)
        scaled = self.q / largest  # (B, D), so that fp16 neither overflows nor underflows
        self.factor = scaled.to(dtype)
        self.unit = largest[:, 0]
        self.latest: tuple[int, Tensor] | None = None
        rounding = torch.linalg.vector_norm(scaled - self.factor, dim=1)
        norms = torch.linalg.vector_norm(scaled, dim=1)
        margin = torch.add(rounding, norms, alpha=error_of_products(rows.shape[1], dtype))
        # 1 %: terms of second order. The constant: what underflows in a product, or in the exact score (2^-148,
        # times 2^60 at most).
        self.margin = margin * (1.01 * row_norm) + (rows.shape[1] * 2.0**-126 + 2.0**-88)

    def scores(self, start: int, stop: int) -> Tensor:
        """(B, groups, _GROUP) of the groups from start to stop; -inf where there are no rows."""
        if self.latest is None or self.latest[0] != start:
            self.latest = None  # make room first
            self.latest = start, self._product(start, stop)
        return self.latest[1]

    def _product(self, start: int, stop: int) -> Tensor:
        z = self.rows[start * _GROUP : stop * _GROUP]
        if self.dtype == torch.float16:
            scores = torch.mm(self.factor, z.T, out_dtype=torch.float32)
        else:
            scores = self.factor @ z.float().T
        missing = (stop - start) * _GROUP - len(z)
        if missing:
            scores = F.pad(scores, (0, missing), value=-torch.inf)
        return scores.unflatten(1, (-1, _GROUP))


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Where the `count` largest stand, and the next one's value. NaN counts as +inf: fp64 will say what it is."""
    scores.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if scores.shape[1] <= count:
        every = torch.arange(scores.shape[1], device=scores.device).expand(len(scores), -1)
        return every, scores.new_full((len(scores),), -torch.inf)
    top = scores.topk(count + 1, dim=1)
    return top.indices[:, :count], top.values[:, count]


def _has_mixed_product(device: torch.device) -> bool:
    """Whether fp16 products are summed in fp32, as the bound for tensor cores supposes.

    NVIDIA's do, from torch 2.8 on, unless the program has allowed sums in fp16. AMD's may flush subnormal numbers.
    """
    short_sums = getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)
    if device.type != "cuda" or torch.version.hip is not None or short_sums:
        return False
    return _mixed_product_runs(device)


@lru_cache
def _mixed_product_runs(device: torch.device) -> bool:
    try:
        ones = torch.ones(16, 16, dtype=torch.float16, device=device)
        return torch.mm(ones, ones, out_dtype=torch.float32).dtype == torch.float32
    # torch before 2.8; a backend without it (NotImplementedError is a RuntimeError)
    except (TypeError, RuntimeError):
        return False
