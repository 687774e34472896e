"""How long torch's threads should spin while they wait: alone on the machine, and beside two busy processes.

    python benchmarks/waiting.py                     # some fifteen minutes on two idle cores, 16 GB
    python benchmarks/waiting.py --images 100000 --rounds 1 --seconds 1

torch's CPU kernels share their work with threads of libgomp. A thread that has nothing to do spins before it sleeps,
300,000 times by default: quick to go on where it has a core to itself, and a waste of the other threads' time where
it has not. One process for each setting prepares all workloads; then they take turns, workload by workload, first
alone, then beside two endless loops. Each figure is the median over the rounds, in steps (or searches) per second.
`adasim` sets GOMP_SPINCOUNT unless the user has set any of these variables: see adasim/__init__.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SETTINGS: dict[str, dict[str, str]] = {
    "libgomp's own": {"GOMP_SPINCOUNT": "300000"},
    "10,000": {"GOMP_SPINCOUNT": "10000"},
    "1,000": {"GOMP_SPINCOUNT": "1000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
}
WORKLOADS = ("desk-resnet step", "desk-vit step", "ViT-S/16 step", "search")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1_281_167)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.images)

    command = [sys.executable, __file__, "--serve", "--images", str(args.images)]
    servers = {}
    for name, variables in SETTINGS.items():
        servers[name] = subprocess.Popen(
            command, env={**os.environ, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        read(servers[name])  # ready; the next one begins only now
    figures: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(args.rounds):
        for loops in (0, 2):
            with busy(loops):
                for workload in WORKLOADS:
                    for name, server in servers.items():
                        assert server.stdin is not None
                        print(workload, args.seconds, sep=";", file=server.stdin, flush=True)
                        key = (workload, "beside two loops" if loops else "alone", name)
                        figures.setdefault(key, []).append(float(read(server)))
    for server in servers.values():
        server.kill()

    from _report import report  # imports torch, which the measured processes must do by themselves

    rows: list[dict[str, Any]] = []
    for workload in WORKLOADS:
        for where in ("alone", "beside two loops"):
            medians = {name: statistics.median(figures[workload, where, name]) for name in SETTINGS}
            base = "libgomp's own" if where == "alone" else "passive"
            ratios = {f"{name}: ratio": medians[name] / medians[base] for name in SETTINGS}
            rows.append({"workload, per second": f"{workload}, {where}", **medians, "over": base, **ratios})
    report("waiting", {k: v for k, v in vars(args).items() if k != "serve"}, rows)


def read(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    return server.stdout.readline()


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Endless loops beside, as many as asked for."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def serve(images: int) -> None:
    """Prepare all workloads, then measure what standard input asks for."""
    runs = dict(zip(WORKLOADS, prepared(images), strict=True))
    for run in runs.values():
        run()
    print("ready", flush=True)
    for line in sys.stdin:
        workload, seconds = line.strip().split(";")
        runs[workload]()
        steps, start = 0, time.perf_counter()
        while steps < 2 or time.perf_counter() - start < float(seconds):
            runs[workload]()
            steps += 1
        print(steps / (time.perf_counter() - start), flush=True)


def prepared(images: int) -> Iterator[Callable[[], Any]]:
    """The workloads, in their order."""
    import torch
    from _memory import fill

    from adasim.neighbors import NeighborMemory
    from adasim.recipes import get_recipe
    from adasim.train.loop import learn
    from adasim.train.state import build_state

    def training(recipe: str, batch: int) -> Callable[[], None]:
        config = get_recipe(recipe)
        config.pairs = "standard"
        config.batch_size = batch
        state = build_state(config, 1000)
        size = config.views.size
        views = [
            torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last) for _ in range(2)
        ]
        return lambda: learn(state, state.method(views, 1).loss, config, steps_per_epoch=1000)

    yield training("desk-resnet", 128)
    yield training("desk-vit", 128)
    yield training("dino-vit-s16", 2)
    memory = NeighborMemory(images, 384, window=1, k=10)
    fill(memory)
    ids = torch.arange(128) * (images // 128)
    near = memory.cache[ids] + 0.5 * torch.randn(128, 384) / 384**0.5
    yield lambda: memory.observe(ids, near)


if __name__ == "__main__":
    main()
