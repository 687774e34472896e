"""Views of one image at a time, with torchvision's own operations on 8-bit tensors: what ours are held to."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from adasim.config import ViewsConfig
from adasim.data.crops import SOLARIZE_FROM, Changes, CropDraws, ViewSettings, draw_changes

JITTER = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue)


def torchvision_views(config: ViewsConfig, images: Tensor, view: int, uniforms: Tensor) -> Tensor:
    """One view (B, 3, S, S) of each image, from its row of uniforms (B, UNIFORMS)."""
    settings = ViewSettings.of(config, view)
    crops, changes = CropDraws(settings, uniforms), draw_changes(settings, uniforms)
    mode, size = InterpolationMode(settings.interpolation), [settings.size, settings.size]
    pixels = []
    for i, image in enumerate(images):
        box = crops.box(i, *image.shape[-2:])
        crop = TF.resized_crop(image.expand(3, -1, -1), *box, size, mode, antialias=True)
        pixels.append(_change(crop, changes, i))
    floats = TF.to_dtype(torch.stack(pixels), torch.float32, scale=True)
    return TF.normalize(floats, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])  # ImageNet's


def _change(x: Tensor, changes: Changes, i: int) -> Tensor:
    """Row i of `changes` applied to one crop: uint8 (3, S, S)."""
    if changes.flip[i]:
        x = TF.horizontal_flip(x)
    if changes.jitter[i]:
        factors = changes.factors[i].tolist()
        for which in changes.order[i].tolist():
            x = JITTER[which](x, factors[which])
    if changes.grey[i]:
        x = TF.rgb_to_grayscale(x, num_output_channels=3)
    if changes.blur[i]:
        x = TF.gaussian_blur(x, [13, 13], [float(changes.sigma[i])] * 2)
    if changes.solarize[i]:
        x = TF.solarize(x, SOLARIZE_FROM)
    return x
