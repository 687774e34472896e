"""The contract between a method and the training loop.

A step with both views at hand is one call, `forward`. Where the partner of an image is drawn only after the
image was seen, the same step comes in halves: `see` each view, `answer` for each, then `loss`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adasim.config import OptimConfig
from adasim.models import Backbone


@dataclass
class Step:
    """What one training step computed."""

    loss: Tensor
    """Scalar, float32, with gradient."""
    feature: Tensor
    """The feature of view 1 to cache: (B, D), float32, detached, not normalised."""
    diagnostics: dict[str, Tensor]
    """Scalars to log, detached and still on the device."""


@dataclass
class Seen:
    """One view on its way through a method. A local view, which no teacher sees, is just `Seen(view)`.

    What is not there yet is an empty tensor.
    """

    view: Tensor
    """Images, (B, C, H, W)."""
    feature: Tensor = field(default_factory=lambda: torch.empty(0))
    """The feature to cache: (B, D), float32, detached."""
    target: Tensor = field(default_factory=lambda: torch.empty(0))
    """What the other view must predict: the teacher's logits (DINO), the projection z (SimSiam)."""
    output: Tensor = field(default_factory=lambda: torch.empty(0))
    """The prediction from this view: the student's logits (DINO), the predictor's p (SimSiam)."""


class Method(nn.Module, ABC):
    """Self-distillation: two networks (or two halves of one), a loss between views, a feature to cache."""

    @property
    @abstractmethod
    def exported(self) -> Backbone:
        """The encoder to evaluate and to save: the teacher's for DINO, the encoder itself for SimSiam."""

    @property
    def feature_dim(self) -> int:
        """D, width of the cached feature."""
        return self.exported.dim

    @abstractmethod
    def forward(self, views: list[Tensor], epoch: int) -> Step:
        """Loss of a batch: `views` holds the two global views, then any local ones, each (B, C, H, W)."""

    @abstractmethod
    def see(self, view: Tensor) -> Seen:
        """First half for one global view: its feature, and what the other view must predict."""

    @abstractmethod
    def answer(self, seen: Seen) -> None:
        """Second half for one view: fill in `seen.output`."""

    @abstractmethod
    def loss(self, seen: list[Seen], epoch: int) -> Step:
        """The loss of views that were all answered for, in the order of `forward`."""

    def before_optimizer(self, epoch: int) -> None:
        """Between backward and the optimiser: drop the gradients of what does not learn yet."""

    def after_step(self, step: int, total_steps: int) -> None:
        """After the optimiser's `step`, only if the loss was finite: move what is not learned by gradient."""

    @abstractmethod
    def param_groups(self, optim: OptimConfig) -> list[dict[str, Any]]:
        """Learnable parameters in groups with the keys `decay` and `fixed_lr` for the schedules."""


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


def feature_spread(features: Tensor) -> Tensor:
    """Mean over dimensions of the L2-normalised features' deviation over the batch.

    Near 1/sqrt(D) when features fill the sphere, 0 when all are equal (collapse).
    """
    return F.normalize(features.detach().float(), dim=1).std(dim=0, correction=0).mean()
