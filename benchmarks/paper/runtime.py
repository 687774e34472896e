"""Seconds a step without and with the memory, as in the paper's table of runtimes: SimSiam on the desk's ResNet.

    python -m benchmarks.paper.runtime               # under a minute; on an otherwise idle machine

Each step is timed in two parts, the step itself and `observe`, so that a slow minute hits both; medians count. The
partners of a whole epoch are drawn at once, and their cost is spread over its steps. benchmarks/step_share.py is the
same at ImageNet's size for a ViT-S/16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from adasim.neighbors import NeighborMemory
from adasim.train.state import build_state
from adasim.train.step import learn

from .cell import RESULTS, append, stamp
from .settings import IMAGES_PER_CLASS, build

CLASSES = 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="how many")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are appended")
    args = parser.parse_args()
    for batch in (128, 256):
        without, added, draw = measure(batch, args.steps)
        line = {"batch": batch, "without": without, "with": without + added + draw, "draw": draw}
        print(
            f"batch {batch}: {without:.4f} s, with the memory {line['with']:.4f} s ({(added + draw) / without:+.1%})"
        )
        append(
            args.results / "runtime.jsonl",
            line | {"threads": torch.get_num_threads()} | stamp(),
        )


def measure(batch: int, steps: int) -> tuple[float, float, float]:
    """Medians of a step, of `observe` in it, and a step's part of drawing an epoch's partners."""
    images = CLASSES * IMAGES_PER_CLASS
    config = build("simsiam", "standard", 0)
    config.batch_size = batch
    state = build_state(config, images)
    method, near = state.method, config.neighbors
    memory = NeighborMemory(images, method.feature_dim, near.window, near.k)
    generator = torch.Generator().manual_seed(0)

    def step() -> tuple[float, float]:
        shape = (batch, 3, config.views.size, config.views.size)
        views = [
            torch.randn(shape, generator=generator).contiguous(memory_format=torch.channels_last)
            for _ in range(2)
        ]
        ids = torch.randperm(images, generator=generator)[:batch]
        start = time.perf_counter()
        result = method(views, 1)
        learn(state, result.loss, config, steps_per_epoch=1000)
        middle = time.perf_counter()
        memory.observe(ids, result.feature)
        return middle - start, time.perf_counter() - middle

    for _ in range(images // batch):  # an epoch to warm up and to fill the cache
        step()
    memory.end_epoch()
    taken = [step() for _ in range(steps)]
    while memory.epochs < near.window:  # lists to draw from, without training
        features = torch.randn(images, method.feature_dim, generator=generator)
        for ids in torch.arange(images).split(batch):
            memory.observe(ids, features[ids])
        memory.end_epoch()
    start = time.perf_counter()
    memory.draw_partners(near.window, near.tau, 0)
    draw = (time.perf_counter() - start) * batch / images
    return statistics.median(t for t, _ in taken), statistics.median(t for _, t in taken), draw


if __name__ == "__main__":
    main()
