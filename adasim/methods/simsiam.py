"""SimSiam: predict one view's projection from the other's, no gradient to the target (Chen & He, 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from adasim.config import Config, ModelConfig, OptimConfig, at_least
from adasim.errors import UserError
from adasim.fields import check_fields
from adasim.methods.base import EncodedView, Method, Step, decay_groups, feature_spread
from adasim.models import Backbone, Predictor, Projector, build_backbone
from adasim.registry import METHODS


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
        at_least("simsiam.proj_dim", self.proj_dim, 2)
        at_least("simsiam.pred_dim", self.pred_dim, 2)


@METHODS.register("simsiam")
class SimSiam(Method):
    """One encoder, projector and predictor; each view has a forward pass (and batch statistics) of its own.

    The paper does not say what AdaSim caches here: it is the pooled encoder feature of view 1.
    """

    Settings = SimSiamSettings
    VIEWS: ClassVar = {  # Chen and He, 2021: both views alike
        "interpolation": "bilinear",
        "jitter": (0.4, 0.4, 0.4, 0.1),
        "blur_p": (0.5, 0.5, 0.5),
        "solarize_p": (0.0, 0.0),
    }
    linear_protocol = "simsiam"

    def __init__(
        self, model: ModelConfig, config: SimSiamSettings, image_size: int, channels: int = 3
    ) -> None:
        super().__init__()
        self.config = config
        self.encoder = build_backbone(model, image_size, channels, student=True)
        self.projector = Projector(self.encoder.dim, config.proj_dim)
        self.predictor = Predictor(config.proj_dim, config.pred_dim)

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        if config.batch_size < 2:
            raise UserError(
                "method=simsiam needs a batch_size of at least 2: batch norm has nothing to compare one image with. "
                "Raise --batch-size."
            )

    @property
    def eval_encoder(self) -> Backbone:
        return self.encoder

    def forward(self, views: list[Tensor], epoch: int) -> Step:
        encoded = [self.encode(view) for view in views]
        for view in encoded:
            self.predict(view)
        return self.loss(encoded, epoch)

    def encode(self, pixels: Tensor) -> EncodedView:
        feature = self.encoder(pixels)  # (B, D)
        return EncodedView(pixels, feature.detach().float(), target=self.projector(feature))

    def predict(self, view: EncodedView) -> None:
        view.output = self.predictor(view.target)

    def loss(self, views: list[EncodedView], epoch: int) -> Step:
        """-1/2 [mean cos(p1, stop-gradient z2) + mean cos(p2, stop-gradient z1)]."""
        first, second = views
        loss = -0.5 * (_cosine(first.output, second.target) + _cosine(second.output, first.target))
        diagnostics = {
            "feature_spread": feature_spread(first.feature),
            "projection_spread": feature_spread(first.target),
        }
        return Step(loss, first.feature, diagnostics)

    def param_groups(self, optim: OptimConfig) -> list[dict[str, Any]]:
        encoder = [*self.encoder.named_parameters(), *self.projector.named_parameters()]
        predictor = self.predictor.named_parameters()
        return [
            *decay_groups(encoder, optim),
            *decay_groups(predictor, optim, fixed_lr=self.config.fix_pred_lr),
        ]


def _cosine(prediction: Tensor, target: Tensor) -> Tensor:
    return F.cosine_similarity(prediction.float(), target.detach().float(), dim=1).mean()
