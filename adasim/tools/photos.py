"""`adasim pretrain photos`: look at the images and at the machine, and propose a run that ends in time.

    adasim pretrain photos --data ~/photos --out runs/photos --hours 2

The run goes on from weights that somebody has trained: those of `--model.init`, or those of `WEIGHTS` that timm can
get. A few real steps are timed, and as many epochs proposed as fit into the time.

From scratch, the settings at the end of this file are tried from the smallest up, and the largest that gets through
enough epochs in the time is proposed. They are sensible, not tuned: nobody knows what your photos need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import timm
import torch

from adasim.config import (
    Config,
    ModelConfig,
    NeighborsConfig,
    OptimConfig,
    SaveConfig,
    ViewsConfig,
)
from adasim.data import ImageSet, describe, leave_out, open_images
from adasim.dist.devices import pick_device
from adasim.dist.processes import Distributed
from adasim.methods import DinoSettings, SimSiamSettings
from adasim.models import build_from, read_weights
from adasim.recipes import for_epochs, from_weights
from adasim.registry import METHODS
from adasim.tools.plan import Line, lines
from adasim.train.budget import Footprint, choose_micro_batches, free_bytes, time_steps
from adasim.util.errors import UserError
from adasim.util.units import duration, scaled

_FEWEST = 16  # images; fewer have no neighbours worth the name
_SPARE = 0.9  # of the time: the rest is for starting, saving and a busy machine
_MOST_EPOCHS = 400
_MOST_HOURS = 10_000

WEIGHTS = {"cpu": "tf_efficientnet_lite0.in1k", "gpu": "vit_small_patch16_224.dino"}
"""What a run goes on from where nobody says: small ones for a CPU, DINO's own for a GPU."""


@dataclass(frozen=True)
class Setting:
    """A model with its method and image size, and how many epochs of it are worth having."""

    name: str
    epochs: int
    build: Callable[[], Config]
    least: int = 4
    """Below so many epochs it is refused: no window of lists would be full in time."""


@dataclass(frozen=True)
class Proposal:
    """A configuration for these images on this machine, and why it is the one."""

    config: Config
    seconds: float
    """What the run will take at the speed that was measured."""
    reasons: list[Line]
    """What, how much, why: the lines of the plan."""
    images: int
    """How many there are."""


Change = Callable[[Config], Config]
"""A setting with the options that somebody typed."""


def propose(
    source: str,
    hours: float = 1.0,
    *,
    device: str = "auto",
    init: str | None = None,
    exclude: str = "",
    change: Change = lambda config: config,
    say: Callable[[str], None] = print,
) -> Proposal:
    """A run on these images that ends in so many hours.

    Args:
        source: the images, as after `--data`.
        hours: how long the run may take.
        device: as in a configuration.
        init: weights to go on from, as after `--model.init`; by default those that timm can get. Without any (""),
            the largest setting from scratch that gets through enough epochs.
        exclude: a file of verdicts, whose rejected images are left out.
        change: makes of each setting that is tried what shall run.
        say: is told what is being tried.

    Raises:
        UserError: too few images, or too many for the time.
    """
    if not 0 < hours < _MOST_HOURS:
        raise UserError(f"hours={hours} must be above 0 and below {_MOST_HOURS:,}.")
    images = leave_out(open_images(source), exclude)
    say(describe(images))
    if len(images) < _FEWEST:
        raise UserError(f"{len(images)} images are too few to learn from; {_FEWEST} are the least.")
    if init is None:
        init = find_weights(device, say)
    settings = [_continued(init)] if init else _SETTINGS[::-1]
    with Distributed.start(device) as ranks:
        if ranks.world > 1:
            raise UserError("`photos` looks and measures in one process. Use another recipe under torchrun.")
        free = free_bytes(ranks.device)
        chosen = _climb(settings, images, source, hours, ranks, free, change, say)
    epochs, speed = chosen.epochs, chosen.speed
    if epochs < chosen.setting.least:
        needed_hours = chosen.setting.least * len(images) / (3600 * _SPARE * speed)
        an_epoch = duration(len(images) / speed)
        as_they_are = f"; or use the weights as they are: adasim explore --backbone {init} --data {source}"
        raise UserError(
            f"{len(images):,} images at {speed:,.3g} images/s take {an_epoch} an epoch; {chosen.setting.least}, "
            f"the least, are too long for {hours:g} h. Give --hours {_rounded_up(needed_hours):g} or more, a smaller "
            f"--views.size, or fewer images{as_they_are if init else ''}."
        )
    config = change(for_epochs(chosen.plain, min(epochs, _MOST_EPOCHS)))
    seconds = config.epochs * len(images) / speed
    plan = lines(config, images, str(ranks.device), free, speed, chosen.at_once)
    return Proposal(config, seconds, plan, len(images))


