"""The settings of methods and pair policies, and the options of evaluations, explorations and plans.

They stand apart from what they configure because that needs torch, which takes seconds to import: what is wrong with
a command is said before. Every range is part of a field's type, and `check_fields` refuses what does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, Literal

from adasim.util.errors import UserError
from adasim.util.fields import Count, Natural, Pixels, Share, Temperature, Width, check_fields

DINO_VIEWS: dict[str, Any] = {  # Caron et al., 2021: two different views
    "interpolation": "bicubic",
    "jitter": (0.4, 0.4, 0.2, 0.1),
    "blur_p": (1.0, 0.1, 0.5),
    "solarize_p": (0.0, 0.2),
}

SIAMESE_VIEWS: dict[str, Any] = {  # Chen and He, 2021: both views alike
    "interpolation": "bilinear",
    "jitter": (0.4, 0.4, 0.4, 0.1),
    "blur_p": (0.5, 0.5, 0.5),
    "solarize_p": (0.0, 0.0),
}


@dataclass(kw_only=True)
class DinoSettings:
    """DINO's head, temperatures and teacher."""

    out_dim: Width = 65536
    """Prototypes: width of the head's output."""
    hidden_dim: Width = 2048
    """Width of the head's two hidden layers."""
    bottleneck_dim: Width = 256
    """Width of the normalised layer before the prototypes."""
    norm_last_layer: bool = False
    """Freeze the gains of the weight-normed last layer at 1."""
    freeze_last_layer_epochs: Natural = 1
    """Epochs in which the last layer does not learn."""
    student_temp: Temperature = 0.1
    """Temperature of the student's softmax."""
    teacher_temp_start: Temperature = 0.04
    """Teacher temperature at the first epoch."""
    teacher_temp: Temperature = 0.07
    """Teacher temperature after its warm-up."""
    teacher_temp_warmup_epochs: Natural = 30
    """Epochs over which the teacher temperature rises linearly."""
    teacher_momentum: Share = 0.996
    """Start of the teacher's moving-average momentum; a cosine takes it to 1."""
    center_momentum: Share = 0.9
    """Momentum of the running centre of the teacher's logits."""


@dataclass(kw_only=True)
class SimSiamSettings:
    """SimSiam's projector and predictor."""

    proj_dim: Width = 2048
    """Width of the projector (all three layers)."""
    pred_dim: Width = 512
    """Width of the predictor's hidden layer."""
    fix_pred_lr: bool = True
    """Keep the predictor's learning rate constant while the encoder's decays."""


@dataclass(kw_only=True)
class NnclrSettings:
    """NNCLR's heads, temperature and queue."""

    proj_dim: Width = 256
    """Width of the projector (all three layers) and of the embeddings."""
    pred_dim: Width = 512
    """Width of the predictor's hidden layer."""
    temperature: Temperature = 0.1
    """Temperature of the softmax over the batch."""
    queue_size: Natural = 16_384
    """Embeddings of the last images, among which positives are found; 0: the other view is the positive."""


@dataclass(kw_only=True)
class NearestSettings:
    """How an image meets its nearest neighbour (+NN)."""

    space: Literal["image", "latent"] = "image"
    """`image`: view 2 shows the neighbour. `latent`: both views show the image, and the neighbour's cached feature is
    the target of both."""


SWEEP: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Learning rates per 256 images that span what frozen features of either method ask for."""
TAU = 0.2
"""Temperature of p_win where nobody says another: the paper's."""


@dataclass(kw_only=True)
class EncoderOptions:
    """How an encoder looks at images."""

    size: Count | None = None
    """Side in pixels of what the encoder sees; its own by default."""
    device: str = "auto"
    """Where the encoder runs: auto, cpu, cuda, ..."""
    workers: Natural | Literal["auto"] = "auto"
    """Loader processes that read images from files; auto: this process's share of the cores less one, at most 16."""
    no_cache: bool = False
    """Make features anew and keep none."""


@dataclass(kw_only=True)
class Options(EncoderOptions):
    """What every evaluation asks."""

    random_weights: bool = False
    """Measure an untrained model of that name."""
    exclude: Path | None = None
    """Leave out the images that this file rejects: verdicts exported from the page of `adasim explore`."""
    results: Path | None = None
    """Where the result is appended; RUN/results.jsonl by default, nowhere for a model that is no run."""
    seed: int = 0
    """Random seed: of held-out images, order, episodes."""

    def __post_init__(self) -> None:
        check_fields(self, skip=("data", "train", "test"))  # in Python these may be images


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
    """k-NN accuracy: DINO's weighted vote for k = 10, 20 (which the paper reports), 100, 200."""

    k: tuple[Count, ...] | None = None
    """How many neighbours vote; 10, 20, 100 and 200 by default."""


