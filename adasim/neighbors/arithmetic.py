"""The arithmetic that all engines of the search share: what a score is, how scores are ordered, how far off a quick
product can be, and what is left where nothing quick helps.

    score(q, z) = the fp64 inner product rounded to fp32;   order: score descending, then id ascending.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from adasim.dist.devices import without_autocast

U = 2.0**-24  # unit roundoff of fp32
NO_ROW = -0x7F800001 << 32  # the key of a score of -inf: that of no row
_NUMBERS = 1 << 19  # of the pairs that are scored at once: few enough to stay in a CPU's cache


_buffers = threading.local()


def buffer(name: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """As `torch.empty` on a CPU; what is in it lasts until this thread asks for the same name again.

    Fresh memory comes page by page, which takes a small search longer than its arithmetic.
    """
    count = shape[0] * shape[1]
    flat = getattr(_buffers, name, None)
    if flat is None or len(flat) < count or flat.dtype != dtype:
        with torch.inference_mode(False):  # else it could be used in that mode alone
            flat = torch.empty(count, dtype=dtype)
        setattr(_buffers, name, flat)
    return flat[:count].view(shape)


# ---- the scores that decide, and their order ----


def scores_of_pairs(q: Tensor, rows: Tensor, queries: Tensor, ids: Tensor) -> Tensor:
    """Scores of the pairs (`queries`, `ids`), both (M,): (M,); -inf if not finite."""
    q64, scores = q.double(), q.new_empty(len(ids))
    at_once = max(1, _NUMBERS // q.shape[1])
    for start in range(0, len(ids), at_once):
        part = slice(start, min(start + at_once, len(ids)))
        shape = (part.stop - start, q.shape[1])
        z = torch.index_select(rows, 0, ids[part], out=buffer("rows", shape, rows.dtype))
        factors = buffer("factors", shape, torch.float64)
        torch.index_select(q64, 0, queries[part], out=factors)
        scores[part] = buffer("products", shape, torch.float64).copy_(z).mul_(factors).sum(1)
    return _comparable(scores)


def scores_of_lists(q64: Tensor, rows: Tensor, ids: Tensor, at_once: int) -> Tensor:
    """Scores of each query with the rows of its list (B, M), `at_once` fp64 numbers at a time; -inf if not finite."""
    parts = max(1, at_once // (ids.shape[1] * rows.shape[1]))
    exact = [
        torch.bmm(rows[some].double(), b[:, :, None])[:, :, 0]
        for b, some in zip(q64.split(parts), ids.split(parts), strict=True)
    ]
    return _comparable((torch.cat(exact) if len(exact) > 1 else exact[0]).float())


def _comparable(scores: Tensor) -> Tensor:
    """In place: a row whose score is not finite is no match, and there is no negative zero."""
    return scores.nan_to_num_(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf).add_(0.0)


def pack(scores: Tensor, ids: Tensor) -> Tensor:
    """A score and an id in one int64 key: keys sort by score, then by smaller id (ids below 2^31), so that topk
    breaks ties."""
    bits = scores.view(torch.int32)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) | (0x7FFFFFFF - ids)


def unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and ids of keys; no row is -inf and -1."""
    bits = (keys >> 32).int()
    scores = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return scores, (0x7FFFFFFF - (keys & 0x7FFFFFFF)).masked_fill_(scores == -torch.inf, -1)


def merge(similarities: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The K best of several lists laid side by side, (B, M) each, in the order of `search`."""
    order = ids.argsort(dim=1, stable=True)
    similarities, ids = similarities.gather(1, order), ids.gather(1, order)
    order = similarities.argsort(dim=1, descending=True, stable=True)[:, :k]
    return similarities.gather(1, order), ids.gather(1, order)


def search_in_fp64(q: Tensor, rows: Tensor, k: int, tile: int) -> tuple[Tensor, Tensor]:
    """fp64 products throughout, `tile` rows at a time: for rows so alike that no bound tells them apart (a collapsed
    encoder, an empty cache)."""
    q64, asks = q.double(), q.device.type == "cpu"  # elsewhere a question costs more than the work it saves
    best = torch.full((len(q), k), NO_ROW, device=q.device)
    for start in range(0, len(rows), tile):
        scores = _comparable((q64 @ rows[start : start + tile].double().T).float())  # (B, T)
        ids = torch.arange(start, start + scores.shape[1], device=q.device)
        b: Any = slice(None)
        if asks:  # later ids lose ties, so only a score above the K-th best so far can enter
            b = (scores.amax(1) > unpack(best[:, -1])[0]).nonzero()[:, 0]
        best[b] = torch.cat([best[b], pack(scores[b], ids)], 1).topk(k, dim=1).values
    return unpack(best)


# ---- how far off a quick product can be ----


def error_of_products(dim: int, dtype: torch.dtype) -> float:
    """How far the sum of `dim` products of this type can be off, relative to the norms of both factors.

    With it, the rounding of an exact score to fp32, twice: of the one that is compared, and of the one it is compared
    with. fp32 in any order: D u (Higham, 2002). fp16 on tensor cores: see `search_gpu`.
    """
    return (2 * dim + 18) * 2 * U if dtype == torch.float16 else (dim + 4) * U


def row_norms(rows: Tensor) -> Tensor:
    """(N,) fp64, on the rows' device."""
    return torch.cat([torch.linalg.vector_norm(part.double(), dim=1) for part in rows.split(1 << 14)])


# ---- products that are what IEEE 754 says ----


@contextmanager
def ieee_products(device: torch.device) -> Iterator[None]:
    """fp32 products on `device` are full fp32 in the block, and as the program had set them afterwards.

    The program around may have asked for less: autocast turns a product's factors into bf16 or fp16, and TF32 (which
    some containers switch on by an environment variable) or oneDNN's bf16 shorten them inside it. A bound for fp32
    does not hold for such products. torch 2.9 gave the switches new names and refuses to read the old one where the
    two disagree, so both are set.
    """
    modules: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    switches = [module for module in modules if hasattr(module, "fp32_precision")]
    before = [switch.fp32_precision for switch in switches]
    try:
        old = torch.get_float32_matmul_precision()
    except RuntimeError:  # the two already disagree
        old = None
    short = old not in ("highest", None) or any(value not in ("ieee", "none") for value in before)
    if short:
        if old is not None:
            torch.set_float32_matmul_precision("highest")
        for switch in switches:
            switch.fp32_precision = "ieee"
    try:
        with without_autocast(device):
            yield
    finally:
        if short and old is not None:
            torch.set_float32_matmul_precision(old)
        for switch, value in zip(switches, before, strict=True) if short else ():
            switch.fp32_precision = "none"  # which takes the value of the level above, if that was set
            if switch.fp32_precision != value:
                switch.fp32_precision = value


def exact_device(device: torch.device | str) -> torch.device:
    """Where rows that are searched exactly can be kept: `device`, or the CPU where that has no fp64 (Apple's mps)."""
    device = torch.device(device)
    try:
        _ = torch.ones(1, dtype=torch.float64, device=device) + 1
    except (RuntimeError, TypeError):
        return torch.device("cpu")
    return device
