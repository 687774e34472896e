"""The settings of the built-in methods and pair policies, and each method's augmentations.

They stand apart from the networks that they configure because these need torch, which takes seconds to import: what
is wrong with a command is said before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from adasim.util.fields import at_least, between, check_fields, check_temperature, check_width

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

    out_dim: int = 65536
    """Prototypes: width of the head's output."""
    hidden_dim: int = 2048
    """Width of the head's two hidden layers."""
    bottleneck_dim: int = 256
    """Width of the normalised layer before the prototypes."""
    norm_last_layer: bool = False
    """Freeze the gains of the weight-normed last layer at 1."""
    freeze_last_layer_epochs: int = 1
    """Epochs in which the last layer does not learn."""
    student_temp: float = 0.1
    """Temperature of the student's softmax."""
    teacher_temp_start: float = 0.04
    """Teacher temperature at the first epoch."""
    teacher_temp: float = 0.07
    """Teacher temperature after its warm-up."""
    teacher_temp_warmup_epochs: int = 30
    """Epochs over which the teacher temperature rises linearly."""
    teacher_momentum: float = 0.996
    """Start of the teacher's moving-average momentum; a cosine takes it to 1."""
    center_momentum: float = 0.9
    """Momentum of the running centre of the teacher's logits."""

    def __post_init__(self) -> None:
        check_fields(self, "dino.")
        for name in ("out_dim", "hidden_dim", "bottleneck_dim"):
            check_width(f"dino.{name}", getattr(self, name))
        for name in ("student_temp", "teacher_temp_start", "teacher_temp"):
            check_temperature(f"dino.{name}", getattr(self, name))
        between("dino.teacher_momentum", self.teacher_momentum, 0, 1)
        between("dino.center_momentum", self.center_momentum, 0, 1)


@dataclass(kw_only=True)
class SimSiamSettings:
    """SimSiam's projector and predictor."""

    proj_dim: int = 2048
    """Width of the projector (all three layers)."""
    pred_dim: int = 512
    """Width of the predictor's hidden layer."""
    fix_pred_lr: bool = True
    """Keep the predictor's learning rate constant while the encoder's decays."""

    def __post_init__(self) -> None:
        check_fields(self, "simsiam.")
        check_width("simsiam.proj_dim", self.proj_dim)
        check_width("simsiam.pred_dim", self.pred_dim)


@dataclass(kw_only=True)
class NnclrSettings:
    """NNCLR's heads, temperature and queue."""

    proj_dim: int = 256
    """Width of the projector (all three layers) and of the embeddings."""
    pred_dim: int = 512
    """Width of the predictor's hidden layer."""
    temperature: float = 0.1
    """Temperature of the softmax over the batch."""
    queue_size: int = 16_384
    """Embeddings of the last images, among which positives are found; 0: the other view is the positive."""

    def __post_init__(self) -> None:
        check_fields(self, "nnclr.")
        check_width("nnclr.proj_dim", self.proj_dim)
        check_width("nnclr.pred_dim", self.pred_dim)
        at_least("nnclr.queue_size", self.queue_size, 0)
        check_temperature("nnclr.temperature", self.temperature)


@dataclass(kw_only=True)
class NearestSettings:
    """How an image meets its nearest neighbour (+NN)."""

    space: Literal["image", "latent"] = "image"
    """`image`: view 2 shows the neighbour. `latent`: both views show the image, and the neighbour's cached feature is
    the target of both."""

    def __post_init__(self) -> None:
        check_fields(self, "nearest.")
