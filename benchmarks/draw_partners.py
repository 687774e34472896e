"""Drawing partners with w = 50, K = 10 on one core: the vectorised draw against one dictionary per image.

    python benchmarks/draw_partners.py

Two histories: `stable`, each image's lists come from 40 neighbours of its own, as late in training; `scattered`,
all 500 entries are different, the most work there can be. The dictionary version does what the released code does
inside its loader workers (sum, rank, truncate, gate, draw) without its quadratic look-ups. Both must agree on
every gate. Goal: at least 50 times as fast per image.
"""

from __future__ import annotations

import argparse
import math
import random

import torch
from _report import report, take_turns

from adasim.neighbors import NeighborMemory

TAU = 0.2


def filled(kind: str, images: int, window: int, k: int) -> NeighborMemory:
    """A memory with a full history; ids up to ImageNet's, similarities falling along each list."""
    torch.manual_seed(0)
    memory = NeighborMemory(images, 1, window, k)
    pool = torch.randint(1_281_167, (images, 40), dtype=torch.int32)
    for epoch in range(window):
        if kind == "stable":
            lists = pool.gather(1, torch.rand(images, 40).argsort(1)[:, :k])
        else:
            lists = torch.randint(1_281_167, (images, k), dtype=torch.int32)
        lists[:, 0] = torch.arange(images)
        memory.history_ids[:, epoch] = lists
        falling = torch.rand(images, k).sort(1, descending=True).values
        memory.history_similarities[:, epoch] = (0.6 + 0.4 * falling).half()
    memory.epochs = window
    return memory


def with_dictionaries(memory: NeighborMemory, images: int) -> list[bool]:
    """The same by plain Python, one image at a time; returns whether each gate was open."""
    gates = []
    for i in range(images):
        lists = memory.history_ids[i].flatten().tolist()
        similarities = memory.history_similarities[i].flatten().tolist()
        sums: dict[int, float] = {}
        for j, similarity in zip(lists, similarities, strict=True):
            sums[j] = sums.get(j, 0.0) + similarity
        support = sorted(sums, key=lambda j: (-sums[j], j))[: memory.k]
        gates.append(support[0] == i)
        if gates[-1]:
            weights = [math.exp(sums[j] / memory.window / TAU) for j in support]
            random.choices(support, weights)
    return gates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=50)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)

    rows = []
    for kind in ("stable", "scattered"):
        memory = filled(kind, args.images, args.window, args.k)
        some = args.images // 20  # enough for the slow one
        gates = memory.distribution(torch.arange(some), TAU)[0][:, 0] == torch.arange(some)
        assert gates.tolist() == with_dictionaries(memory, some)
        seconds = take_turns(
            {
                "dictionaries": lambda m=memory, n=some: with_dictionaries(m, n),  # type: ignore[misc]
                "adasim": lambda m=memory: m.draw_partners(args.window, TAU, 0),  # type: ignore[misc]
            },
            args.rounds,
        )
        slow, fast = 1e6 * seconds["dictionaries"] / some, 1e6 * seconds["adasim"] / args.images
        rows.append(
            {
                "history": kind,
                "gates open": f"{float(gates.float().mean()):.0%}",
                "dictionaries us/image": slow,
                "adasim us/image": fast,
                "times as fast": slow / fast,
            }
        )
    report("draw_partners", vars(args), rows)


if __name__ == "__main__":
    main()
