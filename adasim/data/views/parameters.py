"""What is random about a view: one row of uniforms becomes a crop, and the changes of its colours.

Crops are cut in two places (`crops`: from a batch in memory, or one by one in loader processes). Both take their
boxes from here, so one name (seed, view, epoch, image id) means the same view in both, up to the rounding of 8-bit
pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.util import seeding

_TRIES = 10  # torchvision's RandomResizedCrop gives up after as many
_COLUMNS = {"shape": 2 * _TRIES, "place": 2, "flip": 1, "apply": 4, "jitter": 4, "order": 4, "sigma": 1}
UNIFORMS = sum(_COLUMNS.values())
RATIO = (3 / 4, 4 / 3)
SIGMA = (0.1, 2.0)
SOLARIZE_FROM = 128  # 8-bit levels from here up are inverted


@dataclass(frozen=True)
class ViewSettings:
    """The augmentation of one view: the configuration's probabilities and ranges times its strengths."""

    size: int
    scale: tuple[float, float]
    interpolation: Literal["bilinear", "bicubic"]
    jitter: tuple[float, float, float, float]
    """Ranges of brightness, contrast, saturation and hue."""
    jitter_p: float
    grey_p: float
    blur_p: float
    solarize_p: float

    @classmethod
    def of(cls, config: ViewsConfig, view: int) -> ViewSettings:
        """Views 1 and 2 are the global ones; from 3 on they are local crops."""
        local = view > 2
        brightness, contrast, saturation, hue = (config.color * s for s in config.jitter)
        return cls(
            size=config.local_size if local else config.size,
            scale=config.local_scale if local else config.scale,
            interpolation=config.interpolation,
            jitter=(brightness, contrast, saturation, hue),
            jitter_p=0.8 if config.color else 0.0,
            grey_p=0.2 * config.color,
            blur_p=config.blur_p[min(view, 3) - 1] * config.blur,
            solarize_p=0.0 if local else config.solarize_p[view - 1] * config.solarize,
        )


def view_uniforms(seed: int, view: int, epoch: int, ids: Tensor) -> Tensor:
    """What view number `view` of these images in this epoch is drawn from: float64 (B, UNIFORMS), a pure function of
    the arguments. The only place that says how a view's randomness is named."""
    return seeding.uniform(seed, f"view{view}", epoch, ids, UNIFORMS)


@dataclass(frozen=True)
class Boxes:
    """Where B crops lie, in whole pixels of images at their full size; every field is int64 (B,)."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


@dataclass(frozen=True)
class Changes:
    """What happens to B crops after they are cut, whatever size their images had; every field has B rows."""

    flip: Tensor
    jitter: Tensor
    """Whether the colours are jittered at all."""
    factors: Tensor
    """(B, 4): brightness, contrast and saturation factors, and the shift of hue in turns."""
    order: Tensor
    """(B, 4): which of the four comes first, second, third, fourth."""
    grey: Tensor
    blur: Tensor
    sigma: Tensor
    solarize: Tensor

    def part(self, rows: slice) -> Changes:
        """Those of some of the crops."""
        return Changes(*(getattr(self, field.name)[rows] for field in fields(self)))


def draw_changes(settings: ViewSettings, uniforms: Tensor) -> Changes:
    """From uniforms float64 (B, UNIFORMS)."""
    u = _columns(uniforms)
    jitter, grey, blur, solarize = u["apply"].unbind(1)
    ranges = torch.tensor(settings.jitter, dtype=torch.float64)
    neutral = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    return Changes(
        flip=u["flip"][:, 0] < 0.5,
        jitter=jitter < settings.jitter_p,
        factors=neutral + ranges * (2 * u["jitter"] - 1),
        order=u["order"].argsort(1),
        grey=grey < settings.grey_p,
        blur=blur < settings.blur_p,
        sigma=SIGMA[0] + (SIGMA[1] - SIGMA[0]) * u["sigma"][:, 0],
        solarize=solarize < settings.solarize_p,
    )


@dataclass(frozen=True)
class CropDraws:
    """What is random about B crops, before the sizes of their images are known.

    The rule is that of torchvision's RandomResizedCrop: the first of ten random shapes that fits, else the largest,
    centred. `boxes` applies it to a batch, `box` to one image: the same arithmetic, so the same pixels.
    """

    shares: Tensor
    """(B, tries): of the image's area."""
    ratios: Tensor
    """(B, tries): width over height."""
    place: Tensor
    """(B, 2): where between the top and the bottom, the left and the right."""

    @classmethod
    def of(cls, settings: ViewSettings, uniforms: Tensor) -> CropDraws:
        u = _columns(uniforms)
        (least, most), (low, high) = settings.scale, (math.log(ratio) for ratio in RATIO)
        shape = u["shape"]
        return cls(
            shares=least + (most - least) * shape[:, :_TRIES],
            ratios=(low + (high - low) * shape[:, _TRIES:]).exp(),
            place=u["place"],
        )

    def boxes(self, heights: Tensor, widths: Tensor) -> Boxes:
        """For images of these sizes (B,)."""
        H, W = heights.double()[:, None], widths.double()[:, None]
        area = H * W * self.shares
        tall, wide = (area / self.ratios).sqrt().round(), (area * self.ratios).sqrt().round()  # (B, tries)
        fits = (tall > 0) & (tall <= H) & (wide > 0) & (wide <= W)
        first = fits.int().argmax(1, keepdim=True)
        h, w = tall.gather(1, first), wide.gather(1, first)
        top = (self.place[:, :1] * (H - h + 1)).floor()
        left = (self.place[:, 1:] * (W - w + 1)).floor()

        fallback = ~fits.any(1, keepdim=True)
        if fallback.any():
            h2 = torch.minimum(H, (W / RATIO[0]).round())
            w2 = torch.minimum(W, (H * RATIO[1]).round())
            h, w = torch.where(fallback, h2, h), torch.where(fallback, w2, w)
            top = torch.where(fallback, ((H - h) / 2).floor(), top)
            left = torch.where(fallback, ((W - w) / 2).floor(), left)
        return Boxes(*(t[:, 0].long() for t in (top, left, h, w)))

    def box(self, row: int, H: int, W: int) -> tuple[int, int, int, int]:
        """Top, left, height and width of one crop: for a single image tensors would cost more than the numbers."""
        for share, ratio in zip(self.shares[row].tolist(), self.ratios[row].tolist(), strict=True):
            area = H * W * share
            h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < h <= H and 0 < w <= W:
                down, right = self.place[row].tolist()
                return math.floor(down * (H - h + 1)), math.floor(right * (W - w + 1)), h, w
        h, w = min(H, round(W / RATIO[0])), min(W, round(H * RATIO[1]))
        return (H - h) // 2, (W - w) // 2, h, w


def _columns(uniforms: Tensor) -> dict[str, Tensor]:
    return dict(zip(_COLUMNS, uniforms.split(list(_COLUMNS.values()), dim=1), strict=True))
