"""What a training step needs, counted before it is run: operations, and memory beside the neighbour memory's.

The method runs on tensors that have a shape and no storage, so a step of any size takes seconds and no memory:

    footprint = Footprint.count(config)
    footprint.flops(128), footprint.activation_bytes(128)

Activations are what autograd keeps between forward and backward: each storage once, weights left out. What a
device needs on top (the largest temporary, workspaces, fragments) is not counted; a tenth more is a fair guess.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from adasim.config import Config, DataConfig
from adasim.dist.collectives import without_others
from adasim.dist.devices import working_precision
from adasim.methods import build_method

_FEW, _MORE = 4, 8  # images of the two steps that a line is drawn through; batch norm needs two


@dataclass(frozen=True)
class Footprint:
    """One step of a method, without the neighbour memory: linear functions of the images on one device."""

    flops_per_image: int
    """Of forward and backward passes; optimiser and augmentations are left out."""
    learned: int
    """Parameters with a gradient."""
    checkpoint_bytes: int
    """All networks, and the optimiser's moments."""
    bytes_per_image: int
    """Activations that grow with the batch."""
    bytes_fixed: int
    """Those that do not: a 16-bit copy of each weight, for instance."""

    @classmethod
    def count(cls, config: Config, channels: int = 3, device: torch.device | None = None) -> Footprint:
        """Two views (and local crops, if any) through the method and back, in the configuration's precision, or in
        what becomes of it on `device`: a CPU has fp32 alone."""
        if device is not None:
            working: Any = working_precision(config.precision, device)
            config = replace(config, precision=working)
        config = replace(config, data=DataConfig())  # no matter which
        return _count(json.dumps(config.to_dict()), channels)

    def flops(self, images: int) -> int:
        """Operations of a step of so many images on one device."""
        return self.flops_per_image * images

    def activation_bytes(self, images: int) -> int:
        """What such a step keeps between forward and backward."""
        return self.bytes_fixed + self.bytes_per_image * images

    def training_bytes(self, images: int) -> int:
        """Networks, moments, gradients and activations."""
        return self.checkpoint_bytes + 4 * self.learned + self.activation_bytes(images)


@cache  # a plan asks several times for the same one, and it takes seconds
def _count(settings: str, channels: int) -> Footprint:
    config = Config.from_dict(json.loads(settings))
    with torch.device("meta"), without_others():
        method = build_method(config, config.views.size, channels)
        with FlopCounterMode(display=False) as counter:
            method(_views(config, _FEW, channels), 0).loss.backward()
    learned = sum(p.numel() for p in method.parameters() if p.requires_grad)
    weights = weight_bytes(method, moments=2 if config.optim.name == "adamw" else 1)
    # Autocast needs a device, so the tensors pretend to have one: the CPU, whose list of 16-bit operations is
    # close to CUDA's.
    with FakeTensorMode(allow_non_fake_inputs=True), without_others():
        method.to_empty(device="cpu")
        few, more = (_kept_bytes(method, config, images, channels) for images in (_FEW, _MORE))
    per_image = (more - few) // (_MORE - _FEW)
    flops = counter.get_total_flops() // _FEW
    return Footprint(flops, learned, weights, per_image, few - _FEW * per_image)


def _views(config: Config, images: int, channels: int) -> list[Tensor]:
    views = config.views
    sizes = [views.size] * 2 + [views.local_size] * views.local_crops
    return [torch.empty(images, channels, size, size) for size in sizes]


def _kept_bytes(method: nn.Module, config: Config, images: int, channels: int) -> int:
    """What autograd keeps of one forward pass: each storage once, the weights' own left out."""
    kept: dict[int, tuple[int, object]] = {}  # a storage is held on to, lest its address be used again
    weights = {x.untyped_storage()._cdata for x in [*method.parameters(), *method.buffers()]}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes(), storage
        return x

    mixed = torch.autocast("cpu", torch.bfloat16, enabled=config.precision in ("bf16", "fp16"))
    with mixed, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        method(_views(config, images, channels), 0)
    return sum(size for size, _ in kept.values())


def weight_bytes(method: nn.Module, moments: int) -> int:
    """Of the networks and of an optimiser that keeps so many numbers beside each learned one."""
    learned = sum(p.nbytes for p in method.parameters() if p.requires_grad)
    return sum(tensor.nbytes for tensor in method.state_dict().values()) + moments * learned
