"""Views of a whole batch at once, on any device: the path for small images, which per-image Python would
starve.

Cropping, resizing, flipping and blurring are linear and separable, so each is one small matrix per image and
axis: a view is rows @ image @ columns^T, for all images in one batched product. What changes colours works on
the rows that drew it, in each image's own order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.data.views.parameters import SOLARIZE_FROM, Params, ViewSettings, draw, view_uniforms
from adasim.data.views.pixels import BLUR_RADIUS, blur_taps, shift_hue

_TABLE_SIDE = 32  # up to this side all resize matrices are kept: 1,024 of them, 4 MB for views of 32 pixels
_LUMA = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue in a grey level


class BatchedViews:
    """The augmentations of `Views`, in floating point and for whole batches.

    Its parameters are those of `Views` for the same names; its pixels agree within the rounding to 8 bits
    that torchvision does after every step.
    """

    def __init__(self, config: ViewsConfig) -> None:
        self.count = 2 + config.local_crops
        self.settings = {view: ViewSettings.of(config, view) for view in range(1, self.count + 1)}
        self._mean = torch.tensor(config.mean)[:, None, None]
        self._std = torch.tensor(config.std)[:, None, None]

    def __call__(self, images: Tensor, view: int, seed: int, epoch: int, ids: Tensor) -> Tensor:
        """View number `view` of images uint8 (B, C, H, W), named by (seed, epoch, ids): float32 (B, 3, S, S).

        With C = 1, hue, saturation and greyscale have nothing to change and are skipped.
        """
        settings = self.settings[view]
        B, _, H, W = images.shape
        uniforms = view_uniforms(seed, view, epoch, ids.cpu())
        # Parameters stay on the CPU: choosing rows there needs no wait for the device.
        params = draw(settings, torch.full((B,), H), torch.full((B,), W), uniforms)
        x = _crop(images.float().div_(255), settings, params)
        if settings.jitter_p:
            _jitter(x, params)
        if settings.grey_p and x.shape[1] == 3:
            _on(x, params.grey, lambda y, rows: _grey(y).expand(-1, 3, -1, -1))
        if settings.blur_p:
            _on(x, params.blur, lambda y, rows: _blur(y, params.sigma[rows]))
        if settings.solarize_p:
            _on(x, params.solarize, lambda y, rows: torch.where(y >= SOLARIZE_FROM / 255, 1 - y, y))
        return (x - self._mean.to(x.device)).div_(self._std.to(x.device)).expand(-1, 3, -1, -1)


def resize_matrix(start: Tensor, length: Tensor, size_in: int, size_out: int, interpolation: str) -> Tensor:
    """(B, size_out, size_in): each row holds the weights with which one output pixel sums the input pixels.

    The antialiased filter of PIL and torch: a triangle (bilinear) or Keys' cubic with a = -1/2 (bicubic),
    stretched when shrinking, cut off at the crop's edges and made to sum to 1.
    """
    start, length = start.float()[:, None, None], length.float()[:, None, None]  # whole numbers: exact
    scale = length / size_out
    centre = (torch.arange(size_out)[:, None] + 0.5) * scale  # (B, size_out, 1): pixels from the crop's edge
    place = torch.arange(size_in) + 0.5 - start  # (B, 1, size_in)
    distance = ((place - centre) / scale.clamp(min=1)).abs()
    if interpolation == "bilinear":
        weights = (1 - distance).clamp(min=0)
    else:
        # Keys' two pieces in one: t^2 (t - 1) / 2 + s^2 (1 - 2 s), with t = max(2 - d, 0), s = max(1 - d, 0).
        t, s = (2 - distance).clamp_(min=0), (1 - distance).clamp_(min=0)
        weights = t * t * (t - 1) * 0.5 + s * s * (1 - 2 * s)
    weights = weights * ((place > 0) & (place < length))
    return weights / weights.sum(2, keepdim=True)


def _resize_matrices(
    start: Tensor, length: Tensor, size_in: int, size_out: int, interpolation: str
) -> Tensor:
    """`resize_matrix`; for small images, by looking up the few crops there can be."""
    if size_in > _TABLE_SIDE:
        return resize_matrix(start, length, size_in, size_out, interpolation)
    return _resize_table(size_in, size_out, interpolation)[start * size_in + length - 1]


@lru_cache(maxsize=8)
def _resize_table(size_in: int, size_out: int, interpolation: str) -> Tensor:
    """The matrices of all crops from size_in pixels: (start, length) is row start * size_in + length - 1."""
    rows = torch.arange(size_in * size_in)
    return resize_matrix(rows // size_in, rows % size_in + 1, size_in, size_out, interpolation)


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


def _apply_matrices(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows @ x @ columns^T for every image and channel."""
    rows, columns = (m.to(x.device, torch.float32, non_blocking=True) for m in (rows, columns))
    B, C, H, W = x.shape
    across = torch.bmm(x.reshape(B, C * H, W), columns.transpose(1, 2))  # (B, C*H, S)
    return torch.matmul(rows[:, None], across.view(B, C, H, -1))


