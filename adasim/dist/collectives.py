"""What tensors travel between the processes of a run, beside gradients. Needs torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_nothing_travels = False


@contextmanager
def without_others() -> Iterator[None]:
    """In the block this process is alone: for tensors that have a shape but no storage, which cannot travel."""
    global _nothing_travels
    before, _nothing_travels = _nothing_travels, True
    try:
        yield
    finally:
        _nothing_travels = before


def _is_alone() -> bool:
    return _nothing_travels or not (dist.is_available() and dist.is_initialized())


class Exchange:
    """The few collectives that the memory needs; `received` counts the bytes that reached this rank.

    Equal shapes on all ranks. Tensors travel on the CPU with gloo, on the accelerator otherwise.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        alone = _is_alone()
        self.group = group
        self.rank = 0 if alone else dist.get_rank(group)
        self.world = 1 if alone else dist.get_world_size(group)
        self.received = 0
        # A group that was made without a named backend has gloo for CPUs, and calls it "undefined".
        self._on_cpu = alone or not torch.accelerator.is_available() or dist.get_backend(group) == "gloo"
        self._device = torch.device("cpu") if self._on_cpu else torch.accelerator.current_accelerator()

    def counts(self, mine: int) -> list[int]:
        """One number per rank."""
        return self.gather(torch.tensor([mine])).tolist()

    def gather(self, part: Tensor) -> Tensor:
        """(n, ...) from each rank -> (R n, ...), in the order of ranks."""
        return self.gather_async(part)()

    def gather_async(self, part: Tensor) -> Callable[[], Tensor]:
        """The same, begun now; the call that is returned waits for it."""
        # To a device nobody needs to wait; on the way to the CPU the numbers must have arrived.
        part = part.to(self._device, non_blocking=not self._on_cpu).contiguous()
        everyone = part.new_empty((self.world * len(part), *part.shape[1:]))
        work = dist.all_gather_into_tensor(everyone, part, group=self.group, async_op=True)
        assert work is not None
        self.received += everyone.nbytes - part.nbytes

        def wait() -> Tensor:
            work.wait()
            return everyone

        return wait

    def swap(self, parts: Tensor) -> Tensor:
        """(R, ...), parts[r] for rank r -> (R, ...), what each rank had for this one."""
        parts = parts.to(self._device).contiguous()
        arrived = torch.empty_like(parts)
        dist.all_to_all_single(arrived, parts, group=self.group)
        self.received += parts.nbytes - parts[0].nbytes
        return arrived

    def maximum(self, x: Tensor) -> Tensor:
        """The elementwise maximum over ranks, on the CPU."""
        x = x.to(self._device)
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        self.received += 2 * (x.nbytes - x.nbytes // self.world)  # as a ring does it
        return x.cpu()


def mean_over_ranks(x: Tensor) -> Tensor:
    """The mean of all ranks' tensors, the same on all; alone, the tensor itself."""
    if not _is_alone():
        dist.all_reduce(x)
        x = x / dist.get_world_size()
    return x


def gather_with_gradient(x: Tensor) -> Tensor:
    """(n, ...) from each rank -> (R n, ...), in the order of ranks; alone, the tensor itself.

    Every rank's loss depends on every rank's part, so the gradient of a part is the sum of all ranks' gradients.
    """
    if not _is_alone() and dist.get_world_size() > 1:
        return _Gather.apply(x)
    return x


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        everyone = x.new_empty((dist.get_world_size() * len(x), *x.shape[1:]))
        dist.all_gather_into_tensor(everyone, x.contiguous())
        return everyone

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]
