"""The contract between a method and the training loop.

A method writes a step in parts: `encode` each view, `predict` from each, then `loss`. So a partner can be drawn
between the forward passes of view 1 and view 2 (`--neighbors.timing current`). Where both views are at hand,
`forward` does all of it in one call. A method may write `forward` alone, and then cannot have partners drawn so late.

A method of your own is one file: a subclass with its `Settings`, registered by name (docs/extending.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adasim.config import Config, OptimConfig
from adasim.models import Backbone
from adasim.registry import PAIRS
from adasim.util.errors import UserError


@dataclass
class Step:
    """What one training step computed."""

    loss: Tensor  # scalar, float32, with gradient
    feature: Tensor  # of view 1, to cache: (B, D), float32, detached, not normalised
    diagnostics: dict[str, Tensor]  # scalars to log, detached and still on the device
    second: Tensor | None = None  # the feature of view 2, likewise; for `--neighbors.view second` or `mean`

    def observed(self, view: str) -> Tensor:
        """What the neighbour memory observes, of any length: `view` is `--neighbors.view`."""
        if view == "first":
            return self.feature
        if self.second is None:
            raise UserError(
                f"neighbors.view={view} needs a method that tells the feature of view 2 (Step.second)."
            )
        if view == "second":
            return self.second
        return F.normalize(self.feature, dim=1) + F.normalize(self.second, dim=1)


@dataclass
class EncodedView:
    """One view on its way through a method. A local view, which no teacher encodes, is just `EncodedView(pixels)`.

    What is not there yet is an empty tensor.
    """

    pixels: Tensor
    """Images, (B, C, H, W)."""
    feature: Tensor = field(default_factory=lambda: torch.empty(0))
    """The feature to cache: (B, D), float32, detached."""
    target: Tensor = field(default_factory=lambda: torch.empty(0))
    """What the other view must predict: the teacher's logits (DINO), the projection z (SimSiam)."""
    output: Tensor = field(default_factory=lambda: torch.empty(0))
    """The prediction from this view: the student's logits (DINO), the predictor's p (SimSiam)."""


