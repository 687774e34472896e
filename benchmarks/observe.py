"""What a small memory costs: one `observe` against the fp32 matrix product of its search alone, on one core.

    python benchmarks/observe.py                     # N = 2,000 to 200,000, D = 128, B = 128, K = 10; two minutes
    python benchmarks/observe.py --sizes 2000 20000 --dim 256 --batch 64 --k 50

Two kinds of features: `clustered`, positive and around a hundred centres that share a mean, as an encoder's after
its last ReLU; `random`, without structure. The product is made in one piece and in tiles of 8,192 rows, and the
quicker of the two counts. `observe` prepares the batch, searches exactly, and writes cache, int8 copy (where there is
one) and lists. All is processor time; the contenders take turns, --rounds times at the largest size and more often at
the smaller ones. Lists are compared with a product in fp64 first. The result is called --name.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _report import options, report
from torch import Tensor
from torch.nn.functional import normalize

from adasim.neighbors import NeighborMemory

TILE = 8192


def features(kind: str, n: int, dim: int, generator: torch.Generator) -> Tensor:
    """(N, D), as an encoder gives them: not normalised."""
    noise = torch.randn(n, dim, generator=generator)
    if kind == "random":
        return noise
    centres = torch.randn(100, dim, generator=generator)
    return (centres[torch.randint(100, (n,), generator=generator)] + 0.7 * noise + 0.3).relu_()


def filled(rows: Tensor, window: int, k: int) -> NeighborMemory:
    """A memory that has seen every row for one epoch."""
    memory = NeighborMemory(len(rows), rows.shape[1], window, k)
    memory.cache.copy_(normalize(rows, dim=1).mul_(2**24).round_().div_(2**24))
    memory.observe([0], rows[:1])
    memory.end_epoch()
    return memory


def in_tiles(q: Tensor, cache: Tensor) -> None:
    for tile in cache.split(TILE):
        q @ tile.T


def check(memory: NeighborMemory, ids: Tensor, seen: Tensor) -> None:
    """The lists of a batch are those of an fp64 product, ties to the smaller id."""
    cache = memory.cache.double()  # observe writes to the memory's own
    q = normalize(seen, dim=1).mul_(2**24).round_().div_(2**24)
    order = (q.double() @ cache.T).float().argsort(dim=1, descending=True, stable=True)
    assert torch.equal(memory.observe(ids, seen)[1], order[:, : memory.k])


def processor_time(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    args = options(
        __doc__,
        sizes=[2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000],
        dim=128,
        batch=128,
        k=10,
        window=10,
        rounds=9,
        name="observe",
    )
    torch.set_num_threads(1)

    rows = []
    for kind in ("clustered", "random"):
        for n in args.sizes:
            generator = torch.Generator().manual_seed(0)
            base = features(kind, n, args.dim, generator)
            memory = filled(base, args.window, args.k)
            times: dict[str, list[float]] = {"observe": [], "in one piece": [], "in tiles": []}
            rounds = min(200, args.rounds * max(args.sizes) // n)
            for turn in range(rounds + 3):
                ids = torch.randperm(n, generator=generator)[: args.batch]
                seen = base[ids] + 0.2 * torch.randn(len(ids), args.dim, generator=generator)
                if turn == 0:
                    check(memory, ids, seen)
                    continue
                q, cache = normalize(seen, dim=1), memory.cache
                contenders: dict[str, Callable[[], Any]] = {
                    "observe": lambda i=ids, s=seen, m=memory: m.observe(i, s),  # type: ignore[misc]
                    "in one piece": lambda q=q, z=cache: q @ z.T,  # type: ignore[misc]
                    "in tiles": lambda q=q, z=cache: in_tiles(q, z),  # type: ignore[misc]
                }
                for name, run in contenders.items():
                    taken = processor_time(run)
                    if turn > 2:  # the first turns warm up
                        times[name].append(taken)
            observe, whole, tiled = (1000 * statistics.median(taken) for taken in times.values())
            rows.append(
                {
                    "features": kind,
                    "N": n,
                    "observe ms": observe,
                    "product ms": whole,
                    "in tiles ms": tiled,
                    "observe / product": observe / min(whole, tiled),
                    "engine": "fp32" if memory._quantized is None else "int8",
                }
            )
    report(args.name, {name: value for name, value in vars(args).items() if name != "name"}, rows, "observe")


if __name__ == "__main__":
    main()
