"""The scores that decide: fp64 inner products of chosen pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from adasim.neighbors.workspace import workspace

_PAIRS = 2048  # pairs scored at once: few enough to stay in the cache


def exact_scores(q: Tensor, rows: Tensor, queries: Tensor, ids: Tensor) -> Tensor:
    """fp64 inner products of the pairs (`queries`, `ids`), both (M,), rounded to fp32: (M,)."""
    q64 = q.double()
    scores = q.new_empty(len(ids))
    for start in range(0, len(ids), _PAIRS):
        part = slice(start, min(start + _PAIRS, len(ids)))
        shape = (part.stop - start, q.shape[1])
        z = workspace.empty("rows", shape, rows.dtype, q.device)
        factors = workspace.empty("factors", shape, torch.float64, q.device)
        products = workspace.empty("products", shape, torch.float64, q.device)
        torch.index_select(rows, 0, ids[part], out=z)
        torch.index_select(q64, 0, queries[part], out=factors)
        scores[part] = products.copy_(z).mul_(factors).sum(1)
    return scores.add_(0.0)  # no negative zero
