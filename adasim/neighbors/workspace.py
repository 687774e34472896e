"""Memory for a search's large temporary tensors, kept from one search to the next.

Fresh memory is handed out page by page: for a small search that takes longer than the arithmetic.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor


class Workspace(threading.local):
    """Tensors by name, for each thread its own. What is in one lasts until the same name is asked for again."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """As `torch.empty`, contiguous. Accelerators have an allocator that keeps memory: they get fresh tensors."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        count = math.prod(shape)
        flat = self.kept.get((name, dtype, device))
        if flat is None or len(flat) < count:
            with torch.inference_mode(False):  # else it could be used in that mode alone
                flat = self.kept[name, dtype, device] = torch.empty(count, dtype=dtype, device=device)
        return flat[:count].view(shape)


workspace = Workspace()
