"""What a loader process does: decode a few images, cut their crops, drop the pixels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.data.images import ImageSet
from adasim.data.loading.reading import first_readable
from adasim.data.views import CropDraws, ViewSettings, crop_image, crop_reduced, reduction, view_uniforms

TASK = 16
"""Images in a task: enough to be worth a message, few enough to be small and soon done."""


@dataclass(frozen=True)
class Task:
    """Which crops to cut: those of views 1, 2 and up, of these queries and partners."""

    epoch: int
    ids: Tensor
    partners: Tensor
    views: tuple[int, ...]

    def __reduce__(self) -> tuple[object, ...]:
        # As bytes: a tensor would take its whole storage, all N ids, to the worker through shared memory.
        ids, partners = (np.asarray(t, dtype=np.int64).tobytes() for t in (self.ids, self.partners))
        return _unpack, (self.epoch, ids, partners, self.views)

    def pieces(self) -> list[tuple[slice, Task]]:
        """As tasks of at most `TASK` images, and which rows of this one they are."""
        rows = [slice(start, start + TASK) for start in range(0, len(self.ids), TASK)]
        return [(r, Task(self.epoch, self.ids[r], self.partners[r], self.views)) for r in rows]


def _unpack(epoch: int, ids: bytes, partners: bytes, views: tuple[int, ...]) -> Task:
    first, second = (torch.frombuffer(bytearray(b), dtype=torch.int64) for b in (ids, partners))
    return Task(epoch, first, second, views)


class Cutter:
    """Cuts the crops of a task. It keeps nothing: what it makes is a pure function of the seed and the task."""

    def __init__(self, images: ImageSet, views: ViewsConfig, seed: int) -> None:
        self._images = images
        self._seed = seed
        self._reduced = views.reduced_jpeg
        self.settings = {v: ViewSettings.of(views, v) for v in range(1, 3 + views.local_crops)}

    def bytes_of(self, views: tuple[int, ...]) -> int:
        """What the crops of these views take, per image."""
        return sum(3 * self.settings[v].size ** 2 for v in views)

    def room(self, views: tuple[int, ...], count: int, memory: Tensor | None = None) -> list[Tensor]:
        """Room for the crops of `count` images, uint8 (count, 3, S, S) for each view: in `memory`, if given."""
        if memory is None:
            memory = torch.empty(count * self.bytes_of(views), dtype=torch.uint8)
        sizes = [self.settings[v].size for v in views]
        parts = memory[: count * self.bytes_of(views)].split([count * 3 * size**2 for size in sizes])
        return [part.view(count, 3, size, size) for part, size in zip(parts, sizes, strict=True)]

    def cut(self, task: Task, room: list[Tensor]) -> dict[int, str]:
        """Write the task's crops into `room`; returns {id: where and why} of images that could not be read.

        Only view 2 shows the partner; where it is drawn from is still named by the query. An image is decoded once
        for all of its views, and dropped before the next one is.
        """
        draws = {
            v: CropDraws.of(self.settings[v], view_uniforms(self._seed, v, task.epoch, task.ids))
            for v in task.views
        }
        out = dict(zip(task.views, room, strict=True))
        failed: dict[int, str] = {}
        for row, (query, partner) in enumerate(zip(task.ids.tolist(), task.partners.tolist(), strict=True)):
            shown: dict[int, list[int]] = {}
            for v in task.views:
                shown.setdefault(partner if v == 2 else query, []).append(v)
            for i, views in shown.items():
                failed |= self._cut_image(i, row, views, draws, out)
        return failed

    def _cut_image(
        self, i: int, row: int, views: list[int], draws: dict[int, CropDraws], out: dict[int, Tensor]
    ) -> dict[int, str]:
        def boxes(H: int, W: int) -> dict[int, tuple[int, int, int, int]]:
            return {v: draws[v].box(row, H, W) for v in views}

        size: tuple[int, int] = (0, 0)

        def enough(H: int, W: int) -> int:
            nonlocal size
            size = (H, W)
            return reduction([(*box[2:], self.settings[v].size) for v, box in boxes(H, W).items()])

        def load(number: int) -> tuple[Tensor, int]:
            return (
                self._images.load_reduced(number, enough) if self._reduced else (self._images.load(number), 1)
            )

        (pixels, scale), failed = first_readable(self._images, i, self._seed, load)
        if scale == 1:
            for v, box in boxes(*pixels.shape[-2:]).items():
                out[v][row] = crop_image(pixels, self.settings[v], box)
        else:
            picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
            for v, box in boxes(*size).items():
                out[v][row] = crop_reduced(picture, scale, self.settings[v], box)
        return failed
