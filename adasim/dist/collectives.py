"""What tensors travel between the processes of a run, beside gradients, and the layers that need it.

Batch norm over all ranks' images and one stochastic depth for a batch: with them a batch that is split over ranks
meets the same network as in one process. (torch's SyncBatchNorm does not run on CPUs.) Importing needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from adasim.util.errors import UserError

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


# Layers


@dataclass
class Part:
    """Which part of a batch the network sees: number `index` of `count` parts with `images` each."""

    index: int
    count: int
    images: int

    def cut(self, pieces: int) -> None:
        """From now on, so many parts for each one of before."""
        if pieces > 1 and self.images % pieces == 0:
            self.index, self.count = self.index * pieces, self.count * pieces
            self.images //= pieces


def synchronize(network: nn.Module, device: torch.device) -> nn.Module:
    """The same network, its parameters and names unchanged, with batch norms that work over all ranks.

    Those in evaluation mode do so as they are.
    """
    if device.type != "cpu":
        from timm.layers import convert_sync_batchnorm

        return convert_sync_batchnorm(network)
    for layer in network.modules():
        if isinstance(layer, _BatchNorm) and layer.training:
            if type(layer) not in (nn.BatchNorm1d, nn.BatchNorm2d):
                raise UserError(
                    f"{type(layer).__name__} has no form for several processes on CPUs. Use one process, GPUs, or "
                    f"another --model.name."
                )
            layer.__class__ = SyncedBatchNorm  # with the very parameters and buffers that it has
    return network


def share_drop_path(network: nn.Module, part: Part) -> nn.Module:
    """The same network with stochastic depth drawn for the whole batch. `part` is looked at in every forward pass."""
    from timm.layers import DropPath

    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, DropPath) and layer.training:
                setattr(parent, name, SharedDropPath(layer.drop_prob, part))
    return network


class SyncedBatchNorm(_BatchNorm):
    """Batch norm whose mean and variance are those of all ranks' images, forwards and backwards."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass  # (B, C, ...)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        others = [d for d in range(x.ndim) if d != 1]
        shape = [1, -1] + [1] * (x.ndim - 2)
        count = x.new_tensor([x.numel() // x.shape[1]])
        totals = _Total.apply(torch.cat([x.sum(others), count]))
        count, mean = totals[-1], totals[:-1] / totals[-1]
        centred = x - mean.view(shape)
        variance = _Total.apply(centred.square().sum(others)) / count  # two passes: no cancellation
        if self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                assert self.num_batches_tracked is not None
                self.num_batches_tracked += 1
                share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean, share)
                self.running_var.lerp_(variance * count / (count - 1), share)
        y = centred * (variance + self.eps).rsqrt().view(shape)
        return y if self.weight is None else y * self.weight.view(shape) + self.bias.view(shape)


class _Total(torch.autograd.Function):
    """The sum over ranks. Its gradient is one, too: every rank's loss depends on every rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Total.forward(ctx, gradient)


class SharedDropPath(nn.Module):
    """Stochastic depth as it would be drawn for the whole batch at once; the part at hand takes its images' share.

    All parts draw from generators in the same state (the loop seeds them before every forward pass).
    """

    def __init__(self, drop_prob: float, part: Part) -> None:
        super().__init__()
        self.keep, self.part = 1 - drop_prob, part

    def forward(self, x: Tensor) -> Tensor:
        """x holds one or more views of the part's images, one view after the other."""
        if self.keep == 1 or not self.training:
            return x
        part = self.part
        shape = (part.count * len(x), *[1] * (x.ndim - 1))
        mask = x.new_empty(shape).bernoulli_(self.keep).div_(self.keep)
        if part.count == 1:  # all that there is, however much
            return x * mask
        return x * mask.unflatten(0, (-1, part.count, part.images))[:, part.index].flatten(0, 1)
