"""What people may say about evaluations, explorations and plans, on the command line and in Python.

Like the settings of a run (config.py, settings.py) these stand apart from what they are options of, which needs
torch: what is wrong with a command is said before that is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from adasim.util.errors import UserError
from adasim.util.fields import check_temperature

SWEEP = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Learning rates per 256 images that span what frozen features of either method ask for."""
TAU = 0.2
"""Temperature of p_win where nobody says another: the paper's."""

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""A switch without its `--no-` twin."""


@dataclass(kw_only=True)
class Options:
    """What every evaluation asks."""

    random_weights: Flag = False
    """Measure an untrained model of that name."""
    size: int | None = None
    """Side in pixels of what the encoder sees; its own by default."""
    device: str = "auto"
    """Where the encoder runs: auto, cpu, cuda, ..."""
    workers: int | Literal["auto"] = "auto"
    """Loader processes that read images from files; auto: this process's share of the cores less one, at most 16."""
    no_cache: Flag = False
    """Make features anew and keep none."""
    exclude: Path | None = None
    """Leave out the images that this file rejects: verdicts exported from the page of `adasim explore`."""
    results: Path | None = None
    """Where the result is appended; RUN/results.jsonl by default, nowhere for a model that is no run."""
    seed: int = 0
    """Random seed: of held-out images, order, episodes."""


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


def with_options(kind: type[Any], *more: type) -> type[Any]:
    """The options of an evaluation, or the evaluation, together with what every one asks, to be filled in."""
    return make_dataclass(
        kind.__name__, [], bases=(kind, *more, Options), kw_only=True, namespace={"__doc__": kind.__doc__}
    )


@dataclass(kw_only=True)
class KnnOptions(Sources):
    """Weighted k-NN vote on frozen features (the paper reports k = 20)."""

    summary: ClassVar[str] = "k-NN accuracy: DINO's weighted vote for k = 10, 20, 100, 200"

    k: tuple[int, ...] | None = None
    """How many neighbours vote; 10, 20, 100 and 200 by default."""


@dataclass(kw_only=True)
class LinearOptions(Sources):
    """One linear layer on frozen features, at the published learning rate or at one chosen by a sweep."""

    summary: ClassVar[str] = "accuracy of a linear layer: DINO's or SimSiam's protocol"

    protocol: Annotated[str, tyro.conf.arg(metavar="{auto,dino,simsiam}")] = "auto"
    """Whose: SGD over the last blocks' CLS (dino), or LARS over the pooled feature (simsiam). The run's own."""
    optimizer: Literal["auto", "sgd", "lars"] = "auto"
    """Another optimiser than the protocol's; only SimSiam publishes a rate for it (sgd: 30)."""
    quick: Flag = False
    """Train on cached features without augmentation; the default up to 64 pixels."""
    augmented: Flag = False
    """Crop and flip the training images anew in every epoch, as published; the default above 64 pixels."""
    flip: float = 0.5
    """How often --augmented mirrors a training image; 0 where left and right matter, as in text."""
    rates: tuple[float, ...] | None = None
    """Learning rate per 256 images. By default the published one: 0.001 for a ViT and 0.03 for other nets (dino), 0.1
    (simsiam). Several are a sweep."""
    sweep: Flag = False
    """Choose the rate, out of 13 or of --rates, on a fifth of the training images; then report the last epoch, so
    that nothing is chosen on the test images."""
    epochs: int | None = None
    """100 (dino) or 90 (simsiam) by default."""
    batch_size: int | None = None
    """1024 (dino) or 4096 (simsiam) by default; 256 below 100,000 training images."""


