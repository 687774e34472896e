"""A batch in parts: the gradients of micro-batches add up, so that a recipe's batch fits on any device.

For a network without batch norm the loss, its gradients and the features for the memory are those of the whole batch,
up to the order of sums: stochastic depth is drawn for the batch, DINO's centre is the mean over all of it. Batch norm
takes its statistics from one micro-batch at a time, so there a split changes what is learnt, and `auto` never splits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from adasim.config import Config
from adasim.dist.processes import Distributed
from adasim.methods import build_method
from adasim.registry import PAIRS
from adasim.train.footprint import Footprint
from adasim.train.state import TrainState
from adasim.util.errors import UserError
from adasim.util.units import scaled

ROOM = 1.2  # what a step takes, over what is counted: the largest temporary, workspaces, fragments
_MUCH = 0.3  # of the free memory: worth telling
_SURELY = 600  # a step's activations are no more than so many times its views
_CGROUP = Path("/sys/fs/cgroup")  # where Linux tells a container's limits


def choose_micro_batches(config: Config, ranks: Distributed, free: float) -> tuple[int, str | None]:
    """Into how many micro-batches each process cuts its share of a batch, and a sentence if that is news.

    `free` is what `free_bytes` says where it says the least.

    Raises:
        UserError: the wished size does not divide the share, or not even the smallest step would fit.
    """
    share = config.batch_size // ranks.world
    if config.micro_batch != "auto":
        if share % config.micro_batch:
            near = max(n for n in divisors(share) if n <= max(1, config.micro_batch))
            raise UserError(
                f"micro_batch={config.micro_batch} does not divide the {share} images of a batch that a process "
                f"sees. Use --micro-batch {near}."
            )
        if config.micro_batch == 1 < share and has_batch_norm(config):
            raise UserError(
                "micro_batch=1 leaves batch norm nothing to compare an image with. Use 2 or more."
            )
        _check_timing(config, share // config.micro_batch)
        return share // config.micro_batch, None
    if _bytes_of_views(config, share) * _SURELY < free:
        return 1, None
    footprint = Footprint.count(config, device=ranks.device)
    if (needed := ROOM * footprint.training_bytes(share)) <= free:
        if needed <= _MUCH * free:
            return 1, None
        amounts = f"{scaled(needed, 'B')} of the {scaled(free, 'B')} that are free on {ranks.device}"
        less = "--batch-size" if _draws_after_the_forward_pass(config) else "--micro-batch"
        return 1, f"A step of {share} images takes about {amounts}; a smaller {less} takes less."
    fitting = [n for n in divisors(share) if ROOM * footprint.training_bytes(n) <= free]
    amounts = f"needs about {scaled(needed, 'B')} and {scaled(free, 'B')} are free on {ranks.device}"
    too_much = f"A step of {share} images {amounts}"
    if not fitting:
        raise UserError(
            f"{too_much}; one image alone is too much. Use a smaller --model.name or --views.size."
        )
    size = max(fitting)
    if has_batch_norm(config):
        raise UserError(
            f"{too_much}. Use --batch-size {size * ranks.world}; or --micro-batch {size}, which changes what is "
            f"learnt: this network has batch norm, whose statistics then come from {size * ranks.world} images."
        )
    _check_timing(config, share // size)
    return share // size, f"{too_much}: it is done in {share // size} micro-batches of {size}."


@contextmanager
def out_of_memory_in_words(config: Config, state: TrainState) -> Iterator[None]:
    """Turn the device's own error into a sentence with a size that should fit."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; a CPU's allocator has no class of its own
        told = str(error)
        if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in told):
            raise
        images = state.part.images
        smaller = [n for n in divisors(images) if n <= images // 2]
        way_out = f"--micro-batch {max(smaller)}" if smaller else "a smaller --model.name or --views.size"
        if smaller and _draws_after_the_forward_pass(config):
            way_out = "a smaller --batch-size, or --neighbors.timing previous with --micro-batch"
        elif smaller and has_batch_norm(config):
            way_out += " (its batch norms then see fewer images at a time) or a smaller --batch-size"
        raise UserError(
            f"Out of memory in a step of {images} images at once ({told.splitlines()[0][:150]}). Use {way_out}."
        ) from error


def has_batch_norm(config: Config) -> bool:
    """Whether the method's networks have a layer that looks at several images at once."""
    with torch.device("meta"):
        method: nn.Module = build_method(config, config.views.size)
    return any(isinstance(layer, _BatchNorm) and layer.training for layer in method.modules())


def free_bytes(device: torch.device) -> float:
    """What this process may still take: of the device's memory, or of its part of the machine's; inf if unknown."""
    if device.type == "cuda":
        # What torch holds and does not use is this process's to take, too.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + kept)
    if device.type != "cpu":
        return float("inf")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return float("inf")
    for group, limit, used, kind in (
        (_CGROUP, "memory.max", "memory.current", ""),
        (_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),  # version 1
    ):
        try:
            room = int((group / limit).read_text()) - int((group / used).read_text())
            free = min(free, room + _file_bytes(group / "memory.stat", kind))
        except (OSError, ValueError):  # none, or "max"
            continue
    return max(0, free) / max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def divisors(n: int) -> list[int]:
    """Of a whole number, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _file_bytes(stat: Path, kind: str) -> int:
    """The contents of files that a cgroup keeps in memory until it is needed: free, as in MemAvailable."""
    try:
        counts = dict(line.split() for line in stat.read_text().splitlines())
        return int(counts[f"{kind}active_file"]) + int(counts[f"{kind}inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def _bytes_of_views(config: Config, images: int) -> int:
    views = config.views
    return 12 * images * (2 * views.size**2 + views.local_crops * views.local_size**2)


def _draws_after_the_forward_pass(config: Config) -> bool:
    return config.neighbors.timing == "current" and PAIRS[config.pairs].draws_from_memory


def _check_timing(config: Config, count: int) -> None:
    if count > 1 and _draws_after_the_forward_pass(config):
        raise UserError(
            "neighbors.timing=current draws partners after a whole batch's forward pass, so it cannot be done in "
            "micro-batches. Use a smaller --batch-size, or --neighbors.timing previous."
        )
