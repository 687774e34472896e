"""Exact top-K search at ImageNet's size: the int8 and fp32 engines against the GEMM alone and GEMM + topk.

    python benchmarks/search.py                      # N = 1,281,167, D = 384, B = 128, K = 10
    python benchmarks/search.py --images 100000      # a quick try

Three clouds: `clustered`, features around many centres, queries near rows, as in a trained encoder; `random`, no
structure at all, the hardest for the bound while it still prunes; `alike`, all rows within 1e-3 of one another,
as in a collapsed encoder, where int8 cannot prune and must give up cheaply. The engines' answers are compared bit
by bit before they are timed.
"""

from __future__ import annotations

import torch
from _report import extra_memory, options, report, take_turns
from torch import Tensor
from torch.nn.functional import normalize

from adasim.neighbors import QuantizedRows, search

TILE = 8192


def cloud(kind: str, n: int, dim: int) -> Tensor:
    """Unit rows on the memory's grid, made in place."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(1000, dim, generator=generator)
    rows = torch.empty(n, dim)
    for part in rows.split(65536):
        part.normal_(generator=generator)
        if kind == "clustered":
            part.add_(centres[torch.randint(1000, (len(part),), generator=generator)])
        elif kind == "alike":
            part.mul_(1e-3).add_(centres[0])
        part.copy_(normalize(part, dim=1).mul_(2**24).round_().div_(2**24))
    return rows


def main() -> None:
    args = options(__doc__, images=1_281_167, dim=384, batch=128, k=10, rounds=7)

    rows = []
    for kind in ("clustered", "random", "alike"):
        Z = cloud(kind, args.images, args.dim)
        generator = torch.Generator().manual_seed(1)
        some = torch.randint(args.images, (args.batch,), generator=generator)
        noise = torch.randn(args.batch, args.dim, generator=generator) / args.dim**0.5
        q = normalize(Z[some] + 0.5 * noise, dim=1).mul_(2**24).round_().div_(2**24)
        quantized = QuantizedRows(Z)

        def gemm(q: Tensor = q, Z: Tensor = Z) -> None:
            for tile in Z.split(TILE):
                q @ tile.T

        def fp32(q: Tensor = q, Z: Tensor = Z) -> tuple[Tensor, Tensor]:
            return search(q, Z, args.k, row_norm=1.001)

        def int8(q: Tensor = q, Z: Tensor = Z, quantized: QuantizedRows = quantized) -> tuple[Tensor, Tensor]:
            quantized.pause = 0  # always try, even where the attempt before gave up
            return search(q, Z, args.k, quantized=quantized, row_norm=1.001)

        def naive(q: Tensor = q, Z: Tensor = Z) -> tuple[Tensor, Tensor]:
            return (q @ Z.T).topk(args.k)

        found, expected = int8(), fp32()
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        gave_up = not quantized.worth_trying()
        _, memory = extra_memory(int8)
        seconds = take_turns({"gemm+topk": naive, "gemm": gemm, "fp32": fp32, "int8": int8}, args.rounds)
        rows.append(
            {
                "rows": kind,
                **{f"{name} s": taken for name, taken in seconds.items()},
                "int8 vs gemm+topk": seconds["gemm+topk"] / seconds["int8"],
                "int8 vs gemm": seconds["gemm"] / seconds["int8"],
                "int8 vs fp32": seconds["fp32"] / seconds["int8"],
                "extra MB": round(1000 * memory),
                "gave up": "yes" if gave_up else "no",
            }
        )
        del Z, quantized
    report("search", vars(args), rows)


if __name__ == "__main__":
    main()
