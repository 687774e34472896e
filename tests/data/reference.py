"""Views of one image at a time, with torchvision's own operations on 8-bit tensors: what ours are held to."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from adasim.config import ViewsConfig
from adasim.data.crops import (
    SOLARIZE_FROM,
    Changes,
    CropDraws,
    ViewSettings,
    draw_changes,
    view_uniforms,
)

_JITTER = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue)


class Views:
    """Makes the views that a `ViewsConfig` describes.

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
        settings = self.settings[view]
        crops, changes = CropDraws.of(settings, uniforms), draw_changes(settings, uniforms)
        pixels = []
        for i, image in enumerate(images):
            box = crops.box(i, *image.shape[-2:])
            x = TF.resized_crop(
                image.expand(3, -1, -1),
                *box,
                size=[settings.size, settings.size],
                interpolation=InterpolationMode(settings.interpolation),
                antialias=True,
            )
            pixels.append(_change(x, changes, i))
        return TF.normalize(
            TF.to_dtype(torch.stack(pixels), torch.float32, scale=True), self._mean, self._std
        )


def _change(x: Tensor, changes: Changes, i: int) -> Tensor:
    """Row i of `changes` applied to one crop: uint8 (3, S, S)."""
    if changes.flip[i]:
        x = TF.horizontal_flip(x)
    if changes.jitter[i]:
        factors = changes.factors[i].tolist()
        for which in changes.order[i].tolist():
            x = _JITTER[which](x, factors[which])
    if changes.grey[i]:
        x = TF.rgb_to_grayscale(x, num_output_channels=3)
    if changes.blur[i]:
        x = TF.gaussian_blur(x, [13, 13], [float(changes.sigma[i])] * 2)
    if changes.solarize[i]:
        x = TF.solarize(x, SOLARIZE_FROM)
    return x