def find_weights(device: str, say: Callable[[str], None]) -> str:
    """The name of weights that timm can get, from its cache or the network; empty where it cannot."""
    name = WEIGHTS["cpu" if pick_device(device).type == "cpu" else "gpu"]
    with torch.device("meta"):
        size = sum(p.numel() for p in timm.create_model(name, pretrained=False).parameters())
    described = timm.get_pretrained_cfg(name)
    licence = (described and described.license) or "not known"
    say(
        f"Weights to go on from: {name}, trained on ImageNet; {size / 1e6:.1f} million of them, "
        f"{scaled(4 * size, 'B')}, licence {licence}. Others: --model.init; none: --from-scratch."
    )
    try:
        read_weights(name)
    except UserError as error:
        say(f"{error} This run would start from scratch.")
        return ""
    return name


class _Timed(NamedTuple):
    setting: Setting
    plain: Config
    """Fitted to images and machine, without the options that somebody typed."""
    flops: int
    speed: float
    """Images per second."""
    busy: float
    """Seconds of training per image, without waiting for its pixels."""
    epochs: int
    """How many the time allows."""
    at_once: int
    """Images of a micro-batch, or of the batch."""


def _rounded_up(value: float) -> float:
    """To two digits, so that giving what is asked for is enough.

    >>> _rounded_up(0.0312), _rounded_up(12.01)
    (0.032, 13.0)
    """
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return round(math.ceil(value / unit) * unit, 12)


def _climb(
    settings: Sequence[Setting],
    images: ImageSet,
    source: str,
    hours: float,
    ranks: Distributed,
    free: float,
    change: Change,
    say: Callable[[str], None],
) -> _Timed:
    """From the smallest setting up, as long as the time allows enough epochs of it.

    On a CPU, what could not be fast enough even at three times the speed of its arithmetic is not timed at all.
    """
    best: _Timed | None = None
    for setting in settings:
        plain = _fitted(setting.build(), source, len(images), str(ranks.device))
        config = change(plain)
        footprint = Footprint.count(config, device=ranks.device)
        seconds = 3600 * hours * _SPARE
        if best is not None:
            hoped = 3 * best.flops / footprint.flops_per_image / best.busy
            if ranks.device.type == "cpu" and seconds * hoped / len(images) < setting.epochs:
                say(f"{setting.name} would take too long, by its arithmetic.")
                break
        try:
            at_once = config.batch_size // choose_micro_batches(config, ranks, free)[0]
        except UserError:  # it would not fit
            if best is None:
                raise
            say(f"{setting.name} would not fit into memory.")
            break
        say(f"{setting.name}: timing a few steps ...")
        speed, busy = time_steps(config, images, ranks, at_once=at_once)
        epochs = int(seconds * speed / len(images))
        say(f"{setting.name}: {speed:,.3g} images/s, {min(epochs, _MOST_EPOCHS)} epochs in {hours:g} h.")
        if best is not None and epochs < setting.epochs:
            break
        best = _Timed(setting, plain, footprint.flops_per_image, speed, busy, epochs, at_once)
        if epochs < setting.epochs:
            break
    assert best is not None
    return best