@dataclass(kw_only=True)
class FewshotOptions:
    """Nearest prototype in random episodes, on one or several data sets."""

    summary: ClassVar[str] = "5-way 5-shot accuracy by prototypes, on one or several data sets"

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
class SegmentationOptions(Sources):
    """A 1x1 convolution on frozen patch features, scored by mean intersection over union."""

    summary: ClassVar[str] = "mean IoU of a linear layer on patch features"

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
    flip: float = 0.5
    """How often --augmented mirrors a training image."""
    epochs: int | None = None
    batch_size: int | None = None
    """16 by default, 64 in quick mode."""
    lr: float | None = None
    """Adam's constant rate: 0.1 by default, 0.01 in quick mode."""


@dataclass(kw_only=True)
class ViewsOptions:
    """What can be said of an encoder without labels.

    Views: an image is cropped (40 to 100% of its area), flipped and its colours are jittered; how often is the image
    itself the nearest of all images to that view? RankMe (Garrido et al., 2023): how many directions the features
    use, between 1 and their width; few means that the encoder collapses. (`adasim explore` finds near duplicates.)"""

    summary: ClassVar[str] = "without labels: retrieval of augmented views, RankMe"

    data: str | None = None
    """A folder, an .npz file, hf:NAME or synthetic[:COUNT]; the run's own images by default."""
    queries: int = 2000
    """Of how many images, drawn at random, a view is searched."""


@dataclass(kw_only=True)
class ExploreOptions:
    """How images are looked at."""

    passes: int = 10
    """w: augmented passes over the images, where an encoder and no run says who resembles whom."""
    k: int = 10
    """K: neighbours of each image in a pass."""
    tau: float | None = None
    """Temperature of p_win; a run's own by default, else 0.2."""
    size: int | None = None
    """Side in pixels of what the encoder sees; its own by default."""
    random_weights: Flag = False
    """Use an untrained model of that name."""
    device: str = "auto"
    """Where the encoder runs: auto, cpu, cuda, ..."""
    workers: int = 2
    """Processes that read images from files."""
    no_cache: Flag = False
    """Make features anew and keep none."""
    seed: int = 0
    """Random seed of the augmented passes."""

    def __post_init__(self) -> None:
        for name in ("passes", "k"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name}={getattr(self, name)} must be at least 1.")
        if self.tau is not None:
            check_temperature("--tau", self.tau)

    @property
    def frozen_tau(self) -> float:
        """Temperature where no run has one of its own."""
        return self.tau or TAU


FOR_AN_ENCODER = ("passes", "random_weights", "device", "workers", "no_cache")
"""Options that only matter where an encoder looks at images."""


def refuse_unused(options: ExploreOptions, names: Sequence[str], run: str | Path | None) -> None:
    """Refuse options that a run with neighbours of its own, or, without a run, a file of features has no use for."""
    for name in names:
        if getattr(options, name) == getattr(ExploreOptions, name):
            continue
        option = f"--{name.replace('_', '-')}"
        if run is None:
            raise UserError(
                f"{option} changes nothing beside --features, which are there already. Leave it out."
            )
        raise UserError(
            f"{option} is for --backbone and --features: a run has its neighbours from its training. Leave it out, "
            f"or ask the encoder: --backbone {run} --data ..."
        )


@dataclass(kw_only=True)
class PlanArguments:
    """Memory, traffic and arithmetic of the neighbour memory for a run of this size, and advice.

    adasim plan RECIPE --data DIR [options of adasim pretrain]

    times a few steps of a recipe instead: what it takes with your images on this machine."""

    images: int = 1_281_167
    """N: images of the data set."""
    dim: int | None = None
    """D: width of the cached features; by default the encoder's."""
    ranks: int = 8
    """R: processes that share the memory."""
    window: int = 50
    """w: epochs of lists that are averaged."""
    k: int = 10
    """K: length of a list."""
    batch: int = 1024
    """B: images per step over all processes."""
    backbone: str | None = None
    """The encoder whose arithmetic the search is compared with; by default one of width D."""
    size: int = 224
    """Side of the views in pixels."""
    cache: Literal["float16", "float32"] = "float16"
    """Type of the feature cache: float16 on an accelerator, float32 on a CPU, unless a run says otherwise."""
