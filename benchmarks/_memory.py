"""A neighbour memory in the middle of a run, for benchmarks: a full cache and a full window."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from adasim.neighbors import NeighborMemory


def fill(memory: NeighborMemory) -> None:
    """Features around a thousand centres, as in a trained encoder, and lists of which every other one begins with the
    image itself, so that half of all images draw a partner."""
    generator = torch.Generator().manual_seed(memory.rows.start)
    centres = torch.randn(1000, memory.dim, generator=torch.Generator().manual_seed(0))
    for part in memory.cache.split(65536):
        some = centres[torch.randint(1000, (len(part),), generator=generator)]
        some.add_(torch.randn(some.shape, generator=generator))
        part.copy_(normalize(some, dim=1).mul_(2**24).round_().div_(2**24))  # on the memory's grid
    for lists in memory.history_ids.split(65536):
        lists.random_(memory.num_images, generator=generator)
    memory.history_similarities.fill_(0.5)
    own = torch.arange(memory.rows.start, memory.rows.stop, 2)
    memory.history_ids[own - memory.rows.start, :, 0] = own[:, None].int()
    memory.history_similarities[own - memory.rows.start, :, 0] = 0.9
    memory.epochs = memory.window
