"""The linear cost of the memory: time and memory of `observe` against rows and ranks, and the plan beside them.

    python benchmarks/scaling.py                                  # about 20 minutes, 12 GB
    python benchmarks/scaling.py --rows 10000 30000 --halves 60000 --imagenet 50000      # a quick try

Gloo processes with one thread each, pinned to cores in turn; ranks beyond the cores wait for one another, so their
work is in the column of processor time. Three parts:
- `curve`: seconds of an observation and resident memory of a rank, for N rows on 1, 2 and 4 ranks, beside the plan.
  The plan counts operations; two measurements on one rank, the smallest and the largest N, turn them into seconds.
  `results/scaling.png` draws them, and the plan up to a billion images.
- `halves`: two ranks on half the rows each against one on all of them, taking turns.
- `imagenet`: N = 1,281,167, w = 50, K = 10, D = 384 on 4 ranks, fully allocated. What is resident is cache and
  history; the traffic of a step is counted at the exchange, after a first observation of one image.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _memory import fill
from _report import RESULTS, options, report, resident_gb

from adasim.neighbors import NeighborMemory, ShardedMemory
from adasim.tools.plan import Plan

RANKS = (1, 2, 4)


def queries(memory: NeighborMemory, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of this rank's, seen anew."""
    places = torch.randint(len(memory.rows), (count,))
    noise = torch.randn(count, memory.dim) / memory.dim**0.5
    return places + memory.rows.start, memory.cache[places].float() + 0.5 * noise


def observe(memory: NeighborMemory, count: int, group: dist.ProcessGroup | None) -> tuple[float, float]:
    """Seconds and processor seconds of one observation of `count` images of each rank, begun together."""
    ids, features = queries(memory, count)
    if group is not None:
        dist.barrier(group)
    start, work = time.perf_counter(), time.process_time()
    memory.observe(ids, features)
    return time.perf_counter() - start, time.process_time() - work


