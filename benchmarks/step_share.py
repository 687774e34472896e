"""What the neighbour memory adds to a training step: ViT-S/16 at 224 pixels, B = 128, N = 1,281,167.

    python benchmarks/step_share.py                  # some twenty minutes on two cores
    python benchmarks/step_share.py --batch 8 --steps 2 --images 100000

Times `observe` inside a full step of the paper's ViT-S/16 recipe (both views through teacher and student, backward,
AdamW, moving average) and reports its share of the rest. Two noisy runs are not subtracted. The partners of a whole
epoch are drawn once; their cost is spread over its steps. The paper reports 1.7% to 5.5% on its GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from _report import report

from adasim.neighbors import NeighborMemory
from adasim.recipes import get_recipe
from adasim.train.optim import set_schedules
from adasim.train.state import build_state


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1_281_167)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--window", type=int, default=10)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()

    config = get_recipe("dino-vit-s16")
    config.pairs = "standard"  # the memory is made here, with a filled cache
    config.batch_size = args.batch
    state = build_state(config, args.images)
    method, dim = state.method, state.method.feature_dim
    memory = NeighborMemory(args.images, dim, args.window, args.k)
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(1000, dim, generator=generator)
    for part in memory.cache.split(65536):  # clustered, as a trained encoder's features
        part.normal_(generator=generator).add_(
            centres[torch.randint(1000, (len(part),), generator=generator)]
        )
        part.copy_(torch.nn.functional.normalize(part, dim=1).mul_(2**24).round_().div_(2**24))
    for part in memory.history_ids.split(65536):
        part.random_(args.images, generator=generator)
    memory.history_similarities.fill_(0.5)
    memory.epochs = args.window
    memory.observe([0], memory.cache[:1])
    memory.end_epoch()
    start = time.perf_counter()
    memory.draw_partners(args.window + 1, 0.2, 0)
    draw = (time.perf_counter() - start) * args.batch / args.images  # its part of one step

    steps, searches = [], []
    for step in range(args.steps + 1):
        views = [torch.randn(args.batch, 3, 224, 224, generator=generator) for _ in range(2)]
        ids = torch.randperm(args.images, generator=generator)[: args.batch]
        near = memory.cache[ids] + 0.5 * torch.randn(args.batch, dim, generator=generator) / dim**0.5
        start = time.perf_counter()
        set_schedules(state.optimizer, config, step, 1000)
        result = method(views, 1)
        state.optimizer.zero_grad(set_to_none=True)
        result.loss.backward()
        state.optimizer.step()
        method.after_step(step, 100_000)
        middle = time.perf_counter()
        memory.observe(ids, near)
        if step:  # the first warms up
            steps.append(middle - start)
            searches.append(time.perf_counter() - middle)
    standard, observe = statistics.median(steps), statistics.median(searches)
    rows = [
        {
            "standard step s": standard,
            "observe s": observe,
            "draw s": draw,
            "share": f"{(observe + draw) / standard:.2%}",
        }
    ]
    report("step_share", vars(args), rows)


if __name__ == "__main__":
    main()
