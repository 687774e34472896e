"""Image files and PIL images as 8-bit RGB tensors: at a bounded cost in memory, by decoders within this process.

Pixels are converted in strips straight into the result, so that beside PIL's own image (at most 4 bytes a pixel)
and the result (3 bytes a pixel, twice where a camera's orientation is undone) only a strip is held. At the limit
of `MAX_PIXELS` that is under two gigabytes. The three colours of a pixel lie side by side, as PIL gives them and as
torch resizes them fastest.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image, features
from torch import Tensor

from adasim.util.errors import UserError

try:
    import pillow_heif
except ImportError:  # the extra `heic` is not installed
    HAS_HEIF = False
else:
    pillow_heif.register_heif_opener()
    HAS_HEIF = True

HEIC_ENDINGS = ("heic", "heif", "hif")
EXTENSIONS = {"jpg", "jpeg", "jfif", "png", "bmp", "gif", "webp", "tif", "tiff", "ppm", "pgm"}
FORMATS = ["JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM"]
"""What a file may hold whatever its name says: formats that PIL, or pillow-heif, decodes by itself. PIL knows others,
for which it starts programs (EPS: Ghostscript)."""
if "avif" in features.get_supported_modules():
    EXTENSIONS, FORMATS = EXTENSIONS | {"avif"}, [*FORMATS, "AVIF"]
if HAS_HEIF:
    EXTENSIONS, FORMATS = EXTENSIONS | set(HEIC_ENDINGS), [*FORMATS, "HEIF"]

MAX_PIXELS = 178_956_970  # half a gigabyte as RGB. More is a mistake or a decompression bomb, to PIL as well
UNREADABLE = "unreadable"
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1")  # at byte 8, after a length and "ftyp"
_STRIP = 1 << 20  # pixels converted at a time
_ORIENTATION = 0x0112  # of EXIF
_PIECES, _PIECE = 4, 16 * 1024  # a sampled file is read in so many pieces of so many bytes

Reduction = Callable[[int, int], int]
"""From an image's height and width to the part, 1/s, of its size that is enough: s."""


class Unreadable(Exception):  # noqa: N818  (a state of the file, as the quarantine reports it)
    """An image that cannot be decoded: `where` it is and the `reason`."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)  # both, so that it survives a trip through a worker's pickle
        self.where = where
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


# ---- files ----


def decode(path: str) -> Tensor:
    """The file's image as RGB, uint8 (3, H, W), the right way up. Raises `Unreadable`."""
    return decode_reduced(path, None)[0]


def decode_reduced(path: str, reduction: Reduction | None) -> tuple[Tensor, int]:
    """`decode`, of a JPEG at 1/s of its size; and s. See `reduce_jpeg`."""
    with reading(path), open_regular(path) as file:
        return decode_file(file, reduction)


def decode_file(file: BinaryIO, reduction: Reduction | None) -> tuple[Tensor, int]:
    """`decode_reduced` of an open file. Raises nearly anything: see `reading`."""
    with open_image(file) as image:
        scale = 1 if reduction is None else reduce_jpeg(image, reduction)
        return to_tensor(image), scale


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Decoders meet hostile bytes, and raise nearly anything: it becomes `Unreadable`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        gone = isinstance(error, FileNotFoundError) and error.filename == where
        reason = "the file is gone" if gone else f"{error} ({type(error).__name__})"
        raise Unreadable(where, reason) from None


