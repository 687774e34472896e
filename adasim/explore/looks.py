"""One pass over the pixels: size, hash and thumbnail of every image, and sheets of thumbnails for the page."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from adasim.data import ImageSet, Unreadable
from adasim.explore.align import SIDE

TILE = 112
"""Side in pixels of the largest thumbnail on the page."""
_LOSSLESS = 48  # tiles up to this side keep every pixel
_FEW, _MANY = (
    8,
    16,
)  # tiles in a row, and rows, of a sheet of large or small tiles: it is decoded in milliseconds
_CHUNK = 512  # images read at a time


@dataclass
class Looks:
    """What the images look like, in the order of their ids."""

    sizes: Tensor
    """(N, 2) int64: height and width; 0 for an image that cannot be read."""
    hashes: list[str]
    """Of each image's pixels; "" for an image that cannot be read."""
    small: Tensor
    """(N, 3, SIDE, SIDE) uint8."""
    sheets: list[bytes]
    """WebP files of `columns` x `columns` tiles each."""
    tile: int
    """Side of a tile in pixels."""
    columns: int
    unreadable: dict[int, str]
    """{id: where and why}"""


def look(sets: Sequence[ImageSet], advance: Callable[[int], None] = lambda count: None) -> Looks:
    """Read every image of these sets once, a few at a time."""
    places = [(images, i) for images in sets for i in range(len(images))]
    count = len(places)
    sizes = torch.zeros(count, 2, dtype=torch.int64)
    small = torch.zeros(count, 3, SIDE, SIDE, dtype=torch.uint8)
    hashes = [""] * count
    tiles: list[np.ndarray | None] = []  # that are in no sheet yet
    sheets: list[bytes] = []
    side = 1
    unreadable: dict[int, str] = {}
    with ThreadPoolExecutor(min(8, (os.cpu_count() or 1) + 1)) as pool:
        for start in range(0, count, _CHUNK):
            chunk = places[start : start + _CHUNK]
            for i, seen in enumerate(pool.map(_look_at, chunk), start):
                if isinstance(seen, str):
                    unreadable[i] = seen
                    tiles.append(None)
                else:
                    sizes[i] = torch.tensor(seen.size)
                    small[i] = seen.small
                    hashes[i] = seen.hash
                    tiles.append(seen.tile)
                    side = max(side, *seen.tile.shape[:2])
            while side == TILE and len(tiles) >= _FEW**2:  # no tile is larger: thumbnails need not wait
                sheets.append(_sheet(tiles[: _FEW**2], side, _FEW))
                del tiles[: _FEW**2]
            advance(len(chunk))
    columns = _MANY if side <= _LOSSLESS else _FEW
    for first in range(0, len(tiles), columns**2):
        sheets.append(_sheet(tiles[first : first + columns**2], side, columns))
    return Looks(sizes, hashes, small, sheets, side, columns, unreadable)


@dataclass
class _One:
    size: tuple[int, int]
    hash: str
    small: Tensor
    tile: np.ndarray


def _look_at(place: tuple[ImageSet, int]) -> _One | str:
    images, i = place
    try:
        pixels = images.load(i)  # (3, H, W)
    except Unreadable as error:
        return str(error)
    array = np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())
    digest = hashlib.sha256(str(array.shape).encode() + array.tobytes()).hexdigest()[:32]
    picture = Image.fromarray(array)
    small = np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BOX))
    picture.thumbnail((TILE, TILE), Image.Resampling.LANCZOS)  # keeps the shape, never enlarges
    return _One(
        size=(int(pixels.shape[1]), int(pixels.shape[2])),
        hash=digest,
        small=torch.from_numpy(small.copy()).permute(2, 0, 1),
        tile=np.asarray(picture),
    )


def _sheet(tiles: Sequence[np.ndarray | None], side: int, columns: int) -> bytes:
    """Up to columns x columns tiles side by side, each in the middle of its square, on nothing."""
    sheet = np.zeros((columns * side, columns * side, 4), dtype=np.uint8)
    for place, tile in enumerate(tiles):
        if tile is not None:
            height, width = tile.shape[:2]
            top = place // columns * side + (side - height) // 2
            left = place % columns * side + (side - width) // 2
            sheet[top : top + height, left : left + width, :3] = tile
            sheet[top : top + height, left : left + width, 3] = 255
    file = io.BytesIO()
    options = (
        {"lossless": True, "method": 0, "quality": 0} if side <= _LOSSLESS else {"quality": 80, "method": 3}
    )
    Image.fromarray(sheet).save(file, "WEBP", **options)
    return file.getvalue()