class Method(nn.Module, ABC):
    """Self-distillation: two networks (or two halves of one), a loss between views, a feature to cache.

    A subclass is built as `Method(config.model, config.settings, image_size, channels)`.
    """

    Settings: ClassVar[type[Any]]
    """A dataclass of the method's own settings, each with a default."""
    VIEWS: ClassVar[dict[str, Any]] = {}
    """The method's augmentations: fields of `ViewsConfig` that differ from its defaults, which are DINO's."""
    takes_local_views: ClassVar[bool] = False
    """Whether `forward` takes more than two views."""
    linear_protocol: ClassVar[str] = "dino"
    """Whose linear evaluation applies: `dino` (SGD) or `simsiam` (LARS)."""
    follows_total: ClassVar[tuple[str, ...]] = ()
    """In words, what of the method follows a schedule over the whole run, beside the optimiser's."""

    continues_step: bool = False
    """Set by the loop: the next forward pass is of a further micro-batch of the same step."""

    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse what this method cannot do, with a `UserError`."""
        if draws_within_the_step(config) and cls.encode is Method.encode:
            raise UserError(
                f"neighbors.timing=current needs a method in parts (encode, predict, loss); {config.method} has a "
                f"forward alone. Use --neighbors.timing previous."
            )
        if draws_within_the_step(config) and config.neighbors.view != "first":
            raise UserError(
                f"neighbors.timing=current observes an image before its view 2 is drawn, so neighbors.view="
                f"{config.neighbors.view} is not known. Use --neighbors.timing previous, or --neighbors.view first."
            )
        latent = PAIRS[config.pairs].latent or getattr(config.pair_settings, "space", "image") == "latent"
        if latent and cls.project is Method.project:
            raise UserError(
                f"pairs={config.pairs} in latent space needs a method whose targets follow from a cached feature "
                f"(project); {config.method} has none. Use --nearest.space image, or another --method."
            )
        if config.views.local_crops and not cls.takes_local_views:
            raise UserError(
                f"views.local_crops={config.views.local_crops} needs a method that takes local views; "
                f"{config.method} compares two views. Set --views.local-crops 0."
            )

    @property
    def output_width(self) -> int | None:
        """Width of the teacher's softmax, whose entropy (`teacher_entropy`) shows a collapse; None without one."""
        return None

    @property
    @abstractmethod
    def eval_encoder(self) -> Backbone:
        """The encoder to evaluate and to save: the teacher's for DINO, the encoder itself for SimSiam."""

    @property
    def feature_dim(self) -> int:
        """D, width of the cached feature."""
        return self.eval_encoder.dim

    def forward(self, views: list[Tensor], epoch: int, neighbours: Tensor | None = None) -> Step:
        """Loss of a batch: `views` holds the two global views, then any local ones, each (B, C, H, W).

        With micro-batches it is called once for each of them before `after_step` (see `continues_step`), and their
        losses are averaged. `neighbours` comes with `--nearest.space latent` alone: see `aim_at`.
        """
        encoded = [self.encode(view) for view in views[:2]] + [EncodedView(view) for view in views[2:]]
        for view in encoded:
            self.predict(view)
        if neighbours is not None:
            self.aim_at(neighbours, encoded)
        return self.loss(encoded, epoch)

    def encode(self, pixels: Tensor) -> EncodedView:
        """First part, for one global view: its feature, and what the other view must predict."""
        raise NotImplementedError

    def predict(self, view: EncodedView) -> None:
        """Second part, for one view: fill in `view.output`."""
        raise NotImplementedError

    def loss(self, views: list[EncodedView], epoch: int) -> Step:
        """The loss of views with their outputs, in the order of `forward`."""
        raise NotImplementedError

    def project(self, feature: Tensor) -> Tensor:
        """What a view with this feature (B, D) would have as target."""
        raise NotImplementedError

    @torch.no_grad()
    def aim_at(self, neighbours: Tensor, views: list[EncodedView]) -> None:
        """Let cached features of neighbours (B, D) be the targets of both views; a row of zeros leaves its own.

        The cache holds directions. They get the length of the image's own feature, as the head expects it.
        """
        target = self.project(neighbours * views[0].feature.norm(dim=1, keepdim=True))
        for view in views[:2]:
            view.target = torch.where(neighbours.any(dim=1, keepdim=True), target, view.target)

    def before_optimizer(self, epoch: int) -> None:
        """Between backward and the optimiser: drop the gradients of what does not learn yet."""

    def after_step(self, step: int, total_steps: int) -> None:
        """After the optimiser's `step`, only if the loss was finite: move what is not learned by gradient."""

    def schedules(self, epoch: int, step: int, total_steps: int) -> dict[str, float]:
        """What of the method follows a schedule, and its value in this step: logged beside the learning rate."""
        return {}

    @abstractmethod
    def param_groups(self, optim: OptimConfig) -> list[dict[str, Any]]:
        """Learnable parameters in groups with the keys `decay` and `fixed_lr` for the schedules."""


def draws_within_the_step(config: Config) -> bool:
    """Whether partners are drawn between the forward passes of view 1 and view 2."""
    return config.neighbors.timing == "current" and PAIRS[config.pairs].draws_from_memory


def decay_groups(
    parameters: Iterable[tuple[str, nn.Parameter]], optim: OptimConfig, *, fixed_lr: bool = False
) -> list[dict[str, Any]]:
    """A group with weight decay and one without: biases and 1-D tensors, unless `optim.decay_all`."""
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for name, parameter in parameters:
        if parameter.requires_grad:
            spare = not optim.decay_all and (parameter.ndim == 1 or name.endswith("bias"))
            (spared if spare else decayed).append(parameter)
    groups = [(decayed, True), (spared, False)]
    return [{"params": params, "decay": decay, "fixed_lr": fixed_lr} for params, decay in groups if params]
