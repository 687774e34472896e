"""The optimiser and its schedules, each a pure function of the step (so that resuming needs the step alone).

Per step: `set_schedules`, forward, backward, `method.before_optimizer`, `clip_per_tensor`, `optimizer.step`.
Steps and epochs count from 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adasim.config import Config, DinoConfig

if TYPE_CHECKING:  # methods import the teacher's schedules from here
    from adasim.methods.base import Method


def cosine(start: float, end: float, position: float, length: float) -> float:
    """Half a cosine from `start` at position 0 to `end` at position `length`."""
    return end + (start - end) * (1 + math.cos(math.pi * position / length)) / 2


def peak_learning_rate(config: Config) -> float:
    """The linear scaling rule: `lr` is per 256 images of the whole batch."""
    return config.optim.lr * config.batch_size / 256


def learning_rate(config: Config, step: int, steps_per_epoch: int) -> float:
    """Linear warm-up from 0 to the peak, which its last step reaches, then a cosine to `min_lr` (not scaled).

    The warm-up moves every step, the cosine every step (DINO) or every epoch (SimSiam).
    """
    optim, peak = config.optim, peak_learning_rate(config)
    warmup = optim.warmup_epochs * steps_per_epoch
    if step < warmup:
        return peak * step / max(warmup - 1, 1)
    if optim.lr_every == "epoch":
        step -= step % steps_per_epoch
    return cosine(peak, optim.min_lr, step - warmup, config.epochs * steps_per_epoch - warmup)


def weight_decay(config: Config, step: int, steps_per_epoch: int) -> float:
    """A cosine from `weight_decay` to `weight_decay_end` over the run, every step."""
    return cosine(
        config.optim.weight_decay, config.optim.weight_decay_end, step, config.epochs * steps_per_epoch
    )


def teacher_momentum(start: float, step: int, total_steps: int) -> float:
    """Momentum of the teacher's moving average: a cosine from `start` to 1, every step."""
    return cosine(start, 1.0, step, total_steps)


def teacher_temperature(config: DinoConfig, epoch: int) -> float:
    """linspace(start, end, n)[epoch] over the n epochs of its warm-up, then the end."""
    n = config.teacher_temp_warmup_epochs
    if epoch >= n:
        return config.teacher_temp
    return config.teacher_temp_start + (config.teacher_temp - config.teacher_temp_start) * epoch / max(
        n - 1, 1
    )


def build_optimizer(method: Method, config: Config) -> torch.optim.Optimizer:
    """AdamW (betas 0.9, 0.999; eps 1e-8), or SGD with momentum 0.9, over the method's parameter groups."""
    optim = config.optim
    groups = method.param_groups(optim)
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=peak_learning_rate(config), betas=(0.9, 0.999), eps=1e-8)
    return torch.optim.SGD(groups, lr=peak_learning_rate(config), momentum=0.9)


def set_schedules(optimizer: torch.optim.Optimizer, config: Config, step: int, steps_per_epoch: int) -> None:
    """Write this step's learning rate and weight decay into the groups.

    A group with `fixed_lr` keeps the peak rate (SimSiam's predictor); one without `decay` is not decayed.
    """
    lr = learning_rate(config, step, steps_per_epoch)
    decay = weight_decay(config, step, steps_per_epoch)
    for group in optimizer.param_groups:
        group["lr"] = peak_learning_rate(config) if group["fixed_lr"] else lr
        group["weight_decay"] = decay if group["decay"] else 0.0


@torch.no_grad()
def clip_per_tensor(params: Iterable[Tensor], max_norm: float) -> None:
    """Scale each gradient by max_norm / (norm + 1e-6) where that is below 1: per tensor, never globally."""
    grads = [p.grad for p in params if p.grad is not None]
    if max_norm <= 0 or not grads:
        return
    factors = [(max_norm / (norm + 1e-6)).clamp(max=1.0) for norm in torch._foreach_norm(grads)]
    torch._foreach_mul_(grads, factors)
