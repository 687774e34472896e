"""What the exact search needs of a device: fp64, and fp32 products that are what IEEE 754 says.

The program around it may have asked for less: autocast turns a product's factors into bf16 or fp16, and TF32 (which
some containers switch on by an environment variable) or oneDNN's bf16 shorten them inside it. An error bound for
fp32 does not hold for such products.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from adasim.dist.devices import without_autocast

_lock = threading.Lock()
_inside = 0  # how many blocks of `ieee_products` are being run, by all threads
_restore: list[Callable[[], None]] = []


@contextmanager
def ieee_products(device: torch.device) -> Iterator[None]:
    """fp32 products on `device` are full fp32 in the block, and as the program had set them afterwards."""
    global _inside
    with _lock:
        if _inside == 0:
            _restore[:] = _forbid_short_factors()
        _inside += 1
    try:
        with without_autocast(device):
            yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                for restore in _restore:
                    restore()


def has_fp64(device: torch.device) -> bool:
    """Whether the device can compute in fp64. Apple's mps cannot, nor can some of Intel's GPUs."""
    try:
        _ = torch.ones(1, dtype=torch.float64, device=device) + 1
    except (RuntimeError, TypeError):
        return False
    return True


def exact_device(device: torch.device | str) -> torch.device:
    """Where rows that are searched exactly can be kept: `device` itself, or the CPU where it has no fp64."""
    device = torch.device(device)
    return device if has_fp64(device) else torch.device("cpu")


def _forbid_short_factors() -> list[Callable[[], None]]:
    """Switch TF32 (GPUs) and bf16 (oneDNN) off; returns what brings back what was allowed.

    torch 2.9 gave the switches new names and refuses to read the old ones where the two disagree, so both are set.
    """
    modules: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    switches = [module for module in modules if hasattr(module, "fp32_precision")]
    before = [switch.fp32_precision for switch in switches]
    try:
        old = torch.get_float32_matmul_precision()
    except RuntimeError:  # the two already disagree
        old = None
    if old in ("highest", None) and all(value in ("ieee", "none") for value in before):
        return []
    if old is not None:
        torch.set_float32_matmul_precision("highest")
    for switch in switches:
        switch.fp32_precision = "ieee"
    restore = [] if old is None else [partial(torch.set_float32_matmul_precision, old)]
    return [*restore, *(partial(_set, *each) for each in zip(switches, before, strict=True))]


def _set(switch: Any, value: str) -> None:
    switch.fp32_precision = "none"  # which takes the value of the level above, if that was set
    if switch.fp32_precision != value:
        switch.fp32_precision = value
