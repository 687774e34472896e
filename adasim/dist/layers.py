"""Layers that look beyond what they are given: batch norm over all ranks' images, one stochastic depth for a batch.

With them a batch that is split over ranks meets the same network as in one process. (torch's own SyncBatchNorm
does not run on CPUs.) Micro-batches share one draw of stochastic depth, too; batch norm sees one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from timm.layers import DropPath, convert_sync_batchnorm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from adasim.util.errors import UserError


@dataclass
class Part:
    """Which part of a batch the network sees: number `index` of `count` parts with `images` each."""

    index: int
    count: int
    images: int

    def cut(self, pieces: int) -> None:
        """From now on, so many parts for each one of before."""
        if pieces > 1 and self.images % pieces == 0:
            self.index, self.count, self.images = (
                self.index * pieces,
                self.count * pieces,
                self.images // pieces,
            )


def synchronize(network: nn.Module, device: torch.device) -> nn.Module:
    """The same network, its parameters and names unchanged, with batch norms that work over all ranks.

    Those in evaluation mode do so as they are.
    """
    if device.type != "cpu":
        return convert_sync_batchnorm(network)
    return _replace_layers(network, _BatchNorm, SyncedBatchNorm.like)


def share_drop_path(network: nn.Module, part: Part) -> nn.Module:
    """The same network with stochastic depth drawn for the whole batch. `part` is looked at in every forward pass."""
    return _replace_layers(network, DropPath, lambda layer: SharedDropPath(layer, part))


def _replace_layers(
    network: nn.Module, kind: type[nn.Module], replaced: Callable[[Any], nn.Module]
) -> nn.Module:
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, kind) and layer.training:
                setattr(parent, name, replaced(layer))
    return network


class SyncedBatchNorm(_BatchNorm):
    """Batch norm whose mean and variance are those of all ranks' images, forwards and backwards."""

    @classmethod
    def like(cls, layer: _BatchNorm) -> SyncedBatchNorm:
        """With the very parameters and buffers of `layer`."""
        if type(layer) not in (nn.BatchNorm1d, nn.BatchNorm2d):
            raise UserError(
                f"{type(layer).__name__} has no form for several processes on CPUs. Use one process, GPUs, or "
                f"another --model.name."
            )
        synced = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        synced.weight, synced.bias = layer.weight, layer.bias
        synced.running_mean, synced.running_var = layer.running_mean, layer.running_var
        synced.num_batches_tracked = layer.num_batches_tracked
        return synced.train(layer.training)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected (B, C, ...), got {tuple(input.shape)}")

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
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


class SharedDropPath(nn.Module):
    """Stochastic depth as it would be drawn for the whole batch at once; the part at hand takes its images' share.

    All parts draw from generators in the same state (the loop seeds them before every forward pass).
    """

    def __init__(self, layer: DropPath, part: Part) -> None:
        super().__init__()
        self.keep, self.part = 1 - layer.drop_prob, part

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


class _Total(torch.autograd.Function):
    """The sum over ranks. Its gradient is one, too: every rank's loss depends on every rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient
