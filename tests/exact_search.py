"""What a search must return, from its definition, and rows to search in."""

from __future__ import annotations

from random import Random

import torch
from helpers import on_grid
from torch import Tensor


def brute_force(queries: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    similarities = torch.full((len(queries), k), -torch.inf)
    ids = torch.full((len(queries), k), -1)
    for b, q in enumerate(queries):
        if not torch.isfinite(q).all():
            continue
        scores = (q.double() * rows.double()).sum(1).float().tolist()
        usable = torch.isfinite(rows).all(1).tolist()
        scored = sorted((-score, i) for i, score in enumerate(scores) if usable[i])
        for rank, (score, i) in enumerate(scored[:k]):
            similarities[b, rank], ids[b, rank] = -score, i
    return similarities, ids


def clouds(n: int, dim: int) -> dict[str, Tensor]:
    """Kinds of rows from spread out to collapsed."""
    torch.manual_seed(n + dim)
    random = on_grid(torch.randn(n, dim))
    centres = torch.randn(1 + n // 50, dim)
    clustered = on_grid(centres[torch.randint(len(centres), (n,))] + 0.1 * torch.randn(n, dim))
    duplicated = random[torch.randint(max(1, n // 4), (n,))]
    half_empty = random * (torch.arange(n) % 2)[:, None]
    return {
        "random": random,
        "clustered": clustered,
        "alike": on_grid(torch.randn(1, dim) + 0.01 * torch.randn(n, dim)),
        "duplicated": duplicated,
        "half empty": half_empty,
        "identical": random[:1].expand(n, dim).contiguous(),
        "empty": torch.zeros(n, dim),
    }


KINDS = list(clouds(4, 2))


def tied(draw: Random, b: int, n: int, dim: int, levels: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Queries and rows of whole numbers from -levels to levels, so that scores are equal ever so often."""
    generator = torch.Generator().manual_seed(draw.randint(0, 2**20))
    queries, rows = (torch.randint(-levels, levels + 1, (m, dim), generator=generator) for m in (b, n))
    return queries, rows, generator


def by_fp64(queries: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The definition again, quick enough for many rows: exact for vectors on the grid."""
    scores = (queries.double() @ rows.double().T).float() + 0.0
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return scores.gather(1, order), order