def settled_gb() -> float:
    """What this process holds once the allocator has given back what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_gb()


def close_epoch(memory: NeighborMemory) -> None:
    """End an epoch of one observation; the search gets its int8 copy then."""
    memory.observe([0], torch.ones(1, memory.dim))
    memory.end_epoch()


def curve(args: argparse.Namespace, groups: dict[int, Any]) -> list[dict[str, Any]]:
    """One row per N and number of ranks; ranks that have no part wait."""
    found = []
    for n in args.rows:
        for ranks in RANKS:
            mine: dict[str, Any] | None = None
            if dist.get_rank() < ranks:
                before = settled_gb()
                memory = ShardedMemory(n, args.dim, args.window, args.k, group=groups[ranks])
                fill(memory)
                close_epoch(memory)
                times = [observe(memory, args.batch // ranks, groups[ranks]) for _ in range(args.steps + 1)]
                wall, work = zip(*times[1:], strict=True)
                mine = {
                    "observe s": statistics.median(wall),
                    "processor s": statistics.median(work),
                    "resident MB": (settled_gb() - before) * 2**30 / 1e6,
                    "received kB": memory.exchange.received / (args.steps + 1) / 1e3,
                }
                del memory
            all_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(all_ranks, mine)
            parts = [part for part in all_ranks if part is not None]
            slowest = {name: max(part[name] for part in parts) for name in parts[0]}
            found.append({"part": "curve", "rows": n, "ranks": ranks, **slowest})
    return found


def halves(args: argparse.Namespace, groups: dict[int, Any]) -> list[dict[str, Any]]:
    """One rank on all rows and two on half of them each, turn by turn."""
    rank = dist.get_rank()
    times: dict[str, list[tuple[float, float]]] = {"one": [], "two": []}
    if rank < 2:
        shared = ShardedMemory(args.halves, args.dim, 1, args.k, group=groups[2])
        memories: list[NeighborMemory] = [shared]
        if rank == 0:
            memories.append(NeighborMemory(args.halves, args.dim, 1, args.k))
        for memory in memories:
            fill(memory)
            close_epoch(memory)
        for turn in range(args.rounds + 1):
            if rank == 0:
                alone = observe(memories[1], args.batch, None)
            dist.barrier(groups[2])
            together = observe(shared, args.batch // 2, groups[2])
            if turn:
                times["two"].append(together)
                if rank == 0:
                    times["one"].append(alone)
    all_times: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_times, times)
    taken = {
        1: [statistics.median(t) for t in zip(*all_times[0]["one"], strict=True)],
        2: [
            max(statistics.median(t) for t in both)
            for both in zip(*(zip(*times["two"], strict=True) for times in all_times[:2]), strict=True)
        ],
    }
    return [
        {
            "part": "halves",
            "rows": args.halves,
            "ranks": ranks,
            "observe s": wall,
            "processor s": work,
            "of one rank": wall / taken[1][0],
        }
        for ranks, (wall, work) in taken.items()
    ]


def imagenet(args: argparse.Namespace, groups: dict[int, Any]) -> list[dict[str, Any]]:
    """The paper's largest setting on 4 ranks: what each holds, and one step's traffic at a batch of 1024."""
    before = settled_gb()
    memory = ShardedMemory(args.imagenet, 384, 50, 10, group=groups[4])
    fill(memory)
    held = (settled_gb() - before) * 2**30
    close_epoch(memory)
    with_copy = (settled_gb() - before) * 2**30
    seconds, _ = observe(memory, 256, groups[4])
    plan = Plan(args.imagenet, 384, 4, 50, 10, 1024, cache="float32")
    mine = {
        "part": "imagenet",
        "rows": args.imagenet,
        "ranks": 4,
        "observe s": seconds,
        "resident MB": held / 1e6,
        "plan MB": (plan.cache_bytes + plan.history_bytes + plan.epoch_bytes) / 1e6,
        "with int8 copy MB": with_copy / 1e6,
        "received kB": memory.exchange.received / 1e3,
        "plan kB": plan.step_wire_bytes / 1e3,
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return [max(everyone, key=lambda row: row["resident MB"])]


def beside_the_plan(args: argparse.Namespace, rows: list[dict[str, Any]], cores: int) -> None:
    """Add to the curve what the plan says, and draw both up to a billion images."""
    measured = [row for row in rows if row["part"] == "curve"]
    first, last = (
        min((row for row in measured if row["ranks"] == 1), key=lambda row: sign * row["rows"])
        for sign in (1, -1)
    )

    def plan(n: int, ranks: int) -> Plan:
        return Plan(n, args.dim, ranks, args.window, args.k, args.batch, cache="float32")

    def megabytes(p: Plan) -> float:
        return (p.cache_bytes + p.int8_bytes + p.history_bytes + p.epoch_bytes) / 1e6

    per_flop = (last["observe s"] - first["observe s"]) / (
        plan(last["rows"], 1).search_flops - plan(first["rows"], 1).search_flops
    )
    fixed = max(0.0, first["observe s"] - per_flop * plan(first["rows"], 1).search_flops)

    def seconds(p: Plan) -> float:
        return fixed + per_flop * p.search_flops

    for row in measured:
        p = plan(row["rows"], row["ranks"])
        waiting = max(1, row["ranks"] / cores)  # ranks beyond the cores take turns
        row |= {"plan s": seconds(p) * waiting, "plan MB": megabytes(p), "plan kB": p.step_wire_bytes / 1e3}

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    sizes = [int(10 ** (e / 4)) for e in range(16, 37)]
    for ranks, colour in zip((*RANKS, 64), ("C0", "C1", "C2", "C3"), strict=True):
        plans = [replace(plan(n, 1), ranks=ranks) for n in sizes]
        label = f"{ranks} rank{'s' if ranks > 1 else ''}"
        left.plot(sizes, [seconds(p) for p in plans], colour, lw=1, label=f"plan, {label}")
        right.plot(sizes, [megabytes(p) / 1e3 for p in plans], colour, lw=1)
        points = [row for row in measured if row["ranks"] == ranks]
        at = [row["rows"] for row in points]
        if points:
            left.plot(at, [row["processor s"] for row in points], f"{colour}o", label=f"measured, {label}")
            right.plot(at, [row["resident MB"] / 1e3 for row in points], f"{colour}o")
    left.set(xlabel="images", ylabel="processor seconds per rank", title=f"observe, {args.batch} images")
    right.set(xlabel="images", ylabel="GB per rank", title=f"memory, w = {args.window}, K = {args.k}")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.3)
    left.legend(fontsize=7)
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "scaling.png", dpi=150)


def be_rank(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    world = max(RANKS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in RANKS}
    # Memory first: what was freed before would hide in the allocator.
    rows = [*imagenet(args, groups), *halves(args, groups), *curve(args, groups)]
    if rank == 0:
        beside_the_plan(args, rows, len(cores))
        settings = {name: value for name, value in vars(args).items() if name != "rows"}
        report("scaling", settings, rows)
    dist.destroy_process_group()


def main() -> None:
    args = options(
        __doc__,
        rows=[10_000, 30_000, 100_000, 300_000, 1_000_000, 2_000_000],
        halves=1_281_167,
        imagenet=1_281_167,
        dim=384,
        window=10,
        k=10,
        batch=256,
        steps=5,
        rounds=7,
    )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(be_rank, (args, f"{folder}/store"), nprocs=max(RANKS))


if __name__ == "__main__":
    main()