def open_image(file: BinaryIO) -> Image.Image:
    """PIL's image of an open file; nothing but its header is read yet."""
    try:
        return Image.open(file, formats=FORMATS)
    except Image.UnidentifiedImageError:
        file.seek(8)
        is_heic = file.read(4) in _HEIC_BRANDS and not HAS_HEIF
        what = "a HEIC photo; pip install pillow-heif reads it" if is_heic else "no image of a known format"
        raise ValueError(f"it holds {what}") from None


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file, or a link to one, for reading. Anything else is refused, and never waited for: a
    named pipe would block for ever."""
    flag = getattr(os, "O_NONBLOCK", 0)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | flag))  # noqa: SIM115  (the caller closes it)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a regular file")
    return file


def hash_file(path: str | os.PathLike[str], whole: bool) -> str:
    """Hash of the file's bytes: of all, or of four pieces of 16 KB, spread from its first byte to its last.

    Files up to 64 KB are always read whole. A file that cannot be read gives `UNREADABLE`.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if whole or size <= _PIECES * _PIECE:
                return hashlib.file_digest(file, "sha256").hexdigest()[:32]
            digest = hashlib.sha256()
            for n in range(_PIECES):
                file.seek((size - _PIECE) * n // (_PIECES - 1))
                digest.update(file.read(_PIECE))
            return digest.hexdigest()[:32]
    except OSError:
        return UNREADABLE


def hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


# ---- PIL images ----


def to_tensor(image: Image.Image) -> Tensor:
    """Any PIL image as RGB, uint8 (3, H, W): the right way up, alpha on white, deep greys scaled to 8 bits.

    Greys of more than 8 bits are scaled by the depth that the image uses: the least of 8, 10, 12, ... bits that
    holds its greatest value. So 4095 becomes 255 where no value is greater, as in a 12-bit camera's 16-bit files,
    and 65535 becomes 255 where all 16 bits are used. Floats are taken as 0..1, or as 0..255 if any is above 1.
    """
    _check_size(image)
    image.load()
    width, height = image.size  # of a HEIC, decoding may correct it
    rows = max(1, _STRIP // max(1, width))
    boxes = [(0, top, width, min(top + rows, height)) for top in range(0, height, rows)]
    deep = image.mode.startswith(("I", "F"))
    full = _full_scale(image, boxes) if deep else 0.0
    rgb = np.empty((height, width, 3), dtype=np.uint8)
    for box in boxes:
        strip = image if len(boxes) == 1 else image.crop(box)
        if deep:
            strip8 = (np.asarray(strip) * (255 / full)).round().clip(0, 255).astype(np.uint8)[:, :, None]
        else:
            strip8 = np.asarray(_to_rgb(strip))
        rgb[box[1] : box[3]] = strip8
    pixels, orientation = torch.from_numpy(rgb).permute(2, 0, 1), _orientation(image)
    return _TURNED[orientation](pixels).contiguous() if orientation in _TURNED else pixels


def reduce_jpeg(image: Image.Image, reduction: Reduction) -> int:
    """Have a JPEG that is open, but not decoded yet, decoded at 1/s of its size, and say s.

    `reduction` is told the image's height and width, the right way up, and answers with the greatest s that will do
    (1, 2, 4 or 8). Pixel (y, x) of the result shows the square of s by s pixels from (s * y, s * x) on. Other formats
    have no such means, nor has a photo that must be turned and does not consist of whole squares: then s is 1.
    """
    if image.format not in ("JPEG", "MPO"):
        return 1
    _check_size(image)
    (width, height), orientation = image.size, _orientation(image)
    scale = reduction(*((width, height) if orientation in (5, 6, 7, 8) else (height, width)))
    while scale > 1 and orientation in _TURNED and (width % scale or height % scale):
        scale //= 2
    if scale > 1:
        image.draft(None, (width // scale, height // scale))
    return scale


def _check_size(image: Image.Image) -> None:
    """By the header, before a pixel is decoded."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels is more than {MAX_PIXELS}")


def _to_rgb(strip: Image.Image) -> Image.Image:
    if strip.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in strip.info:
        strip = strip.convert("RGBA")
        strip = Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip)
    return strip if strip.mode == "RGB" else strip.convert("RGB")


def _full_scale(image: Image.Image, boxes: list[tuple[int, int, int, int]]) -> float:
    """The value that becomes 255."""
    greatest = max(np.asarray(image.crop(box)).max() for box in boxes)
    if image.mode == "F":
        if not all(np.isfinite(np.asarray(image.crop(box))).all() for box in boxes):
            raise ValueError("the image has non-finite values")
        return 1.0 if greatest <= 1 else 255.0
    bits = max(8, int(max(greatest, 0)).bit_length())
    return 2.0 ** (bits + bits % 2) - 1


def _orientation(image: Image.Image) -> Any:
    """What EXIF says of how the camera was held: 1 upright, 3 head down, 6 and 8 on a side, the others mirrored; None
    where there is no EXIF, or a damaged one."""
    try:
        return image.getexif().get(_ORIENTATION)
    except Exception:  # PIL meets any bytes here, and raises nearly anything
        return None


_TURNED: dict[Any, Callable[[Tensor], Tensor]] = {
    2: lambda x: x.flip(2),
    3: lambda x: x.flip(1, 2),
    4: lambda x: x.flip(1),
    5: lambda x: x.transpose(1, 2),
    6: lambda x: x.flip(1).transpose(1, 2),
    7: lambda x: x.flip(1, 2).transpose(1, 2),
    8: lambda x: x.flip(2).transpose(1, 2),
}
