"""What the neighbour memory adds to a training step: ViT-S/16 at 224 pixels, B = 128, N = 1,281,167.

    python benchmarks/step_share.py                  # some three minutes on two cores, 12 GB
    python benchmarks/step_share.py --batch 8 --images 100000

Times a full step of the paper's ViT-S/16 recipe (both views through teacher and student, backward, AdamW, moving
average), then `observe`, and reports the share of the second in the first. A step takes about two minutes and sums
over 256 views, so one is enough; a small one comes first to warm up. `observe` is repeated, each time for other
images, and its median counts. The partners of a whole epoch are drawn once; their cost is spread over its steps. The
paper reports 1.7% to 5.5% on its GPUs.
"""

from __future__ import annotations

import statistics
import time

import torch
from _memory import fill
from _report import options, report

from adasim.neighbors import NeighborMemory
from adasim.recipes import get_recipe
from adasim.train.loop import learn
from adasim.train.state import build_state


def main() -> None:
    args = options(__doc__, images=1_281_167, batch=128, window=10, k=3, steps=1, searches=7)

    config = get_recipe("dino-vit-s16")
    config.pairs = "standard"  # the memory is made here, with a filled cache
    config.batch_size = args.batch
    state = build_state(config, args.images)
    state.epoch = 1  # in the first, the last layer is frozen
    method, dim = state.method, state.method.feature_dim
    memory = NeighborMemory(args.images, dim, args.window, args.k)
    fill(memory)
    memory.observe([0], memory.cache[:1])
    memory.end_epoch()
    start = time.perf_counter()
    memory.draw_partners(args.window + 1, 0.2, 0)
    draw = (time.perf_counter() - start) * args.batch / args.images  # its part of one step

    generator = torch.Generator().manual_seed(0)

    def train(batch: int) -> float:
        views = [torch.randn(batch, 3, 224, 224, generator=generator) for _ in range(2)]
        start = time.perf_counter()
        result = method([view.contiguous(memory_format=torch.channels_last) for view in views], 1)
        learn(state, result.loss, config, steps_per_epoch=1000)
        return time.perf_counter() - start

    def observe() -> float:
        ids = torch.randperm(args.images, generator=generator)[: args.batch]
        near = memory.cache[ids] + 0.5 * torch.randn(args.batch, dim, generator=generator) / dim**0.5
        start = time.perf_counter()
        memory.observe(ids, near)
        return time.perf_counter() - start

    train(min(4, args.batch))
    observe()
    standard = statistics.median(train(args.batch) for _ in range(args.steps))
    searches = statistics.median(observe() for _ in range(args.searches))
    rows = [
        {
            "standard step s": standard,
            "observe s": searches,
            "draw s": draw,
            "share": f"{(searches + draw) / standard:.2%}",
        }
    ]
    report("step_share", vars(args), rows)


if __name__ == "__main__":
    main()
