"""Image files: opened, hashed, and decoded to 8-bit RGB tensors, by decoders within this process alone."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import BinaryIO

from PIL import Image, features
from torch import Tensor

from adasim.data.images import Reduction, Unreadable
from adasim.util.errors import UserError
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
UNREADABLE = "unreadable"
_PIECES, _PIECE = 4, 16 * 1024  # a sampled file is read in so many pieces of so many bytes


def decode(path: str) -> Tensor:
    """The file's image as RGB, uint8 (3, H, W), the right way up. Raises `Unreadable`."""
    return decode_reduced(path, None)[0]


def decode_reduced(path: str, reduction: Reduction | None) -> tuple[Tensor, int]:
    """`decode`, of a JPEG at 1/s of its size; and s. See `ImageSet.load_reduced`."""
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
        is_heic = file.read(4) in _HEIC_BRANDS and not _HAS_HEIF
        what = "a HEIC photo; pip install pillow-heif reads it" if is_heic else "no image of a known format"
        raise ValueError(f"it holds {what}") from None


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file, or a link to one, for reading. Anything else is refused, and never waited for: a
    named pipe would block for ever.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115  (the caller closes it)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a regular file")
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def hash_file(path: str | os.PathLike[str], whole: bool) -> str:
    """Hash of the file's bytes: of all, or of four pieces of 16 KB, spread from its first byte to its last.

    Files up to 64 KB are always read whole. A file that cannot be read gives `UNREADABLE`.
    """
    try:
        with open_regular(path) as file:
            if whole:
                return hashlib.file_digest(file, "sha256").hexdigest()[:32]
            size = os.fstat(file.fileno()).st_size
            if size <= _PIECES * _PIECE:
                return hash_bytes(file.read())
            digest = hashlib.sha256()
            for n in range(_PIECES):
                file.seek((size - _PIECE) * n // (_PIECES - 1))
                digest.update(file.read(_PIECE))
            return digest.hexdigest()[:32]
    except OSError:
        return UNREADABLE


def hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
