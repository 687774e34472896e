"""SimSiam: predict one view's projection from the other's, no gradient to the target (Chen & He, 2021)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from adasim.config import ModelConfig, OptimConfig, SimSiamConfig
from adasim.methods.base import Method, Seen, Step, decay_groups, feature_spread
from adasim.models import Backbone, Predictor, Projector, build_backbone


class SimSiam(Method):
    """One encoder, projector and predictor; each view has a forward pass (and batch statistics) of its own.

    The paper does not say what AdaSim caches here: it is the pooled encoder feature of view 1.
    """

    def __init__(self, model: ModelConfig, config: SimSiamConfig, image_size: int, channels: int = 3) -> None:
        super().__init__()
        self.config = config
        self.encoder = build_backbone(model, image_size, channels, student=True)
        self.projector = Projector(self.encoder.dim, config.proj_dim)
        self.predictor = Predictor(config.proj_dim, config.pred_dim)

    @property
    def exported(self) -> Backbone:
        return self.encoder

    def forward(self, views: list[Tensor], epoch: int) -> Step:
        seen = [self.see(view) for view in views]
        for view in seen:
            self.answer(view)
        return self.loss(seen, epoch)

    def see(self, view: Tensor) -> Seen:
        feature = self.encoder(view)  # (B, D)
        return Seen(view, feature.detach().float(), target=self.projector(feature))

    def answer(self, seen: Seen) -> None:
        seen.output = self.predictor(seen.target)

    def loss(self, seen: list[Seen], epoch: int) -> Step:
        """-1/2 [mean cos(p1, stop-gradient z2) + mean cos(p2, stop-gradient z1)]."""
        first, second = seen
        loss = -0.5 * (_cosine(first.output, second.target) + _cosine(second.output, first.target))
        diagnostics = {
            "feature_std": feature_spread(first.feature),
            "projection_std": feature_spread(first.target),
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