def _crop(x: Tensor, settings: ViewSettings, params: Params) -> Tensor:
    H, W = x.shape[-2:]
    rows = _resize_matrices(params.top, params.height, H, settings.size, settings.interpolation)
    columns = _resize_matrices(params.left, params.width, W, settings.size, settings.interpolation)
    columns = torch.where(params.flip[:, None, None], columns.flip(1), columns)
    return _apply_matrices(x, rows, columns).clamp_(0, 1)


def _on(x: Tensor, chosen: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replace the chosen images of x, in place, by change(images, rows)."""
    rows = chosen.nonzero()[:, 0]
    if len(rows) == len(x):
        x.copy_(change(x, rows))
    elif len(rows):
        there = rows.to(x.device, non_blocking=True)
        x.index_copy_(0, there, change(x.index_select(0, there), rows))


def _jitter(x: Tensor, params: Params) -> None:
    """Brightness, contrast, saturation and hue of each image, in its own order, in place.

    Before each of the four positions the images are sorted by what they want there, so that each change works
    on one contiguous piece.
    """
    changes = (
        (_brightness, _contrast, _saturation, shift_hue) if x.shape[1] == 3 else (_brightness, _contrast)
    )
    rows = params.jitter.nonzero()[:, 0]  # rows[k] is the image that y[k] shows
    y = x.index_select(0, rows.to(x.device, non_blocking=True))
    for position in range(4):
        wanted = params.order[rows, position]
        sort = wanted.argsort(stable=True)
        rows, y = rows[sort], y.index_select(0, sort.to(x.device, non_blocking=True))
        ends = wanted.bincount(minlength=4).cumsum(0).tolist()
        for which, change in enumerate(changes):
            piece = slice(ends[which - 1] if which else 0, ends[which])
            factors = params.factors[rows[piece], which].float()[:, None, None, None]
            y[piece] = change(y[piece], factors.to(x.device, non_blocking=True))
    x.index_copy_(0, rows.to(x.device, non_blocking=True), y)


def _grey(x: Tensor) -> Tensor:
    """(B, 1, S, S)"""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.split(1, dim=1)
    return _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue


def _brightness(x: Tensor, factor: Tensor) -> Tensor:
    return (x * factor).clamp_(0, 1)


def _contrast(x: Tensor, factor: Tensor) -> Tensor:
    mean = _grey(x).mean((1, 2, 3), keepdim=True)
    return torch.lerp(mean, x, factor).clamp_(0, 1)


def _saturation(x: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(_grey(x), x, factor).clamp_(0, 1)


def _blur(x: Tensor, sigma: Tensor) -> Tensor:
    matrix = blur_matrix(sigma, x.shape[-1])
    return _apply_matrices(x, matrix, matrix)