@dataclass(kw_only=True)
class LinearOptions(Sources):
    """Accuracy of a linear layer: DINO's or SimSiam's protocol, at the published learning rate or one of a sweep."""

    protocol: str = "auto"
    """Whose: SGD over the last blocks' CLS (dino), LARS over the pooled feature (simsiam), or SGD over it
    (simsiam-sgd). The run's own."""
    quick: bool = False
    """Train on cached features without augmentation; the default up to 64 pixels."""
    augmented: bool = False
    """Crop and flip the training images anew in every epoch, as published; the default above 64 pixels."""
    flip: Share = 0.5
    """How often --augmented mirrors a training image; 0 where left and right matter, as in text."""
    rates: tuple[float, ...] | None = None
    """Learning rate per 256 images. By default the published one: 0.001 for a ViT and 0.03 for other nets (dino), 0.1
    (simsiam). Several are a sweep."""
    sweep: bool = False
    """Choose the rate, out of 13 or of --rates, on a fifth of the training images; then report the last epoch, so
    that nothing is chosen on the test images."""
    epochs: Count | None = None
    """100 (dino) or 90 (simsiam) by default."""
    batch_size: Count | None = None
    """1024 (dino) or 4096 (simsiam) by default; 256 below 100,000 training images."""


@dataclass(kw_only=True)
class FewshotOptions:
    """5-way 5-shot accuracy: nearest prototype in random episodes, on one or several data sets."""

    data: tuple[str, ...] = ()
    """Data sets, each with all its splits together; the run's own by default."""
    ways: Count = 5
    """Classes of an episode."""
    shots: Count = 5
    """Images of a class that make its prototype."""
    queries: Count = 15
    """Images of a class that are classified."""
    episodes: Count = 600
    per_class: tuple[str, ...] | None = None
    """The unbalanced ones of the data sets (without names: all), where classes bring the queries that they have,
    and count alike."""


@dataclass(kw_only=True)
class SegmentationOptions(Sources):
    """Mean intersection over union of a linear layer (a 1x1 convolution) on patch features."""

    classes: Count | None = None
    """How many classes the masks show; read from the training masks by default (21 for PASCAL VOC)."""
    ignore: tuple[int, ...] = ()
    """Ids of pixels that neither train nor count, beside 255 (11 for CamVid)."""
    blocks: Count = 4
    """How many of a ViT's last blocks; a ResNet gives its last feature map."""
    quick: bool = False
    """Make patch features once, without augmentation, for 10 epochs; the default up to 64 pixels."""
    augmented: bool = False
    """Flip, turn and scale the training images anew in each of 60 epochs; the default above 64 pixels."""
    flip: Share = 0.5
    """How often --augmented mirrors a training image."""
    epochs: Count | None = None
    batch_size: Count | None = None
    """16 by default, 64 in quick mode."""
    lr: float | None = None
    """Adam's constant rate: 0.1 by default, 0.01 in quick mode."""


@dataclass(kw_only=True)
class ViewsOptions:
    """Without labels: retrieval of augmented views, RankMe.

    Views: an image is cropped (40 to 100% of its area), flipped and its colours are jittered; how often is the image
    itself the nearest of all images to that view? RankMe (Garrido et al., 2023): how many directions the features
    use, between 1 and their width; few means that the encoder collapses. (`adasim explore` finds near duplicates.)"""

    data: str | None = None
    """A folder, an .npz file, hf:NAME or synthetic[:COUNT]; the run's own images by default."""
    queries: Count = 2000
    """Of how many images, drawn at random, a view is searched."""


@dataclass(kw_only=True)
class ExploreOptions(EncoderOptions):
    """How images are looked at."""

    passes: Count = 10
    """w: augmented passes over the images, where an encoder and no run says who resembles whom."""
    k: Count = 10
    """K: neighbours of each image in a pass."""
    tau: Temperature | None = None
    """Temperature of p_win; a run's own by default, else 0.2."""
    random_weights: bool = False
    """Use an untrained model of that name."""
    seed: int = 0
    """Random seed of the augmented passes."""

    def __post_init__(self) -> None:
        check_fields(self, "--")

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
        why = "changes nothing beside --features, which are there already. Leave it out."
        if run is not None:
            why = f"is for --backbone and --features. Leave it out, or ask the encoder: --backbone {run} --data ..."
        raise UserError(f"--{name.replace('_', '-')} {why}")


@dataclass(kw_only=True)
class PlanArguments:
    """Memory, traffic and arithmetic of the neighbour memory for a run of this size, and advice.

    adasim plan RECIPE --data DIR [options of adasim pretrain]

    times a few steps of a recipe instead: what it takes with your images on this machine."""

    images: Count = 1_281_167
    """N: images of the data set."""
    dim: Count | None = None
    """D: width of the cached features; by default the encoder's."""
    ranks: Count = 8
    """R: processes that share the memory."""
    window: Count = 50
    """w: epochs of lists that are averaged."""
    k: Count = 10
    """K: length of a list."""
    batch: Count = 1024
    """B: images per step over all processes."""
    backbone: str | None = None
    """The encoder whose arithmetic the search is compared with; by default one of width D."""
    size: Pixels = 224
    """Side of the views in pixels."""
    cache: Literal["float16", "float32"] = "float16"
    """Type of the feature cache: float16 on an accelerator, float32 on a CPU, unless a run says otherwise."""
