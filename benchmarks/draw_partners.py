"""Drawing partners with w = 50, K = 10 on one core: the vectorised draw against one dictionary per image.

    python benchmarks/draw_partners.py

Two histories: `stable`, each image's lists come from 40 neighbours of its own, as late in training; `scattered`,
all 500 entries are different, the most work there can be. Against two loops in plain Python, which must agree on
every gate: `one dictionary`, one pass over the entries, the best that such a loop can do; `as released`, where each
candidate is looked up in each epoch's list (25,000 look-ups if all entries differ), as the released code does in its
loader workers.
"""

from __future__ import annotations

import math
import random

import torch
from _report import options, report, take_turns

from adasim.neighbors import NeighborMemory
from adasim.neighbors.window import on_grid

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
        memory.history_similarities[:, epoch] = on_grid(0.6 + 0.4 * falling)
    memory.epochs = window
    return memory


def one_dictionary(memory: NeighborMemory, images: int) -> list[bool]:
    """Sum, rank, truncate, gate and draw, one image at a time; returns whether each gate was open."""
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


def as_released(memory: NeighborMemory, images: int) -> list[bool]:
    """The same with one dictionary per epoch, in each of which every candidate is looked up."""
    gates = []
    for i in range(images):
        entries = zip(memory.history_ids[i].tolist(), memory.history_similarities[i].tolist(), strict=True)
        epochs = [dict(zip(ids, similarities, strict=True)) for ids, similarities in entries]
        sums = {j: sum(epoch.get(j, 0.0) for epoch in epochs) for j in set().union(*epochs)}
        support = sorted(sums, key=lambda j: (-sums[j], j))[: memory.k]
        gates.append(support[0] == i)
        if gates[-1]:
            logits = torch.tensor([sums[j] for j in support]) / memory.window / TAU
            support[int(torch.multinomial(logits.softmax(0), 1))]
    return gates


def main() -> None:
    args = options(__doc__, images=20_000, window=50, k=10, rounds=9)
    torch.set_num_threads(1)

    rows = []
    for kind in ("stable", "scattered"):
        memory = filled(kind, args.images, args.window, args.k)
        some, few = args.images // 20, args.images // 200  # enough for the slow ones
        gates = memory.distribution(torch.arange(some), TAU)[0][:, 0] == torch.arange(some)
        assert gates.tolist() == one_dictionary(memory, some)
        assert gates[:few].tolist() == as_released(memory, few)
        seconds = take_turns(
            {
                "one dictionary": lambda m=memory, n=some: one_dictionary(m, n),  # type: ignore[misc]
                "as released": lambda m=memory, n=few: as_released(m, n),  # type: ignore[misc]
                "adasim": lambda m=memory: m.draw_partners(args.window, TAU, 0),  # type: ignore[misc]
            },
            args.rounds,
        )
        counts = {"one dictionary": some, "as released": few, "adasim": args.images}
        each = {name: 1e6 * seconds[name] / count for name, count in counts.items()}
        rows.append(
            {
                "history": kind,
                "gates open": f"{float(gates.float().mean()):.0%}",
                **{f"{name} us/image": value for name, value in each.items()},
                "times one dictionary": each["one dictionary"] / each["adasim"],
                "times as released": each["as released"] / each["adasim"],
            }
        )
    report("draw_partners", vars(args), rows)


if __name__ == "__main__":
    main()
