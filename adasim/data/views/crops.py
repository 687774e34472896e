"""Crops, resized: of whole batches in memory, on any device; or of one image, 8-bit, in a loader process.

In memory, cropping and resizing are linear and separable, so each is one small matrix per image and axis: a crop is
rows @ image @ columns^T, for all images in one batched product. Of one image, torch resizes the 8-bit pixels.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from adasim.data.views.colours import apply_matrices
from adasim.data.views.parameters import Boxes, ViewSettings

_TABLE_SIDE = 32  # up to this side all resize matrices are kept: 2,048 of them, 8 MB for views of 32 pixels


def crop_batch(images: Tensor, settings: ViewSettings, boxes: Boxes, flip: Tensor) -> Tensor:
    """Crops of images uint8 (B, C, H, W), some flipped: float32 (B, C, S, S) in 0..1."""
    H, W = images.shape[-2:]
    rows = _resize_matrices(boxes.top, boxes.height, H, settings.size, settings.interpolation)
    columns = _resize_matrices(boxes.left, boxes.width, W, settings.size, settings.interpolation, flip)
    return apply_matrices(images.float().div_(255), rows, columns).clamp_(0, 1)


def crop_image(image: Tensor, settings: ViewSettings, box: tuple[int, int, int, int]) -> Tensor:
    """One crop of an image uint8 (3, H, W), by its top, left, height and width: uint8 (3, S, S)."""
    top, left, height, width = box
    part = image[None, :, top : top + height, left : left + width]
    return F.interpolate(
        part, size=(settings.size, settings.size), mode=settings.interpolation, antialias=True
    )[0]


def crop_reduced(
    image: Image.Image, scale: int, settings: ViewSettings, box: tuple[int, int, int, int]
) -> Tensor:
    """The same from an image that was decoded at 1/scale of its size. The box is in pixels of the full size, and need
    not begin or end at a whole pixel of the reduced one: that PIL can do, and torch cannot."""
    top, left, height, width = (side / scale for side in box)
    crop = image.resize(
        (settings.size, settings.size),
        Image.Resampling[settings.interpolation.upper()],
        box=(left, top, left + width, top + height),
    )
    return torch.from_numpy(np.array(crop)).permute(2, 0, 1)


def reduction(crops: list[tuple[int, int, int]]) -> int:
    """The greatest s of 1, 4, 8 so that crops (height, width, size of the view) of an image at 1/s of its size are
    still at least as large as their views: none is enlarged that would not have been.

    JPEG's 1/2 is left out: it was no faster than the full size, whose crops torch resizes faster than PIL does.
    """
    room = min(min(height, width) / size for height, width, size in crops)
    return max((s for s in (4, 8) if s <= room), default=1)


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
    start: Tensor, length: Tensor, size_in: int, size_out: int, interpolation: str, flip: Tensor | None = None
) -> Tensor:
    """`resize_matrix`, upside down where `flip` says so; for small images, by looking up the few crops there can
    be."""
    if size_in <= _TABLE_SIDE:
        row = start * size_in + length - 1
        row = row if flip is None else row + size_in * size_in * flip
        return _resize_table(size_in, size_out, interpolation).index_select(0, row)
    matrix = resize_matrix(start, length, size_in, size_out, interpolation)
    return matrix if flip is None else torch.where(flip[:, None, None], matrix.flip(1), matrix)


@lru_cache(maxsize=8)
def _resize_table(size_in: int, size_out: int, interpolation: str) -> Tensor:
    """The matrices of all crops from size_in pixels: (start, length) is row start * size_in + length - 1; then the
    same ones upside down."""
    rows = torch.arange(size_in * size_in)
    matrix = resize_matrix(rows // size_in, rows % size_in + 1, size_in, size_out, interpolation)
    return torch.cat([matrix, matrix.flip(1)])
