"""A score and an id in one integer, whose order is the order of `search`: so that topk breaks ties by id."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(scores: Tensor, ids: Tensor) -> Tensor:
    """int64 keys that sort by score, then by smaller id (fp32 bits are made monotone; ids below 2^31)."""
    bits = scores.view(torch.int32)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) | (0x7FFFFFFF - ids)


def unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and ids of keys; the least integer of all stands for no row, and gives -inf."""
    bits = (keys >> 32).int()
    scores = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return torch.where(torch.isnan(scores), -torch.inf, scores), 0x7FFFFFFF - (keys & 0x7FFFFFFF)
