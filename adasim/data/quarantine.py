"""Reading images by number when some cannot be read: replaced by a pure rule, and quarantined."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from adasim.data.images import ImageSet, Unreadable
from adasim.util import seeding
from adasim.util.errors import UserError

_TRIES = 100
Loaded = TypeVar("Loaded")


def read(images: ImageSet, i: int, seed: int) -> tuple[Tensor, dict[int, str]]:
    """Image i, or the one that stands in for it; and {id: where and why} of those that could not be read."""
    return first_readable(images, i, seed, images.load)


def first_readable(
    images: ImageSet, i: int, seed: int, load: Callable[[int], Loaded]
) -> tuple[Loaded, dict[int, str]]:
    """What `load` gives for image i or for the one that stands in for it; and {id: where and why} of those that could
    not be read.

    The stand-in depends on the seed and on i alone, whoever reads it and whenever: the same for any number of
    workers, for a query and for a partner, before and after a resume.
    """
    failed: dict[int, str] = {}
    wanted = i
    for attempt in range(_TRIES):
        try:
            return load(wanted), failed
        except Unreadable as error:
            failed[wanted] = str(error)
            wanted = seeding.key(seed, "stand-in", i, attempt) % len(images)
    raise UserError(
        f"{_TRIES} images of {images.name} in a row cannot be read, the first being {failed[i]}. "
        f"Check the folder and its file system."
    )


class Quarantine:
    """The images that could not be read so far: {id: where and why}. Too many of them stop the run."""

    def __init__(self, num_images: int, limit: float) -> None:
        self.found: dict[int, str] = {}
        self._num_images = num_images
        self._limit = limit
        self._lock = threading.Lock()

    def add(self, failed: dict[int, str]) -> None:
        if not failed:
            return
        with self._lock:
            self.found.update(failed)
            if len(self.found) <= self._limit * self._num_images:
                return
            first = "; ".join(self.found[i] for i in sorted(self.found)[:3])
        raise UserError(
            f"{len(self.found)} of {self._num_images} images cannot be read, more than "
            f"data.max_unreadable={self._limit:g} allows: {first}. Repair or remove them, or raise "
            f"--data.max-unreadable."
        )


def into_memory(images: ImageSet, seed: int, threads: int) -> tuple[Tensor | None, dict[int, str]]:
    """All images as uint8 (N, 3, H, W), or None if sizes differ; and what could not be read."""
    first, failed = read(images, 0, seed)
    array = torch.empty(len(images), *first.shape, dtype=torch.uint8)

    def fill(i: int) -> dict[int, str] | None:
        pixels, missing = read(images, i, seed)
        if pixels.shape != first.shape:
            return None
        array[i] = pixels
        return missing

    with ThreadPoolExecutor(max(1, threads)) as pool:
        for missing in pool.map(fill, range(len(images)), chunksize=256):
            if missing is None:
                pool.shutdown(cancel_futures=True)
                return None, {}
            failed.update(missing)
    return array, failed
