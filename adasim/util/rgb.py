"""Any PIL image as an 8-bit RGB tensor, at a bounded cost in memory.

Pixels are converted in strips straight into the result, so that beside PIL's own image (at most 4 bytes a pixel)
and the result (3 bytes a pixel, twice where a camera's orientation is undone) only a strip is held. At the limit
of `MAX_PIXELS` that is under two gigabytes. The three colours of a pixel lie side by side, as PIL gives them and as
torch resizes them fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

MAX_PIXELS = 178_956_970  # half a gigabyte as RGB. More is a mistake or a decompression bomb, to PIL as well
_STRIP = 1 << 20  # pixels converted at a time
_ORIENTATION = 0x0112  # of EXIF
_WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")


def to_tensor(image: Image.Image) -> Tensor:
    """Any PIL image as RGB, uint8 (3, H, W): the right way up, alpha on white, deep greys scaled to 8 bits.

    Greys of more than 8 bits are scaled by the depth that the image uses: the least of 8, 10, 12, ... bits that
    holds its greatest value. So 4095 becomes 255 where no value is greater, as in a 12-bit camera's 16-bit files,
    and 65535 becomes 255 where all 16 bits are used. Floats are taken as 0..1, or as 0..255 if any is above 1.
    """
    _size(image)
    image.load()
    width, height = image.size  # of a HEIC, decoding may correct it
    rows = max(1, _STRIP // max(1, width))
    strips = [(top, min(top + rows, height)) for top in range(0, height, rows)]
    deep = image.mode.startswith(("I", "F"))
    full = _full_scale(image, strips) if deep else 0.0
    rgb = np.empty((height, width, 3), dtype=np.uint8)
    for top, bottom in strips:
        strip = image if len(strips) == 1 else image.crop((0, top, width, bottom))
        rgb[top:bottom] = _to_8_bits(strip, full) if deep else _to_rgb(strip)
    return _upright(torch.from_numpy(rgb).permute(2, 0, 1), _orientation(image))


def reduce_jpeg(image: Image.Image, reduction: Callable[[int, int], int]) -> int:
    """Have a JPEG that is open, but not decoded yet, decoded at 1/s of its size, and say s.

    `reduction` is told the image's height and width, the right way up, and answers with the greatest s that will do
    (1, 2, 4 or 8). Pixel (y, x) of the result shows the square of s by s pixels from (s * y, s * x) on. Other formats
    have no such means, nor has a photo that must be turned and does not consist of whole squares: then s is 1.
    """
    if image.format not in ("JPEG", "MPO"):
        return 1
    width, height = _size(image)
    orientation = _orientation(image)
    scale = reduction(*((width, height) if orientation in _ON_A_SIDE else (height, width)))
    while scale > 1 and orientation in _TURNED and (width % scale or height % scale):
        scale //= 2
    if scale > 1:
        image.draft(None, (width // scale, height // scale))
    return scale


def _size(image: Image.Image) -> tuple[int, int]:
    """Width and height, known from the header before a pixel is decoded. Raises ValueError above `MAX_PIXELS`."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels is more than {MAX_PIXELS}")
    return width, height


def _orientation(image: Image.Image) -> Any:
    """What EXIF says of how the camera was held; None where there is no EXIF, or a damaged one."""
    try:
        return image.getexif().get(_ORIENTATION)
    except Exception:  # PIL meets any bytes here, and raises nearly anything
        return None


def _to_rgb(strip: Image.Image) -> np.ndarray:
    """uint8 (h, w, 3)"""
    if strip.mode in _WITH_ALPHA or "transparency" in strip.info:
        strip = strip.convert("RGBA")
        strip = Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip)
    return np.asarray(strip if strip.mode == "RGB" else strip.convert("RGB"))


def _full_scale(image: Image.Image, strips: list[tuple[int, int]]) -> float:
    """The value that becomes 255."""
    top = -np.inf
    for first, last in strips:
        values = np.asarray(image.crop((0, first, image.width, last)))
        top = max(top, values.max())
        if image.mode == "F" and not np.isfinite(values).all():
            raise ValueError("the image has non-finite values")
    if image.mode == "F":
        return 1.0 if top <= 1 else 255.0
    bits = max(8, int(top).bit_length() if top > 0 else 0)
    return 2.0 ** (bits + bits % 2) - 1


def _to_8_bits(strip: Image.Image, full: float) -> np.ndarray:
    """uint8 (h, w, 1)"""
    values = np.asarray(strip) * (255 / full)
    return values.round().clip(0, 255).astype(np.uint8)[:, :, None]


def _upright(rgb: Tensor, orientation: Any) -> Tensor:
    """Undo what EXIF says of how the camera was held: 1 upright, 3 head down, 6 and 8 on a side, the others
    mirrored."""
    return _TURNED[orientation](rgb).contiguous() if orientation in _TURNED else rgb


_TURNED: dict[Any, Callable[[Tensor], Tensor]] = {
    2: lambda x: x.flip(2),
    3: lambda x: x.flip(1, 2),
    4: lambda x: x.flip(1),
    5: lambda x: x.transpose(1, 2),
    6: lambda x: x.flip(1).transpose(1, 2),
    7: lambda x: x.flip(1, 2).transpose(1, 2),
    8: lambda x: x.flip(2).transpose(1, 2),
}
_ON_A_SIDE = (5, 6, 7, 8)
