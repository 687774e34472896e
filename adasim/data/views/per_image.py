"""Views of one image at a time, with torchvision's own operations on 8-bit tensors: the path for real
photographs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from adasim.config import ViewsConfig
from adasim.data.views.parameters import SOLARIZE_FROM, Params, ViewSettings, draw, view_uniforms
from adasim.data.views.pixels import blur, shift_hue


def _adjust_hue(x: Tensor, shift: float) -> Tensor:
    return _to_8_bits(shift_hue(x.float() / 255, shift) * 255)


def _to_8_bits(x: Tensor) -> Tensor:
    return x.round_().clamp_(0, 255).to(torch.uint8)


_JITTER = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, _adjust_hue)


class Views:
    """Makes the views that a `ViewsConfig` describes. Nothing here draws from a generator: it is safe in
    threads.

    >>> view = Views(ViewsConfig(size=32)).make(torch.zeros(3, 48, 64, dtype=torch.uint8), view=1, key=7)
    >>> tuple(view.shape)
    (3, 32, 32)
    """

    def __init__(self, config: ViewsConfig) -> None:
        self.count = 2 + config.local_crops
        self.settings = {view: ViewSettings.of(config, view) for view in range(1, self.count + 1)}
        self._mean = list(config.mean)
        self._std = list(config.std)

    def make(self, image: Tensor, view: int, key: int) -> Tensor:
        """One view of `image`, float32 (3, S, S): a pure function of the pixels, the view's number and the
        key.

        `image` is uint8 (3, H, W) or (1, H, W); `view` is 1 or 2 for the global views, 3 and up for local
        crops.
        """
        return self.batch([image], view, view_uniforms(key, view, 0, torch.zeros(1)))[0]

    def batch(self, images: list[Tensor], view: int, uniforms: Tensor) -> Tensor:
        """The views of several images of any sizes, each from its row of uniforms (B, UNIFORMS): (B, 3, S,
        S).
        """
        heights = torch.tensor([image.shape[-2] for image in images])
        widths = torch.tensor([image.shape[-1] for image in images])
        settings = self.settings[view]
        params = draw(settings, heights, widths, uniforms)
        pixels = torch.stack([_augment(image, settings, params, i) for i, image in enumerate(images)])
        return TF.normalize(TF.to_dtype(pixels, torch.float32, scale=True), self._mean, self._std)


def _augment(image: Tensor, settings: ViewSettings, params: Params, i: int) -> Tensor:
    """Row i of `params` applied to one image: uint8 (3, S, S)."""
    box = [int(side[i]) for side in (params.top, params.left, params.height, params.width)]
    x = TF.resized_crop(
        image.expand(3, -1, -1),
        *box,
        size=[settings.size, settings.size],
        interpolation=InterpolationMode(settings.interpolation),
        antialias=True,
    )
    if params.flip[i]:
        x = TF.horizontal_flip(x)
    if params.jitter[i]:
        factors = params.factors[i].tolist()
        for which in params.order[i].tolist():
            x = _JITTER[which](x, factors[which])
    if params.grey[i]:
        x = TF.rgb_to_grayscale(x, num_output_channels=3)
    if params.blur[i]:
        x = _to_8_bits(blur(x.float(), float(params.sigma[i])))
    if params.solarize[i]:
        x = TF.solarize(x, SOLARIZE_FROM)
    return x
