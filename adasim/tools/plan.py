"""What a run will need, told before it is started; and `photos`, which proposes a run that ends in time.

    adasim plan dino-vit-s16 --data ~/photos --batch-size 64                 this machine and these images
    adasim plan --images 1281167 --dim 384 --ranks 8 --window 50 --k 10      a run of any size
    adasim pretrain photos --data ~/photos --out runs/photos --hours 2       a proposal

The first and the last open the images and time a few steps. Of the second, sizes are sums over the tensors that
`ShardedMemory` allocates and exchanges, byte by byte; arithmetic is counted on tensors without storage.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import timm
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from adasim.config import Config, ModelConfig, NeighborsConfig, OptimConfig, SaveConfig, ViewsConfig
from adasim.data import ImageSet, Unreadable, describe, leave_out, open_images, with_verdicts, worker_count
from adasim.dist.devices import pick_device
from adasim.dist.processes import Distributed
from adasim.methods import DinoSettings, SimSiamSettings
from adasim.models import build_backbone, build_from, read_weights
from adasim.models.backbone import check_patches
from adasim.neighbors.memory import INT8_FROM
from adasim.neighbors.search_gpu import buffer_bytes
from adasim.options import PlanArguments
from adasim.recipes import for_epochs, from_weights, sgd
from adasim.registry import METHODS, PAIRS
from adasim.train.budget import (
    OVERHEAD,
    Footprint,
    Speed,
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
"""What, how much, why."""


def show(lines: list[Line], console: Console) -> None:
    """Lines as a table."""
    table = Table(box=None, padding=(0, 2), show_header=False)
    for what, value, why in lines:
        table.add_row(Text(what, "bold"), value, Text(why, "dim"))
    console.print(table)


# ---- a run of any size ----

_ENCODERS = {192: "vit_tiny", 384: "vit_small", 768: "vit_base", 512: "resnet18", 2048: "resnet50"}
_SMALL_SHARE = 0.2  # of a step's arithmetic that exact search may take before it is called expensive


@dataclass
class Plan:
    """The sizes of a run (N, D, R, w, K and B of docs/scale.md), in bytes of one rank and in operations.

    `backbone` and `size` are of the training step that the search is compared with.
    """

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
        images, dim, ranks, k, batch = self.images, self.dim, self.ranks, self.k, self.batch
        if images >= 2**31:
            raise UserError(f"images={images} must be below 2^31: ids are kept as int32.")
        if k > images:
            raise UserError(f"k={k} is more than the {images} images.")
        Distributed(0, ranks, torch.device("cpu")).check_batch(batch)
        self.rows = -(-images // ranks)  # of the largest share
        self.cache_bytes = self.rows * dim * (2 if self.cache == "float16" else 4)
        # On CPUs, and not of small caches: codes, and two fp32 bounds per row.
        self.int8_bytes = self.rows * (dim + 8) if self.rows * dim >= INT8_FROM else 0
        self.epoch_bytes = self.rows * k * 8  # lists of one epoch: an int32 id and an fp32 similarity each
        self.history_bytes = self.window * self.epoch_bytes
        # Cache, lists of the epoch in progress, counters. Those of a finished epoch are a file, written once.
        self.checkpoint_bytes = self.cache_bytes + self.epoch_bytes + 9
        # Received in one `observe`: batch sizes, queries, candidate lists, merged lists.
        self.step_wire_bytes = (ranks - 1) * (8 + batch // ranks * (4 * (dim + 1) + 2 * 8 * k))
        self.search_flops = 2 * batch * self.rows * dim  # all queries against the rank's rows

    @cached_property
    def training(self) -> Footprint | None:
        """One DINO step without the memory, in mixed precision, as on the device that a float16 cache suggests."""
        if self.backbone is None:
            return None
        model, views = ModelConfig(name=self.backbone), ViewsConfig(size=self.size)
        precision: Any = "fp32" if self.cache == "float32" else "bf16"
        return Footprint.count(Config(model=model, views=views, precision=precision))

    @property
    def search_share(self) -> float | None:
        """The search's part of a step's arithmetic; that of the rows' share is the same for any R."""
        if self.training is None:
            return None
        return self.search_flops / (self.search_flops + self.training.flops(self.batch // self.ranks))

    def lines(self) -> list[Line]:
        rows, share = f"{self.rows:,} rows", self.batch // self.ranks
        lists = f"{rows} x {self.window} epochs x {self.k} x 8 bytes"
        buffers = buffer_bytes(self.rows, self.dim, self.batch, self.k)
        sizes = {
            "feature cache": (self.cache_bytes, f"device: {rows} x {self.dim}, {self.cache}"),
            "int8 copy": (self.int8_bytes, "on CPUs only: speeds the exact search up"),
            "search buffers": (buffers, "on accelerators, for a moment"),
            "history": (self.history_bytes, f"main memory: {lists}"),
            "order and partners": (16 * self.images, "main memory: of all images, on every rank"),
            "checkpoint": (self.checkpoint_bytes, "on disk, without weights; beside it the history, once"),
            "received per step": (self.step_wire_bytes, "queries, candidates, merged lists"),
        }
        lines = [(what, _bytes(size), why) for what, (size, why) in sizes.items()]
        counted = f"{self.batch} queries x {rows} x {self.dim}"
        lines.append(("search per step", scaled(self.search_flops, "FLOP"), counted))
        if self.training is not None:
            words = f"DINO, {self.backbone}, {share} images of {self.size} pixels, two views"
            size, flops = self.training.training_bytes(share), self.training.flops(share)
            part = f"the search is {self.search_share:.1%} of both"
            lines.append(("training", _bytes(size), f"device: {words}"))
            lines.append(("training per step", scaled(flops, "FLOP"), part))
        return lines

    def advice(self) -> str:
        """A sentence on the exact search."""
        share = self.search_share
        if share is None:
            return f"No encoder of width {self.dim} is known here to compare the search with."
        if share <= _SMALL_SHARE:
            return f"Exact search is affordable: {share:.1%} of a step's arithmetic."
        most = self.images * _SMALL_SHARE / (1 - _SMALL_SHARE) * (1 - share) / share
        return (
            f"Exact search would be {share:.0%} of a step's arithmetic ({_SMALL_SHARE:.0%} is reached at {most:,.0f} "
            f"images), and adasim has no approximate one: pretrain on a subset, or expect the longer step."
        )


def make_plan(a: PlanArguments) -> Plan:
    """The plan of a command line: width from the encoder, or an encoder from the width."""
    backbone, dim = a.backbone or ("vit_small" if a.dim is None else _ENCODERS.get(a.dim)), a.dim
    if backbone is not None:
        model = ModelConfig(name=backbone)
        check_patches(model, "size", a.size)
        with torch.device("meta"):
            width = build_backbone(model, a.size, student=False).dim
        if dim not in (None, width):
            raise UserError(f"dim={dim} is not the width of {backbone}, {width}. Leave out one of the two.")
        dim = width
    assert dim is not None
    return Plan(a.images, dim, a.ranks, a.window, a.k, a.batch, a.cache, backbone, a.size)


# ---- a recipe on these images and this machine ----

# On 5,000 photographs of CIFAR-10, 200 times each, a small ResNet got well past raw pixels (docs/results.md); on
# 3,068 of clothes it did not (docs/use.md).
_ENOUGH_IMAGES, _ENOUGH_VIEWS = 5_000, 1_000_000


def forecast(config: Config, console: Console) -> None:
    """Open the images, count what a step needs, time a few steps, and show all of it as a table."""
    with Distributed.start(config.device) as ranks:
        if ranks.world > 1:
            raise UserError(
                "`adasim plan RECIPE` measures in one process. Start it without torchrun or srun."
            )
        images = with_verdicts(open_images(config.data.source, size=config.views.size), config.data)
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
    if sentence := warning(config, len(images)):
        console.print(sentence, soft_wrap=True)


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
    at_once_bytes = OVERHEAD * footprint.training_bytes(at_once)
    epoch, readers, size = len(images) / speed, worker_count(config.data.workers), config.views.size
    with torch.device("meta"):
        backbone = build_backbone(config.model, size, student=False)
    start = config.model.init or "scratch"
    table = [
        ("images", f"{len(images):,}", f"about {median_size(images)} pixels; processes that read: {readers}"),
        ("machine", device, f"{os.cpu_count()} cores, {_bytes(free)} of memory free"),
        ("model", f"{config.model.name} at {size} pixels", f"{config.method}, from {start}"),
        ("batch", str(config.batch_size), f"{at_once} at once, which takes about {_bytes(at_once_bytes)}"),
        ("speed", f"{speed:,.3g} images/s", f"measured; {duration(epoch)} an epoch"),
        ("epochs", str(config.epochs), f"{duration(config.epochs * epoch)} in all"),
    ]
    keep, encoders = config.save.keep, snapshot_count(config)
    kept_lists: tuple[int, ...] = ()  # what a checkpoint needs of the memory
    if (options := memory_options(config)) is not None:
        on_cpu, window, k = torch.device(device).type == "cpu", options["window"], options["k"]
        cache = config.neighbors.cache
        dtype = cache if cache != "auto" else "float32" if on_cpu else "float16"
        plan = Plan(len(images), backbone.dim, 1, window, k, config.batch_size, dtype)
        words = _bytes(plan.cache_bytes + plan.history_bytes + (plan.int8_bytes if on_cpu else 0))
        if PAIRS[config.pairs].draws_from_memory:
            first = window + 1
            if config.pairs == "adasim" and config.neighbors.timing == "previous":
                first = max(first, 3)  # no image is in its own list of epoch 1, so the gate is shut after it
            drawn = f"partners are drawn from epoch {first} on"
            words += f"; {drawn if first <= config.epochs else 'too few epochs for partners'}"
        table.append(("neighbours", f"w = {window}, K = {k}", words))
        kept_lists = (plan.checkpoint_bytes, plan.epoch_bytes, window, keep)
    one, history = bytes_on_disk(footprint.checkpoint_bytes, backbone.dim, *kept_lists)
    disk = keep * one + history + encoders * encoder_bytes(backbone)
    kept = f"{keep} checkpoints" + (f", {encoders} encoders" if encoders else "")
    return [*table, ("disk", f"about {_bytes(disk)}", kept)]


def median_size(images: ImageSet) -> str:
    """Of the median image of some 24, by number of pixels."""
    shapes = []
    for i in range(0, len(images), max(1, len(images) // 24)):
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


# ---- photos: a run that ends in time ----

_FEWEST = 16  # images; fewer have no neighbours worth the name
_SPARE = 0.9  # of the time: the rest is for starting, saving and a busy machine
_MOST_EPOCHS = 400
_MOST_HOURS = 10_000
WEIGHTS = {"cpu": "tf_efficientnet_lite0.in1k", "gpu": "vit_small_patch16_224.dino"}
"""What a run goes on from where nobody says: small ones for a CPU, DINO's own for a GPU."""


class Setting(NamedTuple):
    """A model with its method and image size. Fewer epochs than `epochs` are not worth having."""

    name: str
    epochs: int
    config: Config


class Proposal(NamedTuple):
    """A configuration for so many images on this machine, the seconds it will take, and the table of the plan."""

    config: Config
    seconds: float
    lines: list[Line]
    images: int


def propose(
    source: str,
    hours: float = 1.0,
    *,
    device: str = "auto",
    init: str | None = None,
    exclude: str = "",
    change: Callable[[Config], Config] = lambda config: config,
    say: Callable[[str], None] = print,
) -> Proposal:
    """A run on these images that ends in so many hours: from trained weights, or from scratch the largest of
    `from_scratch` that gets through enough epochs. Those are tried from the smallest up.

    Args:
        source: the images, as after `--data`.
        init: weights to go on from, as after `--model.init`; "" for none, None for those that timm can get.
        exclude: a file of verdicts, whose rejected images are left out.
        change: puts the options that somebody typed into each setting that is tried.
        say: is told what is being tried.

    Raises:
        UserError: too few images, or too many for the time.
    """
    if not 0 < hours < _MOST_HOURS:
        raise UserError(f"hours={hours} must be above 0 and below {_MOST_HOURS:,}.")
    images = leave_out(open_images(source), exclude)
    count, seconds = len(images), 3600 * hours * _SPARE
    say(describe(images))
    if count < _FEWEST:
        raise UserError(f"{count} images are too few to learn from; {_FEWEST} are the least.")
    if init is None:
        init = find_weights(device, say)
    with Distributed.start(device) as ranks:
        if ranks.world > 1:
            raise UserError("`photos` looks and measures in one process. Use another recipe under torchrun.")
        on, free = ranks.device, free_bytes(ranks.device)
        chosen: tuple[Config, int, Speed, int, int] | None = None
        for setting in [continued(init)] if init else from_scratch():
            plain = _fitted(setting.config, source, count, str(on))
            config = change(plain)
            flops = Footprint.count(config, device=on).flops_per_image
            if chosen is not None and on.type == "cpu":
                # The arithmetic would have to be three times as fast as that of the smaller one: not even timed.
                _, smaller_flops, smaller, _, _ = chosen
                if seconds * 3 * smaller_flops / flops / smaller.busy / count < setting.epochs:
                    say(f"{setting.name} would take too long, by its arithmetic.")
                    break
            try:
                at_once = config.batch_size // choose_micro_batches(config, ranks, free)[0]
            except UserError:
                if chosen is None:
                    raise
                say(f"{setting.name} would not fit into memory.")
                break
            say(f"{setting.name}: timing a few steps ...")
            speed = time_steps(config, images, ranks, at_once=at_once)
            epochs = min(_MOST_EPOCHS, int(seconds * speed.images_per_second / count))
            say(f"{setting.name}: {speed.images_per_second:,.3g} images/s, {epochs} epochs in {hours:g} h.")
            if chosen is None or epochs >= setting.epochs:
                chosen = plain, flops, speed, epochs, at_once
            if epochs < setting.epochs:
                break
    assert chosen is not None
    plain, _, speed, epochs, at_once = chosen
    per_second = speed.images_per_second
    least = 2 if init else 4  # with fewer, no window of lists would be full in time
    if epochs < least:
        needed = math.ceil(100 * least * count / (3600 * _SPARE * per_second)) / 100
        as_they_are = f"; or use the weights as they are: adasim explore --backbone {init} --data {source}"
        raise UserError(
            f"{count:,} images at {per_second:,.3g} images/s take {duration(count / per_second)} an epoch; "
            f"{least}, the least, are too long for {hours:g} h. Give --hours {needed:g} or more, a smaller "
            f"--views.size, or fewer images{as_they_are if init else ''}."
        )
    config = change(for_epochs(plain, epochs))
    table = lines(config, images, str(on), free, per_second, at_once)
    return Proposal(config, config.epochs * count / per_second, table, count)


def find_weights(device: str, say: Callable[[str], None]) -> str:
    """The name of weights that timm can get, from its cache or the network; empty where it cannot."""
    name = WEIGHTS["cpu" if pick_device(device).type == "cpu" else "gpu"]
    with torch.device("meta"):
        size = sum(p.numel() for p in timm.create_model(name, pretrained=False).parameters())
    described = timm.get_pretrained_cfg(name)
    licence = (described and described.license) or "not known"
    say(
        f"Weights to go on from: {name}, trained on ImageNet; {size / 1e6:.1f} million of them, "
        f"{_bytes(4 * size)}, licence {licence}. Others: --model.init; none: --from-scratch."
    )
    try:
        read_weights(name)
    except UserError as error:
        say(f"{error} This run would start from scratch.")
        return ""
    return name


def _fitted(config: Config, source: str, count: int, device: str) -> Config:
    """The setting for so many images: a batch of at most an eighth of them."""
    return replace(
        config,
        batch_size=1 << max(2, min(config.batch_size, count // 8).bit_length() - 1),
        device=device,
        data=replace(config.data, source=source),
        neighbors=replace(config.neighbors, k=min(config.neighbors.k, count)),
    )


def continued(init: str) -> Setting:
    """Go on from trained weights, with their architecture, size and normalisation.

    By DINO, since its loss means something before its head has learnt anything: student and teacher begin with the
    same weights. Its head has no batch norm, so that micro-batches may be small.
    """
    weights = read_weights(init)
    build_from(weights, init)  # says whether they are of that model at all
    assert weights.model is not None
    config = _photos(
        "dino",
        batch_size=64,
        views={"scale": (0.3, 1.0)},
        model=ModelConfig(drop_path=0.0),
        settings=DinoSettings(out_dim=4096, hidden_dim=1024, norm_last_layer=True, **_TEACHER),
        neighbors=NeighborsConfig(tau=0.1, window=2, k=5),
        optim=OptimConfig(lr=2e-3, min_lr=1e-6, warmup_epochs=1, weight_decay_end=0.04, clip_grad=3.0),
    )
    # The encoder's rate is half of one that is low already.
    return Setting(weights.model.name, 2, from_weights(config, init, weights, encoder_lr=0.5))


def from_scratch() -> list[Setting]:
    """From the smallest up. They are sensible, not tuned: nobody knows what your photos need."""
    vit = _photos(  # the paper's head, temperatures and neighbours, for fewer epochs
        "dino",
        batch_size=256,
        views={"size": 224, "scale": (0.25, 1.0)},
        model=ModelConfig(name="vit_small", patch_size=16, drop_path=0.1),
        settings=DinoSettings(out_dim=8192, **_TEACHER),
        neighbors=NeighborsConfig(tau=0.2, window=10, k=3),
        optim=OptimConfig(lr=5e-4, min_lr=1e-6, warmup_epochs=10, clip_grad=3.0),
    )
    return [
        Setting("a ResNet of four blocks at 32 pixels", 40, _resnet("resnet_tiny", 32, 0.2)),
        Setting("a ResNet of four blocks at 64 pixels", 60, _resnet("resnet_tiny", 64, 0.2)),
        Setting("ResNet-18 at 96 pixels", 80, _resnet("resnet18", 96, 0.1)),
        Setting("ResNet-50 at 160 pixels", 100, _resnet("resnet50", 160, 0.05)),
        Setting("ViT-S/16 at 224 pixels", 100, vit),
    ]


_TEACHER: dict[str, Any] = {"teacher_momentum": 0.99, "teacher_temp": 0.04, "teacher_temp_warmup_epochs": 0}


def _resnet(name: str, size: int, lr: float) -> Config:
    large = size > 64
    return _photos(
        "simsiam",
        batch_size=256 if large else 128,
        views={"size": size, "scale": (0.2, 1.0), "blur": 1.0 if large else 0.0},
        model=ModelConfig(name=name, drop_path=0.0),
        settings=SimSiamSettings(proj_dim=512, pred_dim=128, fix_pred_lr=True),
        neighbors=NeighborsConfig(tau=0.2, window=10, k=5),
        optim=sgd(lr=lr, weight_decay=5e-4, min_lr=0.0, warmup_epochs=5, decay_all=True),
    )


def _photos(method: str, *, views: dict[str, Any], **settings: Any) -> Config:
    """What all proposals have in common."""
    settings["views"] = ViewsConfig(**METHODS[method].VIEWS | views)
    settings["save"] = SaveConfig(log_every=10)
    return Config(recipe="photos", method=method, precision="bf16", **settings)
