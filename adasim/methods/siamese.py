"""One network for both views, with a projector and a predictor: what SimSiam and NNCLR have in common."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from adasim.config import ModelConfig
from adasim.methods.base import EncodedView, Method, Step
from adasim.models import Backbone, Predictor, Projector, build_backbone
from adasim.settings import SIAMESE_VIEWS
from adasim.util.spread import feature_spread


class Siamese(Method):
    """An encoder, a projector and a predictor; each view has a forward pass (and batch statistics) of its own.

    A subclass adds its loss. Its settings have `proj_dim` and `pred_dim`.
    """

    VIEWS = SIAMESE_VIEWS
    linear_protocol = "simsiam"

    def __init__(self, model: ModelConfig, config: Any, image_size: int, channels: int = 3) -> None:
        super().__init__()
        self.config = config
        self.encoder = build_backbone(model, image_size, channels, student=True)
        self.projector = Projector(self.encoder.dim, config.proj_dim)
        self.predictor = Predictor(config.proj_dim, config.pred_dim)

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

    def step(self, loss: Tensor, first: EncodedView) -> Step:
        """What the loop is told of a step whose view 1 is `first`."""
        diagnostics = {
            "feature_spread": feature_spread(first.feature),
            "projection_spread": feature_spread(first.target),
        }
        return Step(loss, first.feature, diagnostics)
