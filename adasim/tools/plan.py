"""What a run will need, told before it is started: on this machine and these images, or of any size.

    adasim plan dino-vit-s16 --data ~/photos --batch-size 64
    adasim plan --images 1281167 --dim 384 --ranks 8 --window 50 --k 10 --batch 1024

The first opens the images and times a few steps. Of the second, sizes are sums over the tensors that `ShardedMemory`
allocates and exchanges, byte by byte, not estimates; arithmetic is counted by running the method on tensors without
storage.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from adasim.config import Config, ModelConfig, ViewsConfig
from adasim.data import ImageSet, Unreadable, describe, leave_out, open_images, worker_count
from adasim.dist.processes import Distributed
from adasim.models import build_backbone
from adasim.models.backbone import VITS
from adasim.neighbors.memory import INT8_FROM
from adasim.neighbors.search_gpu import buffer_bytes
from adasim.options import PlanArguments
from adasim.registry import PAIRS
from adasim.train.budget import (
    OVERHEAD,
    Footprint,
    choose_micro_batches,
    encoder_bytes,
    free_bytes,
    snapshot_count,
    time_steps,
)
from adasim.train.state import bytes_on_disk, memory_options
from adasim.util.errors import UserError
from adasim.util.units import duration, scaled

Line = tuple[str, str, str]
"""What, how much, why. A line with a what alone is a heading."""
_ENCODERS = {192: "vit_tiny", 384: "vit_small", 768: "vit_base", 512: "resnet18", 2048: "resnet50"}
_LIST = 8  # bytes of a list's entry: an int32 id and an fp32 similarity
_SMALL_SHARE = 0.2  # of a step's arithmetic that exact search may take before it is called expensive
_LOOKED_AT = 24  # images whose size is looked up
# On 5,000 photographs of CIFAR-10, 200 times each, a small ResNet got well past raw pixels (docs/results.md); on
# 3,068 of clothes it did not (docs/use.md).
_ENOUGH_IMAGES, _ENOUGH_VIEWS = 5_000, 1_000_000


def show(lines: list[Line], console: Console) -> None:
    """Lines as a table. Headings are bold; where there are none, the first column is."""
    headed = any(not value for _, value, _ in lines)
    table = Table(box=None, padding=(0, 2), show_header=False)
    for what, value, why in lines:
        table.add_row(Text(what, "" if headed and value else "bold"), value, Text(why, "dim"))
    console.print(table)


@dataclass(frozen=True)
class Plan:
    """The sizes of a run, in bytes of one rank (of the largest share) and in floating-point operations."""

    images: int
    dim: int
    ranks: int
    window: int
    k: int
    batch: int
    cache: Literal["float16", "float32"] = "float16"
    backbone: str | None = None
    size: int = 224

    def __post_init__(self) -> None:
        for name in ("images", "dim", "ranks", "window", "k", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.images >= 2**31:
            raise UserError(f"images={self.images} must be below 2^31: ids are kept as int32.")
        if self.k > self.images:
            raise UserError(f"k={self.k} is more than the {self.images} images.")
        Distributed(0, self.ranks, torch.device("cpu")).check_batch(self.batch)

    # ---- memory of one rank ----

    @property
    def rows(self) -> int:
        """Rows of the largest share."""
        return -(-self.images // self.ranks)

    @property
    def cache_bytes(self) -> int:
        return self.rows * self.dim * (2 if self.cache == "float16" else 4)

    @property
    def int8_bytes(self) -> int:
        """Codes, and two fp32 bounds per row; small caches have no copy, nor have caches on an accelerator."""
        return self.rows * (self.dim + 8) if self.rows * self.dim >= INT8_FROM else 0

    @property
    def search_bytes(self) -> int:
        """About what a search takes for a moment on an accelerator."""
        return buffer_bytes(self.rows, self.dim, self.batch, self.k)

    @property
    def history_bytes(self) -> int:
        return self.rows * self.window * self.k * _LIST

    @property
    def current_bytes(self) -> int:
        """Lists of one epoch; of a finished one they are a file, written once and kept for w epochs."""
        return self.rows * self.k * _LIST

    @property
    def buffer_bytes(self) -> int:
        """What an observation receives: all queries, this rank's candidates, all merged lists."""
        if self.ranks == 1:
            return 0
        return 4 * self.batch * (self.dim + 1) + 8 * self.k * (self.batch + self.batch)

    @property
    def replicated_bytes(self) -> int:
        """What every rank holds of all images: the epoch's order and partners, int64 each."""
        return 16 * self.images

    # ---- files ----

    @property
    def checkpoint_bytes(self) -> int:
        """The memory's part of one checkpoint, of one rank: cache, lists of the epoch in progress, counters."""
        return self.cache_bytes + self.current_bytes + 9

    # ---- traffic of one rank ----

    @property
    def step_wire_bytes(self) -> int:
        """Received in one `observe`: batch sizes, queries, candidate lists, merged lists."""
        others, part = self.ranks - 1, self.batch // self.ranks
        return others * (8 + part * (4 * (self.dim + 1) + 8 * self.k + 8 * self.k))

    @property
    def epoch_wire_bytes(self) -> int:
        """Received when all partners are drawn."""
        return 4 * (self.ranks - 1) * self.rows

    @property
    def gradient_wire_bytes(self) -> int | None:
        """Received in one step for the average of fp32 gradients, in a ring."""
        if self.training is None:
            return None
        return 2 * (self.ranks - 1) * 4 * self.training.learned // self.ranks

    # ---- arithmetic of one rank ----

    @property
    def search_flops(self) -> int:
        """One observation: all queries against the rank's rows."""
        return 2 * self.batch * self.rows * self.dim

    @cached_property
    def training(self) -> Footprint | None:
        """One DINO step without the memory, in mixed precision, as on the device that a float16 cache suggests."""
        if self.backbone is None:
            return None
        config = Config(
            model=ModelConfig(name=self.backbone),
            views=ViewsConfig(size=self.size),
            precision="fp32" if self.cache == "float32" else "bf16",
        )
        return Footprint.count(config)

    @property
    def training_flops(self) -> int | None:
        """One step without the memory."""
        return None if self.training is None else self.training.flops(self.batch // self.ranks)

    @property
    def search_share(self) -> float | None:
        """The search's part of a step's arithmetic; that of the rows' share is the same for any R."""
        flops = self.training_flops
        return None if flops is None else self.search_flops / (self.search_flops + flops)

    def advice(self) -> list[str]:
        """Sentences a person can act on."""
        words = []
        share = self.search_share
        if share is not None and share <= _SMALL_SHARE:
            words.append(f"Exact search is affordable: {share:.1%} of a step's arithmetic.")
        elif share is not None:
            most = self.images * _SMALL_SHARE / (1 - _SMALL_SHARE) * (1 - share) / share
            words.append(
                f"Exact search would be {share:.0%} of a step's arithmetic (it is linear in the images; "
                f"{_SMALL_SHARE:.0%} is reached at {_count(most)}). adasim has no approximate search: pretrain on "
                f"a subset, or expect the longer step."
            )
        if self.cache == "float32" and self.cache_bytes > 1e9:
            words.append(
                f"--neighbors.cache float16 halves the cache to {_bytes(self.cache_bytes // 2)} per rank."
            )
        if self.history_bytes > 2e9:
            shorter = self.rows * 10 * 3 * _LIST
            words.append(
                f"The history is {_bytes(self.history_bytes)} of main memory per rank; window 10 and k 3, the "
                f"paper's best, need {_bytes(shorter)}. More ranks divide it."
            )
        if self.cache_bytes > 16e9:
            needed = math.ceil(self.cache_bytes * self.ranks / 16e9)
            words.append(f"The cache fits into 16 GB per rank from {needed} ranks on.")
        if self.replicated_bytes > 1e9:
            words.append(
                f"Every process also holds the order and the partners of all images, "
                f"{_bytes(self.replicated_bytes)}; more ranks do not divide that."
            )
        return words


def make_plan(arguments: PlanArguments) -> Plan:
    """The plan of a command line: width from the encoder, or an encoder from the width."""
    a = arguments
    backbone = a.backbone or ("vit_small" if a.dim is None else _ENCODERS.get(a.dim))
    dim = a.dim
    if backbone is not None:
        model = ModelConfig(name=backbone)
        if backbone in VITS and a.size % model.patch_size:
            patch = model.patch_size
            raise UserError(
                f"--size {a.size} is no multiple of {patch}, the side of a patch of {backbone}. Choose --size "
                f"{patch * math.ceil(a.size / patch)}."
            )
        with torch.device("meta"):
            width = build_backbone(model, a.size, student=False).dim
        if dim not in (None, width):
            raise UserError(f"dim={dim} is not the width of {backbone}, {width}. Leave out one of the two.")
        dim = width
    assert dim is not None
    return Plan(a.images, dim, a.ranks, a.window, a.k, a.batch, a.cache, backbone, a.size)


def sizes(plan: Plan) -> list[Line]:
    """The table of a plan."""
    rows, share = f"{plan.rows:,} rows", plan.batch // plan.ranks
    network, training = f"DINO, {plan.backbone}", plan.training
    history = f"main memory: {rows} x {plan.window} epochs x {plan.k} x {_LIST} bytes"
    lines = [
        ("Memory of one rank", "", ""),
        ("feature cache", _bytes(plan.cache_bytes), f"device: {rows} x {plan.dim}, {plan.cache}"),
        ("int8 copy", _bytes(plan.int8_bytes), "on CPUs only: speeds the exact search up"),
        ("history", _bytes(plan.history_bytes), history),
        ("epoch in progress", _bytes(plan.current_bytes), "main memory"),
        ("search buffers", _bytes(plan.search_bytes), "on accelerators, during a step"),
        ("exchange buffers", _bytes(plan.buffer_bytes), "device, during a step"),
        ("order and partners", _bytes(plan.replicated_bytes), "main memory: of all images, on every rank"),
    ]
    if training is not None:
        precision = "fp32" if plan.cache == "float32" else "bf16"
        why = f"device: {network}, {share} images, {precision}: weights, activations"
        lines.append(("training", _bytes(training.training_bytes(share)), why))
    lines += [
        ("Files", "", ""),
        ("checkpoint", _bytes(plan.checkpoint_bytes), "of one rank: cache and epoch in progress"),
        (
            "lists of an epoch",
            _bytes(plan.current_bytes),
            f"of one rank: written once, {plan.window} are kept",
        ),
    ]
    if training is not None:
        lines.append(("weights", _bytes(training.checkpoint_bytes), f"{network}: both networks, moments"))
    lines += [
        ("Received by one rank", "", ""),
        ("neighbours, per step", _bytes(plan.step_wire_bytes), "queries, candidates, merged lists"),
    ]
    if plan.gradient_wire_bytes is not None:
        lines.append(("gradients, per step", _bytes(plan.gradient_wire_bytes), "fp32, for comparison"))
    lines += [
        ("partners, per epoch", _bytes(plan.epoch_wire_bytes), "int32"),
        ("Arithmetic of one rank, per step", "", ""),
        ("exact search", scaled(plan.search_flops, "FLOP"), f"{plan.batch} queries x {rows} x {plan.dim}"),
    ]
    if plan.training_flops is not None:
        why = f"{network}, {share} images of {plan.size} pixels, two views"
        lines.append(("training", scaled(plan.training_flops, "FLOP"), why))
        lines.append(("search / both", f"{plan.search_share:.1%}", ""))
    return lines


def show_plan(plan: Plan, console: Console) -> None:
    """The plan as a table, and its advice."""
    show(sizes(plan), console)
    console.print()
    for sentence in plan.advice():
        console.print(f"- {sentence}", soft_wrap=True)


def forecast(config: Config, console: Console) -> None:
    """Open the images, count what a step needs, time a few steps, and show all of it as a table."""
    with Distributed.start(config.device) as ranks:
        if ranks.world > 1:
            raise UserError(
                "`adasim plan RECIPE` measures in one process. Start it without torchrun or srun."
            )
        images = leave_out(open_images(config.data.source, size=config.views.size), config.data.exclude)
        config.check(len(images), images.labels is not None)
        console.print(describe(images), soft_wrap=True)
        free = free_bytes(ranks.device)
        count, note = choose_micro_batches(config, ranks, free)
        at_once = config.batch_size // count
        if note:
            console.print(note, soft_wrap=True)
        console.print("Timing a few steps ...")
        speed = time_steps(config, images, ranks, at_once=at_once).images_per_second
    console.print()
    show(lines(config, images, str(ranks.device), free, speed, at_once), console)
    if told := warning(config, len(images)):
        console.print(told, soft_wrap=True)


def warning(config: Config, images: int) -> str | None:
    """A sentence where the encoder will probably be no better than raw pixels."""
    drawn = config.data.source.startswith("synthetic")
    if config.model.init or drawn or (images >= _ENOUGH_IMAGES and images * config.epochs >= _ENOUGH_VIEWS):
        return None
    return (
        f"{images:,} images, {config.epochs} times each, are little to learn from: the encoder will hardly be better "
        f"than raw pixels. Go on from trained weights instead (--model.init, see docs/use.md), or use such "
        f"weights as they are: adasim explore --backbone NAME --data {config.data.source}"
    )


def lines(
    config: Config, images: ImageSet, device: str, free: float, speed: float, at_once: int
) -> list[Line]:
    """The table of a run that takes `at_once` images through the network at a time, at a measured speed."""
    footprint = Footprint.count(config, device=torch.device(device))
    epoch = len(images) / speed
    readers = worker_count(config.data.workers)
    read_by = f"read by {readers} process{'' if readers == 1 else 'es'}"
    told: list[Line] = [
        ("images", f"{len(images):,}", f"about {median_size(images)} pixels; {read_by}"),
        ("machine", device, f"{os.cpu_count()} cores, {_bytes(free)} of memory free"),
        (
            "model",
            f"{config.model.name} at {config.views.size} pixels",
            f"{config.method}, from {config.model.init or 'scratch'}",
        ),
        (
            "batch",
            str(config.batch_size),
            f"{at_once} at once, which takes about {_bytes(OVERHEAD * footprint.training_bytes(at_once))}",
        ),
        ("speed", f"{speed:,.3g} images/s", f"measured; {duration(epoch)} an epoch"),
        ("epochs", str(config.epochs), f"{duration(config.epochs * epoch)} in all"),
    ]
    with torch.device("meta"):
        backbone = build_backbone(config.model, config.views.size, student=False)
    width, snapshots = backbone.dim, snapshot_count(config)
    keep, weights = config.save.keep, footprint.checkpoint_bytes
    one, history = bytes_on_disk(weights, width)
    options = memory_options(config)
    if options is not None:
        on_cpu = torch.device(device).type == "cpu"
        cache = config.neighbors.cache
        dtype = cache if cache != "auto" else "float32" if on_cpu else "float16"
        plan = Plan(len(images), width, 1, options["window"], options["k"], config.batch_size, dtype)
        held = plan.cache_bytes + plan.history_bytes + (plan.int8_bytes if on_cpu else 0)
        what, words = f"w = {options['window']}, K = {options['k']}", _bytes(held)
        if PAIRS[config.pairs].draws_from_memory:
            first = options["window"] + 1
            if config.pairs == "adasim" and config.neighbors.timing == "previous":
                first = max(
                    first, 3
                )  # no image is in its own list of epoch 1, and so the gate is shut after it
            epochs = config.epochs
            words += (
                f"; partners are drawn from epoch {first} on"
                if first <= epochs
                else "; too few epochs for partners"
            )
        told.append(("neighbours", what, words))
        memory = plan.checkpoint_bytes
        one, history = bytes_on_disk(weights, width, memory, plan.current_bytes, options["window"], keep)
    disk = keep * one + history + snapshots * encoder_bytes(backbone)
    what = f"{keep} checkpoints" + (f", {snapshots} encoders" if snapshots else "")
    told.append(("disk", f"about {_bytes(disk)}", what))
    return told


def median_size(images: ImageSet) -> str:
    """Of the median image of a few, by number of pixels."""
    shapes = []
    for i in range(0, len(images), max(1, len(images) // _LOOKED_AT)):
        try:
            shapes.append(tuple(images.load(i).shape[-2:]))
        except Unreadable:
            continue
    if not shapes:
        return "unknown"
    height, width = sorted(shapes, key=math.prod)[len(shapes) // 2]
    return f"{width} x {height}"


def _bytes(count: float) -> str:
    return scaled(count, "B")


def _count(count: float) -> str:
    return f"{count / 1e6:,.0f} million" if count >= 1e6 else f"{count:,.0f}"
