"""Raw pixels as an encoder without weights: what every trained one has to beat."""

from __future__ import annotations

from torch import Tensor, nn

from adasim.models.backbones import Backbone
from adasim.models.transforms import EvalTransform

PIXELS = "pixels"
"""The name of this MODEL."""
_SIZE = 32


class _Pixels(nn.Module):
    """Images (B, C, H, W) as features (B, C * H * W), less each image's own mean: else all would point the same way,
    and a vote by cosine would hardly tell them apart."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return x - x.mean(1, keepdim=True)

    forward_features = forward


def pixels(size: int | None = None) -> Backbone:
    """Images of 32 x 32 pixels, or of another size, as features."""
    side = size or _SIZE
    spec = {"name": PIXELS, "dim": 3 * side * side, "image_size": side}
    return Backbone(_Pixels(), spec, EvalTransform.of_size(side, (0.5,) * 3, (0.5,) * 3)).eval()
