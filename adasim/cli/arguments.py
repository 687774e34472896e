"""The options of `adasim eval ...`, one dataclass per evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from adasim.eval.protocols.linear import SWEEP

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""A switch without its `--no-` twin."""


@dataclass(kw_only=True)
class Common:
    """What every evaluation asks."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a backbone.safetensors, or a timm model name."""
    random_weights: Flag = False
    """Measure an untrained model of that name."""
    size: int | None = None
    """Side in pixels of what the encoder sees; its own by default."""
    device: str = "auto"
    """Where the encoder runs: auto, cpu, cuda, ..."""
    workers: int = 2
    """Processes that read images from files."""
    no_cache: Flag = False
    """Make features anew and keep none."""
    results: Path | None = None
    """Where the result is appended; RUN/results.jsonl by default, nowhere for a model that is no run."""
    seed: int = 0
    """Names every random choice: held-out images, order, episodes."""


@dataclass(kw_only=True)
class Sources:
    """Which images: the run's own by default."""

    data: str | None = None
    """A folder, an .npz file, hf:NAME or synthetic[:COUNT]; its train and test split are used. Without a test
    split, a fifth of the images is held out."""
    train: str | None = None
    """Training images, if they are a source of their own."""
    test: str | None = None
    """Test images, if they are a source of their own."""


@dataclass(kw_only=True)
class KnnArguments(Sources, Common):
    """Weighted k-NN vote on frozen features (the paper reports k = 20)."""

    k: tuple[int, ...] | None = None
    """How many neighbours vote; 10, 20, 100 and 200 by default."""


@dataclass(kw_only=True)
class LinearArguments(Sources, Common):
    """One linear layer on frozen features, for several learning rates at once."""

    protocol: Literal["auto", "dino", "simsiam"] = "auto"
    """Whose: SGD over the last blocks' CLS (dino), or LARC over the pooled feature (simsiam). The run's own."""
    quick: Flag = False
    """Train on cached features without augmentation; the default up to 64 pixels."""
    augmented: Flag = False
    """Crop and flip the training images anew in every epoch, as published; the default above 64 pixels."""
    rates: tuple[float, ...] = SWEEP
    """Learning rates per 256 images; where the best is at the edge, further ones are tried."""
    epochs: int | None = None
    """100 (dino) or 90 (simsiam) by default."""
    batch_size: int | None = None
    """1024 (dino) or 4096 (simsiam) by default; 256 below 100,000 training images."""


@dataclass(kw_only=True)
class FewshotArguments(Common):
    """Nearest prototype in random episodes, on one or several data sets."""

    data: tuple[str, ...] = ()
    """Data sets, each with all its splits together; the run's own by default."""
    ways: int = 5
    """Classes of an episode."""
    shots: int = 5
    """Images of a class that make its prototype."""
    queries: int = 15
    """Images of a class that are classified."""
    episodes: int = 600
    per_class: tuple[str, ...] | None = None
    """The unbalanced ones of the data sets (without names: all), where classes bring the queries that they have,
    and count alike."""


@dataclass(kw_only=True)
class SegmentationArguments(Sources, Common):
    """A 1x1 convolution on frozen patch features, scored by mean intersection over union."""

    classes: int | None = None
    """How many classes the masks show; read from the training masks by default (21 for PASCAL VOC)."""
    ignore: tuple[int, ...] = ()
    """Ids of pixels that neither train nor count, beside 255 (11 for CamVid)."""
    blocks: int = 4
    """How many of a ViT's last blocks; a ResNet gives its last feature map."""
    quick: Flag = False
    """Make patch features once, without augmentation, for 10 epochs; the default up to 64 pixels."""
    augmented: Flag = False
    """Flip, turn and scale the training images anew in each of 60 epochs; the default above 64 pixels."""
    epochs: int | None = None
    batch_size: int | None = None
    """16 by default, 64 in quick mode."""
    lr: float | None = None
    """Adam's constant rate: 0.1 by default, 0.01 in quick mode."""


@dataclass(kw_only=True)
class TableArguments:
    """Compare the newest results of several runs; differences to the first run stand in brackets."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """Run folders (or files of results), the baseline first."""
    format: Literal["terminal", "markdown", "latex"] = "terminal"
