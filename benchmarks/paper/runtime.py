"""Seconds a step without and with the memory, as in the paper's table of runtimes: SimSiam on the desk's ResNet.

    python -m benchmarks.paper.runtime               # under a minute; on an otherwise idle machine
    torchrun --nproc-per-node 8 -m benchmarks.paper.runtime --recipe dino-vit-s16 --images 1281167 --device cuda

Each step is timed in two parts, the step itself and `observe`, so that a slow minute hits both; medians count. The
partners of a whole epoch are drawn at once, and their cost is spread over its steps. Views are noise that is made on
the device: reading images is not counted. benchmarks/step_share.py is the same at ImageNet's size on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from adasim.config import Config
from adasim.dist.processes import Distributed
from adasim.neighbors import ShardedMemory
from adasim.recipes import RECIPES, get_recipe
from adasim.train.loop import forward, learn
from adasim.train.state import build_state

from .cell import RESULTS, append, stamp
from .settings import IMAGES_PER_CLASS, build

CLASSES = 10
WARM_UP = 50
"""Steps before those that count, at most; the cache is filled otherwise where that is less than an epoch."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="how many")
    parser.add_argument("--recipe", choices=RECIPES, help="whose step; the desk's SimSiam by default")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    parser.add_argument("--images", type=int, default=CLASSES * IMAGES_PER_CLASS, help="rows of the memory")
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 256], help="images of each process")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are appended")
    args = parser.parse_args()
    config = get_recipe(args.recipe) if args.recipe else build("simsiam", "standard", 0)
    config.pairs = "standard"  # the memory is made here, and observes by itself
    with Distributed.start(args.device) as ranks:
        for batch in args.batch:
            config.batch_size = batch * ranks.world
            without, added, draw = measure(config, args.images, args.steps, ranks)
            line = {"batch": batch, "without": without, "with": without + added + draw, "draw": draw}
            if args.recipe:
                line |= {"recipe": args.recipe, "images": args.images, "device": device_name(ranks.device)}
                line |= {"processes": ranks.world}
            if ranks.is_main:
                share = f"{(added + draw) / without:+.1%}"
                print(f"batch {batch}: {without:.4f} s, with the memory {line['with']:.4f} s ({share})")
                append(args.results / "runtime.jsonl", line | {"threads": torch.get_num_threads()} | stamp())


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def measure(config: Config, images: int, steps: int, ranks: Distributed) -> tuple[float, float, float]:
    """Medians of a step, of `observe` in it, and a step's part of drawing an epoch's partners."""
    batch, device, near = config.batch_size // ranks.world, ranks.device, config.neighbors
    state = build_state(config, images, ranks)
    ddp, width = ranks.wrap(state.method), state.method.feature_dim
    memory = ShardedMemory(images, width, near.window, near.k, device=device)
    generator = torch.Generator(device).manual_seed(ranks.rank)
    order = torch.Generator().manual_seed(0)  # the same on every process, which takes its part

    def now() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    def step() -> tuple[float, float]:
        shape = (batch, 3, config.views.size, config.views.size)
        views = [torch.randn(shape, generator=generator, device=device) for _ in range(2)]
        ids = torch.randperm(images, generator=order)[: config.batch_size].chunk(ranks.world)[ranks.rank]
        start = now()
        result = forward(state, ddp, views)
        learn(state, result.loss, config, steps_per_epoch=1000)
        middle = now()
        memory.observe(ids, result.feature)
        return middle - start, now() - middle

    def fill() -> None:
        """An epoch of features without training."""
        for ids in torch.arange(images).split(config.batch_size):
            mine = ids.tensor_split(ranks.world)[ranks.rank]
            memory.observe(mine, torch.randn(len(mine), width, generator=generator, device=device))
        memory.end_epoch()

    if images // config.batch_size > WARM_UP:
        fill()
    for _ in range(min(WARM_UP, images // config.batch_size)):
        step()
    memory.end_epoch()
    taken = [step() for _ in range(steps)]
    while memory.epochs < near.window:  # lists to draw from
        fill()
    start = now()
    memory.draw_partners(near.window, near.tau, 0)
    draw = (now() - start) * config.batch_size / images
    return statistics.median(t for t, _ in taken), statistics.median(t for _, t in taken), draw


if __name__ == "__main__":
    main()
