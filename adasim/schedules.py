"""Schedules, each a pure function of the step or epoch (so that resuming needs the step alone).

Steps and epochs count from 0.
"""

from __future__ import annotations

import math

from adasim.config import Config


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
    rest = max(config.epochs * steps_per_epoch - warmup, 1)  # a run may be warm-up and nothing else
    return cosine(peak, optim.min_lr, step - warmup, rest)


def weight_decay(config: Config, step: int, steps_per_epoch: int) -> float:
    """A cosine from `weight_decay` to `weight_decay_end` over the run, every step."""
    return cosine(
        config.optim.weight_decay, config.optim.weight_decay_end, step, config.epochs * steps_per_epoch
    )
