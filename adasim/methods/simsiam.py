"""SimSiam: predict one view's projection from the other's, no gradient to the target (Chen & He, 2021)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from adasim.config import Config, ModelConfig, OptimConfig
from adasim.methods.base import EncodedView, Method, Step, decay_groups
from adasim.models import Backbone, build_backbone
from adasim.options import SIAMESE_VIEWS, SimSiamSettings
from adasim.registry import METHODS
from adasim.util.collapse import feature_spread
from adasim.util.errors import UserError


class Siamese(Method):
    """One network for both views: an encoder, a projector and a predictor. Batch norm sees one view at a time.

    A subclass adds its loss, which `Method.forward` calls. Its settings have `proj_dim` and `pred_dim`.
    """

    VIEWS = SIAMESE_VIEWS
    linear_protocol = "simsiam"

    def __init__(self, model: ModelConfig, config: Any, image_size: int, channels: int = 3) -> None:
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
                f"method={config.method} needs a batch_size of at least 2: batch norm has nothing to compare one "
                f"image with. Raise --batch-size."
            )

    @property
    def eval_encoder(self) -> Backbone:
        return self.encoder

    def encode(self, pixels: Tensor) -> EncodedView:
        feature = self.encoder(pixels)  # (B, D)
        return EncodedView(pixels, feature.detach().float(), target=self.projector(feature))

    def predict(self, view: EncodedView) -> None:
        view.output = self.predictor(view.target)

    def step(self, loss: Tensor, views: list[EncodedView]) -> Step:
        """What the loop is told of a step."""
        first, second = views
        diagnostics = {
            "feature_spread": feature_spread(first.feature),
            "projection_spread": feature_spread(first.target),
        }
        return Step(loss, first.feature, diagnostics, second.feature)


@METHODS.register("simsiam")
class SimSiam(Siamese):
    """Each view's prediction against the other's projection.

    The paper does not say what AdaSim caches here: it is the pooled encoder feature of view 1.
    """

    Settings = SimSiamSettings

    def project(self, feature: Tensor) -> Tensor:
        return self.projector(feature)

    def loss(self, views: list[EncodedView], epoch: int) -> Step:
        """-1/2 [mean cos(p1, stop-gradient z2) + mean cos(p2, stop-gradient z1)]."""
        first, second = views
        loss = -0.5 * (_cosine(first.output, second.target) + _cosine(second.output, first.target))
        return self.step(loss, views)

    def param_groups(self, optim: OptimConfig) -> list[dict[str, Any]]:
        encoder = [*self.encoder.named_parameters(), *self.projector.named_parameters()]
        predictor = self.predictor.named_parameters()
        fixed = self.config.fix_pred_lr
        return [*decay_groups(encoder, optim), *decay_groups(predictor, optim, fixed_lr=fixed)]


def _cosine(prediction: Tensor, target: Tensor) -> Tensor:
    return F.cosine_similarity(prediction.float(), target.detach().float(), dim=1).mean()


class Projector(nn.Sequential):
    """SimSiam's three-layer projector, BN after every layer; the last BN has no affine part.

    The last bias is frozen: the BN behind it takes any constant off again.
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        last = nn.Linear(dim, dim)
        last.bias.requires_grad_(False)
        super().__init__(*_hidden(in_dim, dim), *_hidden(dim, dim), last, nn.BatchNorm1d(dim, affine=False))


class Predictor(nn.Sequential):
    """SimSiam's bottleneck predictor: dim -> hidden -> dim, BN on the hidden layer only."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__(*_hidden(dim, hidden_dim), nn.Linear(hidden_dim, dim))


def _hidden(in_dim: int, dim: int) -> tuple[nn.Module, ...]:
    return nn.Linear(in_dim, dim, bias=False), nn.BatchNorm1d(dim), nn.ReLU(inplace=True)
