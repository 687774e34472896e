"""SimSiam: predict one view's projection from the other's, no gradient to the target (Chen & He, 2021)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from adasim.config import Config, OptimConfig
from adasim.methods.base import EncodedView, Step, decay_groups
from adasim.methods.siamese import Siamese
from adasim.registry import METHODS
from adasim.settings import SimSiamSettings
from adasim.util.errors import UserError


@METHODS.register("simsiam")
class SimSiam(Siamese):
    """Each view's prediction against the other's projection.

    The paper does not say what AdaSim caches here: it is the pooled encoder feature of view 1.
    """

    Settings = SimSiamSettings

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        if config.batch_size < 2:
            raise UserError(
                "method=simsiam needs a batch_size of at least 2: batch norm has nothing to compare one image with. "
                "Raise --batch-size."
            )

    def loss(self, views: list[EncodedView], epoch: int) -> Step:
        """-1/2 [mean cos(p1, stop-gradient z2) + mean cos(p2, stop-gradient z1)]."""
        first, second = views
        loss = -0.5 * (_cosine(first.output, second.target) + _cosine(second.output, first.target))
        return self.step(loss, first)

    def param_groups(self, optim: OptimConfig) -> list[dict[str, Any]]:
        encoder = [*self.encoder.named_parameters(), *self.projector.named_parameters()]
        predictor = self.predictor.named_parameters()
        return [
            *decay_groups(encoder, optim),
            *decay_groups(predictor, optim, fixed_lr=self.config.fix_pred_lr),
        ]


def _cosine(prediction: Tensor, target: Tensor) -> Tensor:
    return F.cosine_similarity(prediction.float(), target.detach().float(), dim=1).mean()
