"""A pair policy of your own in one file: the mutual nearest neighbour, if there is one.

    adasim pretrain desk-resnet --plugin examples/own_pairs.py --pairs mutual --out runs/mutual

Image i is paired with its best match j in the newest list only if i is also the best match of j.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from adasim.neighbors import NeighborMemory, PairContext, PairPolicy
from adasim.registry import PAIRS
from adasim.util.errors import UserError


@PAIRS.register("mutual")
@dataclass
class Mutual(PairPolicy):
    draws_from_memory = True  # the run keeps a neighbour memory
    memory: NeighborMemory

    @classmethod
    def build(cls, context: PairContext) -> Self:
        assert context.memory is not None
        return cls(context.memory)

    @classmethod
    def check(cls, config: Any) -> None:
        if config.neighbors.k < 2:
            raise UserError("pairs=mutual needs neighbors.k of at least 2: a list may hold the image itself.")

    @classmethod
    def window(cls, neighbors: Any) -> int:
        return 1  # the newest lists are all it reads

    def partners(self, epoch: int, ids: Tensor | None = None) -> Tensor:
        best = self.memory.nearest_other()  # (N,), also where processes share the memory
        own = torch.arange(len(best))
        partners = torch.where(best[best] == own, best, own)
        return partners if ids is None else partners[ids]
