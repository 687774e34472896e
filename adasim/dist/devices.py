"""What a run does differently on different devices: which one, in what precision, and how repeatably."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from adasim.util.errors import UserError


def pick_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device of that name, or for `auto` an accelerator if there is one; of several, this process's own.

    `auto` never is Apple's mps: torch's bugs there change numbers without a word (see docs/gpu.md).

    A launcher may show each process all devices of the node, or only its own (`srun --gpus-per-task=1`):
    the local rank modulo the number of devices fits both. No device but this process's is touched.
    """
    best = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if best is None or best.type == "mps":
        best = torch.device("cpu")
    try:
        device = best if name == "auto" else torch.device(name)
        if local_rank is not None and device.type != "cpu":
            if device.index is not None:
                raise UserError(
                    f"device={name} is one device, and every process of this node needs its own. Use --device auto."
                )
            device = torch.device(device.type, local_rank % max(1, torch.accelerator.device_count()))
        if name != "auto":
            torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device={name} cannot be used here ({reason}). Try --device auto.") from None
    return device


def claim_device(store: dist.Store, device: torch.device) -> None:
    """Refuse a device that another process of the run has: `store` is the run's own.

    Only CUDA tells its devices apart, by serial numbers; elsewhere, and where a GPU has none, nothing is checked.
    """
    serial = _serial(device) if device.type == "cuda" else None
    if serial is not None and store.add(f"device {serial}", 1) > 1:
        raise UserError(
            f"Two processes of the run have the same device, {serial}: this process sees "
            f"{torch.accelerator.device_count()}. Start one process per device (torchrun --nproc-per-node, srun "
            f"--ntasks-per-node)."
        )


def to_device(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """x on the device. Only CUDA's copies need not be waited for: mps may read x when its memory is another's."""
    return x.to(device, dtype, non_blocking=device.type == "cuda")


def image_layout(device: torch.device) -> torch.memory_format:
    """How images lie in memory: channels last, since convolutions are faster so, on CPUs too; on mps, where batch
    norm's gradients would be wrong, channels first."""
    return torch.contiguous_format if device.type == "mps" else torch.channels_last


def working_precision(precision: str, device: torch.device) -> str:
    """`precision`, or fp32 where that cannot be had: a CPU has no other, tf32 is CUDA's, fp16 needs scaled losses."""
    if device.type == "cpu" or (precision == "tf32" and device.type != "cuda"):
        return "fp32"
    if precision == "fp16" and not _can_scale_losses(device):
        return "fp32"
    return precision


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The forward pass in a `working_precision`. Not every kind of device knows autocast; all know fp32."""
    if precision in ("fp32", "tf32"):
        return nullcontext()
    return torch.autocast(device.type, torch.float16 if precision == "fp16" else torch.bfloat16)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """In the block, operations on `device` keep the precision of what they are given."""
    on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


@contextmanager
def tf32_products(wanted: bool) -> Iterator[None]:
    """In the block, if wanted, matrix products take TF32 factors; the neighbour memory's own stay exact."""
    if not wanted:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """In the block, if wanted, the same numbers give the same bits on the same device every time.

    On a CPU they do anyway. On CUDA the gradients of attention and convolutions are sums whose order is left to
    chance unless slower algorithms are asked for.

    Raises:
        UserError: an operation has none on this device.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # which picks an algorithm by the clock
    memory.fill_uninitialized_memory = False  # nothing here reads what it has not written
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error).lower():
            raise
        raise UserError(
            f"--deterministic cannot be kept on this device: {str(error).split(', but')[0]}. Leave it out, or what "
            f"needs that operation (--views.local-crops with a ViT does)."
        ) from error
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        memory.fill_uninitialized_memory = fill


def _serial(device: torch.device) -> str | None:
    """The serial number of a GPU, 16 bytes in hexadecimal. Where there is none, AMD's driver gives every GPU the same
    few letters (XX) and zeros: that is None here."""
    serial = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return serial if len(serial.replace("-", "").rstrip("0")) > 8 else None


def _can_scale_losses(device: torch.device) -> bool:
    """Try torch's scaler on one number: not every kind of device has the operations, or the fp64, that it needs."""
    number = torch.ones(1, device=device, requires_grad=True)
    number.grad = torch.ones_like(number)
    optimizer = torch.optim.SGD([number], lr=0.0)
    scaler = torch.amp.GradScaler(device.type)
    try:
        scaler.scale(number.detach())
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    except (RuntimeError, TypeError):
        return False
    return True
