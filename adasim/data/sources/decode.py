"""Image files to 8-bit RGB tensors: regular files of formats that PIL decodes by itself."""

from __future__ import annotations

from typing import BinaryIO

from PIL import Image, features
from torch import Tensor

from adasim.data.contents import open_regular
from adasim.data.images import Reduction, Unreadable
from adasim.rgb import reduce_jpeg, to_tensor

EXTENSIONS = frozenset(["jpg", "jpeg", "jfif", "png", "bmp", "gif", "webp", "tif", "tiff", "ppm", "pgm"])
_AVIF = ["AVIF"] if "avif" in features.get_supported_modules() else []
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM", *_AVIF)
"""What a file may hold whatever its name says: formats that PIL decodes by itself. PIL knows others, for which it
starts programs (EPS: Ghostscript)."""


def decode(path: str) -> Tensor:
    """The file's image as RGB, uint8 (3, H, W), the right way up. Raises `Unreadable`."""
    return decode_reduced(path, None)[0]


def decode_reduced(path: str, reduction: Reduction | None) -> tuple[Tensor, int]:
    """`decode`, of a JPEG at 1/s of its size; and s. See `ImageSet.load_reduced`."""
    try:
        with open_regular(path) as file, open_image(file) as image:
            scale = 1 if reduction is None else reduce_jpeg(image, reduction)
            return to_tensor(image), scale
    except FileNotFoundError:
        raise Unreadable(path, "the file is gone") from None
    except Exception as error:  # decoders meet hostile bytes: they raise nearly anything
        raise Unreadable(path, f"{error} ({type(error).__name__})") from None


def open_image(file: BinaryIO) -> Image.Image:
    """PIL's image of an open file; nothing but its header is read yet."""
    try:
        return Image.open(file, formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise ValueError("it holds no image of a known format") from None
