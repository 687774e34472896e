"""Image files to 8-bit RGB tensors: regular files of formats that are decoded within this process."""

from __future__ import annotations

from typing import BinaryIO

from PIL import Image, features
from torch import Tensor

from adasim.data.contents import open_regular
from adasim.data.images import Reduction, Unreadable
from adasim.util.rgb import reduce_jpeg, to_tensor

try:
    import pillow_heif
except ImportError:  # the extra `heic` is not installed
    _HAS_HEIF = False
else:
    pillow_heif.register_heif_opener()
    _HAS_HEIF = True
_HAS_AVIF = "avif" in features.get_supported_modules()

HEIC_ENDINGS = ("heic", "heif", "hif")
EXTENSIONS = frozenset(
    ["jpg", "jpeg", "jfif", "png", "bmp", "gif", "webp", "tif", "tiff", "ppm", "pgm"]
    + (["avif"] if _HAS_AVIF else [])
    + (list(HEIC_ENDINGS) if _HAS_HEIF else [])
)
FORMATS = ["JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM"]
"""What a file may hold whatever its name says: formats that PIL, or pillow-heif, decodes by itself. PIL knows others,
for which it starts programs (EPS: Ghostscript)."""
FORMATS += (["AVIF"] if _HAS_AVIF else []) + (["HEIF"] if _HAS_HEIF else [])
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1")  # at byte 8, after a length and "ftyp"


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
        file.seek(8)
        is_heic = file.read(4) in _HEIC_BRANDS and not _HAS_HEIF
        what = "a HEIC photo; pip install pillow-heif reads it" if is_heic else "no image of a known format"
        raise ValueError(f"it holds {what}") from None
