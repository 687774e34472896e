"""Pixel arithmetic that both view engines share, and that torchvision does more slowly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLUR_RADIUS = 6  # taps on either side: three standard deviations of the widest blur, 2 pixels


def shift_hue(x: Tensor, shift: Tensor | float) -> Tensor:
    """Turn the hue of x (..., 3, H, W), in [0, 1], by `shift` turns; HSV's value and saturation stay."""
    red, green, blue = x.split(1, dim=-3)
    value = torch.maximum(torch.maximum(red, green), blue)
    least = torch.minimum(torch.minimum(red, green), blue)
    spread = value - least
    divisor = spread.clamp(min=1e-12)  # a grey pixel's hue is 0 / divisor
    sixth = torch.where(  # the hue in sixths of a turn
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    sixth = sixth + 6 * shift
    sixth = sixth - 6 * (sixth / 6).floor()  # in [0, 6)
    # HSV to RGB without cases: how far each channel rises from the least to the greatest for this hue.
    rise = torch.cat([(sixth - 3).abs() - 1, 2 - (sixth - 2).abs(), 2 - (sixth - 4).abs()], dim=-3)
    return torch.addcmul(least, spread, rise.clamp_(0, 1))


def blur_taps(sigma: Tensor) -> Tensor:
    """The weights of a Gaussian of each sigma (B,) over 2 * BLUR_RADIUS + 1 pixels: float32, each row sums to
    1.
    """
    offsets = torch.arange(-BLUR_RADIUS, BLUR_RADIUS + 1)
    taps = (-0.5 * (offsets / sigma.float()[:, None]) ** 2).exp()
    return taps / taps.sum(1, keepdim=True)


def blur(x: Tensor, sigma: float) -> Tensor:
    """Gaussian blur of one image (C, H, W) with mirrored borders.

    A sum of shifted copies: unlike a convolution, it gives the same bits for any number of threads.
    """
    taps = blur_taps(torch.tensor([sigma]))[0].tolist()
    H, W = x.shape[-2:]
    padded = F.pad(x[None], [BLUR_RADIUS] * 4, mode="reflect")[0]
    across = torch.zeros(x.shape[0], padded.shape[1], W)
    for i, weight in enumerate(taps):
        across.add_(padded[:, :, i : i + W], alpha=weight)
    down = torch.zeros(x.shape)
    for i, weight in enumerate(taps):
        down.add_(across[:, i : i + H], alpha=weight)
    return down
