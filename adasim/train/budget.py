"""What a run takes, told before it is started: memory and operations of a step, its speed here, and disk.

A step is counted without being run, on tensors that have a shape and no storage:

    footprint = Footprint.count(config)
    footprint.flops(128), footprint.activation_bytes(128)

Activations are what autograd keeps between forward and backward: each storage once, weights left out. A device needs
more (the largest temporary, workspaces, fragments): `OVERHEAD`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from adasim.config import Config, DataConfig
from adasim.data import ImageSet
from adasim.dist.collectives import without_others
from adasim.dist.devices import working_precision
from adasim.dist.processes import Distributed
from adasim.methods import build_method
from adasim.methods.base import draws_within_the_step
from adasim.train.loop import forward, learn
from adasim.train.state import TrainState, batch_norms, build_loader, build_state, weight_bytes
from adasim.util.errors import UserError
from adasim.util.units import scaled

OVERHEAD = 1.2
"""What a step takes, over what is counted."""
_WORTH_TELLING = 0.3  # of the free memory
_ACTIVATIONS_PER_VIEW = 600  # activations are at most so many times the views; then nothing need be counted
_FEW, _MORE = 4, 8  # images of the two steps that a line is drawn through; batch norm needs two
_CGROUP = Path("/sys/fs/cgroup")  # where Linux tells a container's limits


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
        few, more = (_saved_bytes(method, config, images, channels) for images in (_FEW, _MORE))
    per_image = (more - few) // (_MORE - _FEW)
    flops = counter.get_total_flops() // _FEW
    return Footprint(flops, learned, weights, per_image, few - _FEW * per_image)


def _views(config: Config, images: int, channels: int) -> list[Tensor]:
    views = config.views
    sizes = [views.size] * 2 + [views.local_side] * views.local_crops
    return [torch.empty(images, channels, size, size) for size in sizes]


def _saved_bytes(method: nn.Module, config: Config, images: int, channels: int) -> int:
    """What autograd keeps of one forward pass: each storage once, the weights' own left out."""
    saved: dict[int, tuple[int, object]] = {}  # a storage is held on to, lest its address be used again
    weights = {x.untyped_storage()._cdata for x in [*method.parameters(), *method.buffers()]}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes(), storage
        return x

    mixed = torch.autocast("cpu", torch.bfloat16, enabled=config.precision in ("bf16", "fp16"))
    with mixed, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        method(_views(config, images, channels), 0)
    return sum(size for size, _ in saved.values())


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
    views = config.views
    pixels = 2 * views.size**2 + views.local_crops * views.local_side**2
    if 12 * share * pixels * _ACTIVATIONS_PER_VIEW < free:
        return 1, None
    footprint = Footprint.count(config, device=ranks.device)
    needed = OVERHEAD * footprint.training_bytes(share)
    if needed <= _WORTH_TELLING * free:
        return 1, None
    amount, left = scaled(needed, "B"), scaled(free, "B")
    if needed <= free:
        less = "--batch-size" if draws_within_the_step(config) else "--micro-batch"
        amounts = f"{amount} of the {left} that are free on {ranks.device}"
        return 1, f"A step of {share} images takes about {amounts}; a smaller {less} takes less."
    too_much = f"A step of {share} images needs about {amount} and {left} are free on {ranks.device}"
    fitting = [n for n in divisors(share) if OVERHEAD * footprint.training_bytes(n) <= free]
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
        reason = str(error)
        if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in reason):
            raise
        images = state.part.images
        smaller = [n for n in divisors(images) if n <= images // 2]
        way_out = f"--micro-batch {max(smaller)}" if smaller else "a smaller --model.name or --views.size"
        if smaller and draws_within_the_step(config):
            way_out = "a smaller --batch-size, or --neighbors.timing previous with --micro-batch"
        elif smaller and has_batch_norm(config):
            way_out += " (its batch norms then see fewer images at a time) or a smaller --batch-size"
        raise UserError(
            f"Out of memory in a step of {images} images at once ({reason.splitlines()[0][:150]}). Use {way_out}."
        ) from error


def has_batch_norm(config: Config) -> bool:
    """Whether the method's networks have a layer that looks at several images at once."""
    with torch.device("meta"):
        return bool(batch_norms(build_method(config, config.views.size)))


def free_bytes(device: torch.device) -> float:
    """What this process may still take: of the device's memory, or of its part of the machine's; inf if unknown."""
    if device.type == "cuda":
        # What torch holds and does not use is this process's to take, too.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    if device.type != "cpu" or not os.path.exists("/proc/meminfo"):
        return math.inf
    free = 1024.0 * _numbers("/proc/meminfo")["MemAvailable:"]
    with suppress(OSError, ValueError, KeyError):  # no limit: "max"
        left = int((_CGROUP / "memory.max").read_text()) - int((_CGROUP / "memory.current").read_text())
        cached = _numbers(_CGROUP / "memory.stat")  # contents of files are kept until memory is needed
        free = min(free, left + cached["active_file"] + cached["inactive_file"])
    return max(0, free) / max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def _numbers(file: str | Path) -> dict[str, int]:
    """Lines of a name and a number."""
    return {name: int(number) for name, number, *_ in map(str.split, Path(file).read_text().splitlines())}


def divisors(n: int) -> list[int]:
    """Divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _check_timing(config: Config, count: int) -> None:
    if count > 1 and draws_within_the_step(config):
        raise UserError(
            "neighbors.timing=current draws partners after a whole batch's forward pass, so it cannot be done in "
            "micro-batches. Use a smaller --batch-size, or --neighbors.timing previous."
        )


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
    epochs = (loader.epoch(number, themselves) for number in itertools.count())
    try:
        for batch in itertools.chain.from_iterable(epochs):
            ready = time.perf_counter()
            step = forward(state, ddp, batch.views)
            learn(state, step.loss, config, loader.steps_per_epoch)
            if state.memory is not None:
                state.memory.observe(batch.ids, step.feature)
            float(step.loss.detach())  # waits for the device
            now = time.perf_counter()
            if not started:
                started = now
                continue
            steps += 1
            busy += now - ready
            if steps >= 2 and now - started > seconds:
                break
    finally:
        loader.close()
    trained = steps * config.batch_size
    return Speed(trained / (now - started), busy / trained)


def disk_needed(state: TrainState, config: Config, path: Path, ranks: Distributed) -> str:
    """How much disk the run will take, in a sentence. All ranks ask together.

    Raises:
        UserError: not even one checkpoint fits; on all ranks.
    """
    keep = config.save.keep
    one, history = state.bytes_on_disk(ranks, keep)
    encoder, count = encoder_bytes(state.method.eval_encoder), snapshot_count(config)
    total = keep * one + history + count * encoder
    lists = f", plus neighbour lists of {scaled(history, 'B')}" if history else ""
    lists += f", plus {count} encoders of {scaled(encoder, 'B')}" if count else ""
    sentence = (
        f"Checkpoints: {scaled(one, 'B')} each, {keep} kept{lists}: about {scaled(total, 'B')} in {path}."
    )
    there = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
    size, _, free = shutil.disk_usage(there)
    known = size > 0  # some network and FUSE mounts do not say
    # What an earlier process of the run has written does not count twice; nor does a run that is to be overwritten.
    written = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    with ranks.raise_on_all():
        # This run's own checkpoints make no room: they are deleted after the next one is written.
        if ranks.is_main and known and one > free + (0 if state.step else written):
            otherwise = ", then resume" if state.step else ", or choose another --out"
            raise UserError(
                f"Only {scaled(free, 'B')} are free in {there}, and one checkpoint takes {scaled(one, 'B')}: nothing "
                f"could be saved. Make room there{otherwise}."
            )
    # One more checkpoint while a save is under way.
    needed = total + one - written
    return sentence if needed <= free or not known else f"{sentence} Only {scaled(free, 'B')} are free there."


def encoder_bytes(backbone: nn.Module) -> int:
    """Of one snapshot."""
    return sum(tensor.nbytes for tensor in backbone.state_dict().values())


def snapshot_count(config: Config) -> int:
    """How many encoders of earlier epochs a run keeps."""
    return config.epochs // config.save.encoder_every if config.save.encoder_every else 0