def _continued(init: str) -> Setting:
    """Go on from trained weights, with their architecture, size and normalisation."""
    weights = read_weights(init)
    build_from(weights, init)  # says whether they are of that model at all
    assert weights.model is not None
    name = weights.model.name

    def build() -> Config:
        # DINO, since its loss means something before its head has learnt anything: student and teacher begin with the
        # same weights. Its head has no batch norm, so that micro-batches may be small.
        config = Config(
            recipe="photos",
            method="dino",
            batch_size=64,
            precision="bf16",
            views=ViewsConfig(**METHODS["dino"].VIEWS, scale=(0.3, 1.0)),
            model=ModelConfig(drop_path=0.0),
            settings=DinoSettings(
                out_dim=4096,
                hidden_dim=1024,
                norm_last_layer=True,
                teacher_momentum=0.99,
                teacher_temp=0.04,
                teacher_temp_warmup_epochs=0,
            ),
            neighbors=NeighborsConfig(tau=0.1, window=2, k=5),
            optim=OptimConfig(
                name="adamw",
                lr=2e-3,
                min_lr=1e-6,
                warmup_epochs=1,
                weight_decay=0.04,
                weight_decay_end=0.04,
                clip_grad=3.0,
            ),
            save=SaveConfig(log_every=10),
        )
        return from_weights(config, init, weights, encoder_lr=0.5)  # of a rate that is low already

    return Setting(name, 2, build, least=2)


def _fitted(config: Config, source: str, count: int, device: str) -> Config:
    """The setting for so many images: a batch of at most an eighth of them."""
    batch = 1 << max(2, min(config.batch_size, count // 8).bit_length() - 1)
    k = min(config.neighbors.k, count)
    return replace(
        config,
        batch_size=batch,
        device=device,
        data=replace(config.data, source=source),
        neighbors=replace(config.neighbors, k=k),
    )


def _vit() -> Config:
    """ViT-S/16 with the paper's head, temperatures and neighbours, for fewer epochs."""
    return Config(
        recipe="photos",
        method="dino",
        batch_size=256,
        precision="bf16",
        views=ViewsConfig(**METHODS["dino"].VIEWS, size=224, scale=(0.25, 1.0)),
        model=ModelConfig(name="vit_small", patch_size=16, drop_path=0.1),
        settings=DinoSettings(
            out_dim=8192, teacher_momentum=0.99, teacher_temp=0.04, teacher_temp_warmup_epochs=0
        ),
        neighbors=NeighborsConfig(tau=0.2, window=10, k=3),
        optim=OptimConfig(name="adamw", lr=5e-4, min_lr=1e-6, warmup_epochs=10, clip_grad=3.0),
        save=SaveConfig(log_every=10),
    )


def _resnet(name: str, size: int, lr: float) -> Callable[[], Config]:
    def build() -> Config:
        return Config(
            recipe="photos",
            method="simsiam",
            batch_size=256 if size > 64 else 128,
            precision="bf16",
            views=ViewsConfig(
                **METHODS["simsiam"].VIEWS, size=size, scale=(0.2, 1.0), blur=1.0 if size > 64 else 0.0
            ),
            model=ModelConfig(name=name, drop_path=0.0),
            settings=SimSiamSettings(proj_dim=512, pred_dim=128, fix_pred_lr=True),
            neighbors=NeighborsConfig(tau=0.2, window=10, k=5),
            optim=OptimConfig(
                name="sgd",
                lr=lr,
                min_lr=0.0,
                warmup_epochs=5,
                weight_decay=5e-4,
                weight_decay_end=5e-4,
                decay_all=True,
            ),
            save=SaveConfig(log_every=10),
        )

    return build


_SETTINGS = (
    Setting("ViT-S/16 at 224 pixels", 100, _vit),
    Setting("ResNet-50 at 160 pixels", 100, _resnet("resnet50", 160, 0.05)),
    Setting("ResNet-18 at 96 pixels", 80, _resnet("resnet18", 96, 0.1)),
    Setting("a ResNet of four blocks at 64 pixels", 60, _resnet("resnet_tiny", 64, 0.2)),
    Setting("a ResNet of four blocks at 32 pixels", 40, _resnet("resnet_tiny", 32, 0.2)),
)
