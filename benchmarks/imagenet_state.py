"""ImageNet-1k in the memory, really allocated: bytes of cache and history, and a few real steps at that size.

    python benchmarks/imagenet_state.py                     # needs about 11 GB
    python benchmarks/imagenet_state.py --images 100000     # a quick try

Allocates w = 50 epochs of K = 10 lists for N = 1,281,167 images and a 384-wide cache (fp32, then fp16), fills them,
runs `observe`, `end_epoch` and `draw_partners`, and reads what the process holds from the kernel.
"""

from __future__ import annotations

import time

import torch
from _report import options, report, resident_gb

from adasim.neighbors import NeighborMemory


def main() -> None:
    args = options(__doc__, images=1_281_167, dim=384, window=50, k=10, batch=128, steps=4)

    rows = []
    for dtype in (torch.float32, torch.float16):
        before = resident_gb()
        memory = NeighborMemory(args.images, args.dim, args.window, args.k, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        for part in memory.cache.split(65536):
            part.copy_(torch.nn.functional.normalize(torch.randn(part.shape, generator=generator), dim=1))
        for part in memory.history_ids.split(65536):
            part.random_(args.images, generator=generator)
        memory.history_similarities.fill_(0.5)
        memory.epochs = args.window
        held = resident_gb() - before
        timings = {}
        memory.observe([0], memory.cache[:1])
        start = time.perf_counter()
        memory.end_epoch()  # also makes the int8 copy
        timings["end_epoch s"] = time.perf_counter() - start
        start = time.perf_counter()
        for step in range(args.steps):
            ids = torch.arange(step * args.batch, (step + 1) * args.batch)
            memory.observe(ids, torch.randn(args.batch, args.dim, generator=generator))
        timings["observe s"] = (time.perf_counter() - start) / args.steps
        start = time.perf_counter()
        memory.draw_partners(args.window + 1, 0.2, 0)
        timings["draw all s"] = time.perf_counter() - start
        history = sum(t.nbytes for t in (memory.history_ids, memory.history_similarities))
        current = sum(t.nbytes for t in (memory.current_ids, memory.current_similarities))
        rows.append(
            {
                "cache type": str(dtype).removeprefix("torch."),
                "cache GB": memory.cache.nbytes / 1e9,
                "history GB": history / 1e9,
                "epoch in progress GB": current / 1e9,
                "resident GB": held * 2**30 / 1e9,
                "resident with int8 copy GB": (resident_gb() - before) * 2**30 / 1e9,
                **timings,
            }
        )
        del memory, part
    report("imagenet_state", vars(args), rows)


if __name__ == "__main__":
    main()
