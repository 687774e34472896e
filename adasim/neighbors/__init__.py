"""The heart of AdaSim: exact search, the neighbour memory and the pair policies. Imports torch and numpy alone."""

from adasim.neighbors.arithmetic import merge
from adasim.neighbors.memory import NeighborMemory
from adasim.neighbors.pairs import (
    AdaSim,
    Nearest,
    Oracle,
    PairContext,
    PairDataset,
    PairPolicy,
    PairSampler,
    Standard,
)
from adasim.neighbors.search import QuantizedRows, search
from adasim.neighbors.sharded import ShardedMemory

__all__ = [
    "AdaSim",
    "Nearest",
    "NeighborMemory",
    "Oracle",
    "PairContext",
    "PairDataset",
    "PairPolicy",
    "PairSampler",
    "QuantizedRows",
    "ShardedMemory",
    "Standard",
    "merge",
    "search",
]
