"""A folder of image files: found once, in a fixed order; decoded on demand to 8-bit RGB."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from adasim.data.images import ImageSet, Unreadable
from adasim.errors import UserError

EXTENSIONS = frozenset(["jpg", "jpeg", "jfif", "png", "bmp", "gif", "webp", "tif", "tiff", "ppm", "pgm"])
MAX_PIXELS = 89_478_485  # a quarter of a gigabyte as RGB; more is a mistake or a decompression bomb
_SPLITS = {"train": ("train", "training"), "test": ("test", "val", "valid", "validation")}


class FolderImages(ImageSet):
    """Every image file under a folder, depth first, names sorted: the order of torchvision's ImageFolder.

    The class of an image is the first-level folder it lies in, however deep. When any image lies directly in
    the folder, there are no classes.
    """

    def __init__(self, root: str | Path, name: str | None = None) -> None:
        self.root = str(root)
        self.name = name or Path(root).name
        paths: list[bytes] = []
        sizes: list[int] = []
        for path, size in _walk(os.fsencode(self.root), b""):
            paths.append(path)
            sizes.append(size)
        if not paths:
            raise UserError(
                f"No images in {self.root}: looked for files ending in {', '.join(sorted(EXTENSIONS))}. "
                f"Name the folder that holds them."
            )
        # One buffer instead of a million strings: small, and forked loader processes never touch (copy) it.
        self._paths = b"".join(paths)
        self._ends = np.cumsum([len(p) for p in paths], dtype=np.int64)
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self.labels, self.classes = _classes(paths)

    def __len__(self) -> int:
        return len(self._ends)

    def load(self, i: int) -> Tensor:
        return decode(self.where(i))

    def where(self, i: int) -> str:
        return os.path.join(self.root, self._path(i))

    def listing(self) -> list[str]:
        return [f"{self._path(i)} {size}" for i, size in enumerate(self._sizes.tolist())]

    def _path(self, i: int) -> str:
        start = self._ends[i - 1] if i else 0
        return os.fsdecode(self._paths[start : self._ends[i]])


def find_split(root: str, split: str) -> str:
    """The subfolder of this split where the folder is divided into train/ and test/ (or val/), else the
    folder.
    """
    if not os.path.isdir(root):
        raise UserError(f"No such folder: {root}. Check --data.source.")
    found = {
        key: next((n for n in names if os.path.isdir(os.path.join(root, n))), None)
        for key, names in _SPLITS.items()
    }
    if found["train"] and found["test"]:
        return os.path.join(root, found[split] or "")
    if split == "test":
        raise UserError(
            f"{root} has no test images: it is not divided into train/ and test/ (or val/). "
            f"Divide it, or name a folder of test images."
        )
    return root


def _walk(folder: bytes, prefix: bytes) -> Iterator[tuple[bytes, int]]:
    """(relative path, size in bytes) of every image file: this folder's own first, then each subfolder's."""
    files: list[tuple[bytes, int]] = []
    folders: list[bytes] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(b"."):
                continue
            if entry.is_dir():
                folders.append(entry.name)
            elif entry.name.rpartition(b".")[2].lower().decode("latin-1") in EXTENSIONS:
                files.append((entry.name, _size(entry)))
    for name, size in sorted(files):
        yield prefix + name, size
    for name in sorted(folders):
        yield from _walk(os.path.join(folder, name), prefix + name + b"/")


def _size(entry: os.DirEntry[bytes]) -> int:
    try:
        return entry.stat().st_size
    except OSError:  # a dangling link: it stays in the list, and reading it will say why
        return -1


def _classes(paths: list[bytes]) -> tuple[Tensor | None, list[str]]:
    if any(b"/" not in p for p in paths):
        return None, []
    names = sorted({p.partition(b"/")[0] for p in paths})
    number = {name: c for c, name in enumerate(names)}
    labels = torch.tensor([number[p.partition(b"/")[0]] for p in paths])
    return labels, [os.fsdecode(name) for name in names]


def decode(path: str) -> Tensor:
    """The file's image as RGB, uint8 (3, H, W), the right way up. Raises `Unreadable`."""
    try:
        with Image.open(path) as image:
            return to_tensor(image)
    except FileNotFoundError:
        raise Unreadable(path, "the file is gone") from None
    except Exception as error:  # decoders meet hostile bytes: they raise nearly anything
        raise Unreadable(path, f"{error} ({type(error).__name__})") from None


def to_tensor(image: Image.Image) -> Tensor:
    """Any PIL image as RGB, uint8 (3, H, W): the right way up, 16 bits scaled to 8, alpha on white."""
    width, height = image.size
    if width * height > MAX_PIXELS:  # read from the header, before a pixel is decoded
        raise ValueError(f"{width} x {height} pixels is more than {MAX_PIXELS}")
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        image = _to_8_bits(image)
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    rgb = np.array(image.convert("RGB"))
    return torch.from_numpy(rgb).permute(2, 0, 1).contiguous()


def _to_8_bits(image: Image.Image) -> Image.Image:
    """PIL clips 16-bit greys at 255 on conversion; they are scaled here. Floats are taken as 0..1 or as
    0..255.
    """
    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("the image has non-finite values")
    top = values.max()
    if image.mode == "F":
        values *= 255 if top <= 1 else 1
    elif image.mode != "I" or top > 255:
        values /= 257  # 65535 becomes 255
    return Image.fromarray(values.round().clip(0, 255).astype(np.uint8))
