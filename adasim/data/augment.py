"""From a crop to a view: flip, jitter, grey, blur, solarise, normalise. One code for all images, in whole batches,
on the device that trains. `BatchedViews`, at the end of this file, is the whole way from images in memory to views;
its `of_crops` begins at the crops that loader processes have cut.

Everything happens in place, and on a CPU in pieces that stay in its cache: a pass over memory would cost more than
the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.data.crops import (
    SOLARIZE_FROM,
    Changes,
    CropDraws,
    ViewSettings,
    apply_matrices,
    crop_batch,
    draw_changes,
    view_uniforms,
)
from adasim.dist.devices import image_layout, to_device

BLUR_RADIUS = 6  # taps on either side: three standard deviations of the widest blur, 2 pixels
_LUMA = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue in a grey level
_CONTRAST, _SATURATION, _HUE = 1, 2, 3  # their columns in `Changes`
_PIECE = 1 << 21  # bytes of floats that a CPU works on at a time
_MATRIX_SIDE = 64  # up to this side a blur is a product with a matrix also on a CPU


def _change(x: Tensor, settings: ViewSettings, changes: Changes) -> None:
    """Colours, blur and solarisation of x (B, C, S, S) in 0..1, in place. Which rows is decided on the CPU, where it
    needs no wait for the device."""
    if settings.jitter_p:
        _jitter(x, changes)
    if settings.grey_p and x.shape[1] == 3:
        _on(x, changes.grey, lambda y, _: grey(y).expand(-1, 3, -1, -1))
    if settings.blur_p:
        _on(x, changes.blur, lambda y, rows: blur(y, changes.sigma[rows]))
    if settings.solarize_p:
        _on(x, changes.solarize, lambda y, _: torch.where(y >= SOLARIZE_FROM / 255, 1 - y, y))


def _on(x: Tensor, chosen: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replace the chosen images of x, in place, by change(images, rows)."""
    rows = chosen.nonzero()[:, 0]
    if len(rows) == len(x):
        x.copy_(change(x, rows))
    elif len(rows):
        there = to_device(rows, x.device)
        x.index_copy_(0, there, change(x.index_select(0, there), rows))


def _jitter(x: Tensor, changes: Changes) -> None:
    """Brightness, contrast, saturation and hue of each image, in its own order, in place.

    The first three pull an image towards black, towards its mean grey, or each pixel towards its own grey. So each of
    the four steps is one pull of all images, the neutral one where hue is due, and a turn of the hue of those where
    it is: they lie side by side, since the images are sorted by the step at which hue comes.
    """
    rows = changes.jitter.nonzero()[:, 0]  # rows[k] is the image that y[k] shows
    if not len(rows):
        return
    hue_at = (changes.order[rows] == _HUE).int().argmax(1)
    rows = rows[hue_at.argsort(stable=True)]
    ends = [0, *hue_at.bincount(minlength=4).cumsum(0).tolist()]
    order, factors = changes.order[rows], changes.factors[rows]  # (n, 4)
    keep = factors.gather(1, order)  # by step
    neutral = (order == _HUE) | (order == _SATURATION) if x.shape[1] == 1 else order == _HUE
    keep[neutral] = 1.0
    to_mean, to_grey = (1 - keep) * (order == _CONTRAST), (1 - keep) * (order == _SATURATION)
    turns = factors[:, _HUE : _HUE + 1]
    # (13, n, 1, 1, 1)
    table = torch.cat([keep, to_mean, to_grey, turns], 1).t().float()[..., None, None, None]
    table, there = (to_device(t, x.device) for t in (table.contiguous(), rows))
    y = x.index_select(0, there)
    for step in range(4):
        pull(y, *table[step:12:4])
        piece = slice(ends[step], ends[step + 1])
        if piece.start < piece.stop and x.shape[1] == 3:
            shift_hue(y[piece], table[12, piece])
    x.index_copy_(0, there, y)


def pull(x: Tensor, keep: Tensor, to_mean: Tensor, to_grey: Tensor) -> None:
    """x becomes keep * x + to_mean * its mean grey + to_grey * each pixel's grey, in 0..1: x (B, C, S, S) in place,
    the others (B, 1, 1, 1)."""
    level = grey(x)
    mean = level.mean((1, 2, 3), keepdim=True)
    level.mul_(to_grey).add_(mean.mul_(to_mean))
    torch.addcmul(level, x, keep, out=x).clamp_(0, 1)


def grey(x: Tensor) -> Tensor:
    """(B, 1, S, S)"""
    if x.shape[1] == 1:
        return x.clone()
    red, green, blue = x.split(1, dim=1)
    return torch.mul(red, _LUMA[0]).add_(green, alpha=_LUMA[1]).add_(blue, alpha=_LUMA[2])


def shift_hue(x: Tensor, turns: Tensor) -> None:
    """Turn the hue of x (B, 3, S, S) in 0..1, in place, by turns (B, 1, 1, 1); HSV's value and saturation stay."""
    red, green, blue = x.split(1, dim=1)
    value = torch.maximum(red, green)
    torch.maximum(value, blue, out=value)
    least = torch.minimum(red, green)
    torch.minimum(least, blue, out=least)
    spread = value.sub_(least)
    # The way from red in sixths of a turn, 0 to 3: with the least at 0 and the greatest at 1, it is 1 + g + b - r on
    # both sides of the wheel, and the greater of g and b tells which side. A grey pixel's hue does not matter.
    hue = torch.add(green, blue).sub_(red).sub_(least).div_(spread.clamp(min=1e-12)).add_(1)
    hue.copysign_(green - blue)
    hue.div_(6).add_(turns)
    hue.sub_(hue.floor()).mul_(6)  # in [0, 6)
    # HSV to RGB without cases: how far each channel rises from the least to the greatest for this hue.
    torch.sub(hue, 3, out=red)
    torch.sub(hue, 2, out=green)
    torch.sub(hue, 4, out=blue)
    x.abs_()
    red.sub_(1)
    x[:, 1:].neg_().add_(2)
    x.clamp_(0, 1).mul_(spread).add_(least)


def blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur of x (B, C, S, S), each image with its own sigma (B,), borders mirrored.

    A product with a matrix, or a sum of shifted copies, whichever is faster: unlike a convolution, both give the same
    bits for any number of threads.
    """
    if x.shape[-1] <= _MATRIX_SIDE or x.device.type != "cpu":
        matrix = blur_matrix(sigma, x.shape[-1])
        return apply_matrices(x, matrix, matrix)
    S = x.shape[-1]
    taps = to_device(blur_taps(sigma), x.device)[:, :, None, None, None]  # (B, taps, 1, 1, 1)
    padded = F.pad(x, [BLUR_RADIUS] * 4, mode="reflect")
    across = padded[..., :S] * taps[:, 0]
    for i in range(1, taps.shape[1]):
        across.addcmul_(padded[..., i : i + S], taps[:, i])
    down = across[:, :, :S] * taps[:, 0]
    for i in range(1, taps.shape[1]):
        down.addcmul_(across[:, :, i : i + S], taps[:, i])
    return down


def blur_taps(sigma: Tensor) -> Tensor:
    """The weights of a Gaussian of each sigma (B,) over 2 * BLUR_RADIUS + 1 pixels: float32, each row sums to 1."""
    offsets = torch.arange(-BLUR_RADIUS, BLUR_RADIUS + 1)
    taps = (-0.5 * (offsets / sigma.float()[:, None]) ** 2).exp()
    return taps / taps.sum(1, keepdim=True)


def blur_matrix(sigma: Tensor, size: int) -> Tensor:
    """(B, size, size): a Gaussian over 2 * BLUR_RADIUS + 1 pixels, mirrored at the borders."""
    taps = blur_taps(sigma)  # (B, taps)
    offsets = torch.arange(-BLUR_RADIUS, BLUR_RADIUS + 1)
    place = (torch.arange(size)[:, None] + offsets).abs()  # (size, taps): where each tap reads
    place = torch.where(place > size - 1, 2 * (size - 1) - place, place)
    matrix = torch.zeros(len(sigma), size, size, dtype=taps.dtype)
    return matrix.scatter_add_(
        2, place.expand(len(sigma), -1, -1), taps[:, None].expand(-1, size, -1).contiguous()
    )


class BatchedViews:
    """Makes the views that a `ViewsConfig` describes: a pure function of the pixels and of the view's name, which is
    (seed, view, epoch, id).

    >>> views, ids = BatchedViews(ViewsConfig(size=32)), torch.arange(5)
    >>> tuple(views(torch.zeros(5, 3, 48, 64, dtype=torch.uint8), view=1, seed=0, epoch=0, ids=ids).shape)
    (5, 3, 32, 32)
    """

    def __init__(self, config: ViewsConfig) -> None:
        self.settings = ViewSettings.of_all(config)
        self._mean = torch.tensor(config.mean)[:, None, None]
        self._std = torch.tensor(config.std)[:, None, None]

    def __call__(self, images: Tensor, view: int, seed: int, epoch: int, ids: Tensor) -> Tensor:
        """View number `view` of images uint8 (B, C, H, W): float32 (B, 3, S, S)."""
        settings = self.settings[view]
        uniforms = view_uniforms(seed, view, epoch, ids.cpu())
        changes = draw_changes(settings, uniforms)
        boxes = CropDraws(settings, uniforms).boxes(*images.shape[-2:])
        crops = crop_batch(images, settings, boxes, changes.flip)
        return self._finish(crops, settings, changes)

    def of_crops(self, crops: Tensor, view: int, seed: int, epoch: int, ids: Tensor) -> Tensor:
        """The same from crops uint8 (B, 3, S, S) that are cut already; they are used up."""
        settings = self.settings[view]
        changes = draw_changes(settings, view_uniforms(seed, view, epoch, ids.cpu()))
        return self._finish(crops, settings, changes, flip=changes.flip)

    def _finish(
        self, crops: Tensor, settings: ViewSettings, changes: Changes, flip: Tensor | None = None
    ) -> Tensor:
        """Views float32 (B, 3, S, S), in the device's `image_layout`, of crops (B, C, S, S), used up: uint8,
        or float32 in 0..1. With C = 1, hue, saturation and greyscale have nothing to change and are skipped."""
        B, C, S, _ = crops.shape
        mean, std = self._mean.to(crops.device), self._std.to(crops.device)
        views = torch.empty(B, 3, S, S, device=crops.device, memory_format=image_layout(crops.device))
        piece = max(4, _PIECE // (4 * C * S * S)) if crops.device.type == "cpu" else B
        for start in range(0, B, piece):
            rows = slice(start, start + piece)
            x = crops[rows]
            if flip is not None:
                _on(x, flip[rows], lambda y, _: y.flip(3))
            x = x.float().div_(255) if x.dtype == torch.uint8 else x
            _change(x, settings, changes[rows])
            views[rows] = (x - mean) / std
        return views
