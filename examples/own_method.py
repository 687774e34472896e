"""A method of your own in one file: BYOL (Grill et al., 2020), with AdaSim's pairs like any built-in method.

    adasim pretrain desk-resnet --plugin examples/own_method.py --method byol --out runs/byol
    adasim pretrain desk-resnet --plugin examples/own_method.py --method byol --byol.momentum 0.99 --out runs/byol

An online network predicts what its own moving average says of the other view; neither sees negatives.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from adasim.config import ModelConfig, OptimConfig, cosine
from adasim.methods import EncodedView, Method, SimSiam, Step
from adasim.methods.base import decay_groups
from adasim.models import Backbone, build_backbone
from adasim.registry import METHODS


@dataclass(kw_only=True)
class ByolSettings:
    """BYOL's heads and target network."""

    hidden_dim: int = 512
    """Width of the hidden layers of projector and predictor."""
    out_dim: int = 128
    """Width of the projections."""
    momentum: float = 0.99
    """Start of the target's moving-average momentum; a cosine takes it to 1."""


def mlp(in_dim: int, hidden_dim: int, out_dim: int) -> nn.Sequential:
    hidden = (nn.Linear(in_dim, hidden_dim), nn.BatchNorm1d(hidden_dim), nn.ReLU(inplace=True))
    return nn.Sequential(*hidden, nn.Linear(hidden_dim, out_dim))


@METHODS.register("byol")
class Byol(Method):
    Settings = ByolSettings
    VIEWS = SimSiam.VIEWS
    linear_protocol = "simsiam"
    follows_total = ("target's momentum",)

    def __init__(self, model: ModelConfig, settings: ByolSettings, image_size: int, channels: int) -> None:
        super().__init__()
        self.settings = settings
        self.online, self.target = (
            build_backbone(model, image_size, channels, student=s) for s in (True, False)
        )
        sizes = self.online.dim, settings.hidden_dim, settings.out_dim
        self.projector, self.target_projector = mlp(*sizes), mlp(*sizes)
        self.predictor = mlp(settings.out_dim, settings.hidden_dim, settings.out_dim)
        self.target.load_state_dict(self.online.state_dict())
        self.target_projector.load_state_dict(self.projector.state_dict())
        self.target.requires_grad_(False), self.target_projector.requires_grad_(False)

    @property
    def eval_encoder(self) -> Backbone:
        return self.online

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> EncodedView:
        feature = self.target(pixels)  # (B, D), cached by the neighbour memory
        return EncodedView(pixels, feature.float(), target=self.target_projector(feature))

    def predict(self, view: EncodedView) -> None:
        view.output = self.predictor(self.projector(self.online(view.pixels)))

    def loss(self, views: list[EncodedView], epoch: int) -> Step:
        first, second = views
        agreement = cosine_similarity(first.output, second.target) + cosine_similarity(
            second.output, first.target
        )
        return Step((2 - agreement.float()).mean(), first.feature, {})

    @torch.no_grad()
    def after_step(self, step: int, total_steps: int) -> None:
        momentum = cosine(self.settings.momentum, 1.0, step, total_steps)
        for target, online in ((self.target, self.online), (self.target_projector, self.projector)):
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.lerp_(fast, 1 - momentum)

    def param_groups(self, optim: OptimConfig) -> list[dict[str, Any]]:
        return decay_groups(self.named_parameters(), optim)
