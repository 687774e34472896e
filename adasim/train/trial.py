"""How fast a configuration trains on this machine: a few real steps, timed before a run is started."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import torch

from adasim.config import Config
from adasim.data import ImageSet
from adasim.dist.processes import Distributed
from adasim.train.state import build_loader, build_state
from adasim.train.step import forward, learn


class Speed(NamedTuple):
    """Of whole steps, with reading, views and the neighbour memory."""

    images_per_second: float
    busy: float
    """Seconds of training per image, without waiting for its pixels."""


def time_steps(
    config: Config, images: ImageSet, ranks: Distributed, *, at_once: int | None = None, seconds: float = 4.0
) -> Speed:
    """At least two steps after one that warms up, and more until `seconds` have passed. Nothing is kept of them.

    `at_once` is the size of a micro-batch, where a batch has several.
    """
    config = replace(
        config,
        batch_size=min(at_once or config.batch_size, len(images)),
        device=str(ranks.device),
        data=replace(config.data, max_unreadable=1.0),
    )
    state = build_state(config, len(images), ranks)
    ddp = ranks.wrap(state.method)
    loader = build_loader(config, images, ranks)
    steps, started, busy = 0, 0.0, 0.0
    themselves = torch.arange(len(images))
    try:
        for epoch in range(1_000_000):
            for batch in loader.epoch(epoch, themselves):
                ready = time.perf_counter()
                step = forward(state, ddp, batch.views)
                learn(state, step.loss, config, loader.steps_per_epoch)
                if state.memory is not None:
                    state.memory.observe(batch.ids, step.feature)
                float(step.loss.detach())  # waits for the device
                if not started:
                    started = time.perf_counter()
                    continue
                steps += 1
                now = time.perf_counter()
                busy += now - ready
                if steps >= 2 and now - started > seconds:
                    trained = steps * config.batch_size
                    return Speed(trained / (now - started), busy / trained)
    finally:
        loader.close()
    raise AssertionError("unreachable")
