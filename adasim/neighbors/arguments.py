"""The memory's arguments: ids and temperature in any clear form, else an error that says what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

Ids: TypeAlias = "Tensor | np.ndarray | Sequence[int]"
"""Image ids: one row of whole numbers of any type."""


def checked_ids(ids: Ids, num_images: int) -> Tensor:
    """Image ids as int64 (B,), on the device they came on.

    >>> checked_ids([2, 0], num_images=3)
    tensor([2, 0])
    """
    found = torch.as_tensor(ids)
    if found.ndim == 1 and len(found) == 0:  # torch takes an empty list for floats
        return found.long()
    if found.ndim != 1 or found.dtype == torch.bool or found.is_floating_point() or found.is_complex():
        what = f"{str(found.dtype).removeprefix('torch.')} of shape {tuple(found.shape)}"
        raise ValueError(f"ids must be one row of whole numbers, got {what}")
    found = found.long()
    low, high = torch.stack(found.aminmax()).tolist()  # one answer to wait for, where ids are on a device
    if low < 0 or high >= num_images:
        raise ValueError(f"ids must lie between 0 and {num_images - 1}, got {low if low < 0 else high}")
    return found


def check_tau(tau: float) -> None:
    """Refuse a temperature that is negative or not a number."""
    if not tau >= 0:
        raise ValueError(f"tau={tau} must be 0 (standard pairs) or above; the paper uses 0.2")
