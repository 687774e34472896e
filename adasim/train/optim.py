"""The optimiser of a run: built from the method's parameter groups, driven by the schedules.

`TrainState.learn` takes a step with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from adasim.config import Config
from adasim.methods.base import Method
from adasim.models import Backbone
from adasim.schedules import learning_rate, peak_learning_rate, weight_decay


def build_optimizer(method: Method, config: Config) -> torch.optim.Optimizer:
    """AdamW (betas 0.9, 0.999; eps 1e-8), or SGD with momentum 0.9, over the method's parameter groups."""
    optim, lr = config.optim, peak_learning_rate(config)
    groups = method.param_groups(optim)
    if optim.encoder_lr < 1 or optim.head_epochs:
        groups = _encoder_apart(groups, method)
    # On a CPU one pass over the weights instead of ten; elsewhere torch knows what is fastest.
    fused = all(p.device.type == "cpu" for group in groups for p in group["params"]) or None
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, fused=fused)
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, fused=fused)
    if fused:
        optimizer.register_step_pre_hook(_begin_momentum)
    return optimizer


def _encoder_apart(groups: list[dict[str, Any]], method: Method) -> list[dict[str, Any]]:
    """The same groups, the encoder's weights in groups of their own."""
    encoder = {id(p) for part in method.modules() if isinstance(part, Backbone) for p in part.parameters()}
    split = [
        {**group, "params": [p for p in group["params"] if (id(p) in encoder) is own], "encoder": own}
        for group in groups
        for own in (True, False)
    ]
    return [group for group in split if group["params"]]


def _begin_momentum(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Give weights that learn for the first time, as DINO's last layer after its frozen epochs, a momentum of zero.

    torch's fused SGD takes it for granted that all weights have begun together.
    """
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None and optimizer.state[weight].get("momentum_buffer") is None:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)


def set_schedules(optimizer: torch.optim.Optimizer, config: Config, step: int, steps_per_epoch: int) -> None:
    """Write this step's learning rate and weight decay into the groups.

    A group with `fixed_lr` keeps the peak rate (SimSiam's predictor); one without `decay` is not decayed. The
    encoder's may have a rate of its own, and none at all in the first epochs.
    """
    optim = config.optim
    share = optim.encoder_lr if step >= optim.head_epochs * steps_per_epoch else 0.0
    lr = learning_rate(config, step, steps_per_epoch)
    decay = weight_decay(config, step, steps_per_epoch)
    for group in optimizer.param_groups:
        group["lr"] = peak_learning_rate(config) if group["fixed_lr"] else lr
        if group.get("encoder"):
            group["lr"] *= share
        group["weight_decay"] = decay if group["decay"] else 0.0


@torch.no_grad()
def clip_per_tensor(params: Iterable[Tensor], max_norm: float) -> None:
    """Scale each gradient by max_norm / (norm + 1e-6) where that is below 1: per tensor, never globally."""
    grads = [p.grad for p in params if p.grad is not None]
    if max_norm <= 0 or not grads:
        return
    factors = [(max_norm / (norm + 1e-6)).clamp(max=1.0) for norm in torch._foreach_norm(grads)]
    torch._foreach_mul_(grads, factors)
