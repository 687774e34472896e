"""What a loader process does for training, and the way of the crops to the device.

`CropWorker` decodes a few images, cuts their crops and drops the pixels; `CropSource` has whole batches cut so, and
sends them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.data.crops import CropDraws, ViewSettings, crop_image, crop_reduced, reduction, view_uniforms
from adasim.data.images import ImageSet, Unreadable
from adasim.data.pool import TASK, Failed, WorkerPool, batches_ahead, carve, task_rows, wait_for
from adasim.util import seeding
from adasim.util.errors import UserError

_TRIES = 100
Loaded = TypeVar("Loaded")


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

    def __getitem__(self, rows: slice) -> Task:
        """The same for some rows of the batch."""
        return Task(self.epoch, self.ids[rows], self.partners[rows], self.views)


def _unpack(epoch: int, ids: bytes, partners: bytes, views: tuple[int, ...]) -> Task:
    first, second = (torch.frombuffer(bytearray(b), dtype=torch.int64) for b in (ids, partners))
    return Task(epoch, first, second, views)


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


class CropWorker:
    """Cuts the crops of a task. It keeps nothing: what it makes is a pure function of the seed and the task."""

    def __init__(self, images: ImageSet, views: ViewsConfig, seed: int) -> None:
        self._images = images
        self._seed = seed
        self._reduced = views.reduced_jpeg
        self.settings = {v: ViewSettings.of(views, v) for v in range(1, 3 + views.local_crops)}

    def nbytes(self, views: tuple[int, ...], count: int) -> int:
        """What the crops of `count` images take."""
        return sum(count * 3 * self.settings[v].size ** 2 for v in views)

    def crops(self, views: tuple[int, ...], count: int, memory: Tensor | None = None) -> list[Tensor]:
        """Tensors for the crops of `count` images, uint8 (count, 3, S, S) for each view: in `memory`, if given."""
        if memory is None:
            memory = torch.empty(self.nbytes(views, count), dtype=torch.uint8)
        return carve(memory, [(count, 3, self.settings[v].size, self.settings[v].size) for v in views])

    def work(self, task: Task, out: list[Tensor]) -> Failed:
        """Write the task's crops into `out`, uint8 (B, 3, S, S) for each view; returns {id: where and why} of images
        that could not be read.

        Only view 2 shows the partner; where it is drawn from is still named by the query. An image is decoded once
        for all of its views, and dropped before the next one is.
        """
        draws = {
            v: CropDraws.of(self.settings[v], view_uniforms(self._seed, v, task.epoch, task.ids))
            for v in task.views
        }
        crops = dict(zip(task.views, out, strict=True))
        failed: Failed = {}
        for row, (query, partner) in enumerate(zip(task.ids.tolist(), task.partners.tolist(), strict=True)):
            shown: dict[int, list[int]] = {}
            for v in task.views:
                shown.setdefault(partner if v == 2 else query, []).append(v)
            for i, views in shown.items():
                failed |= self._cut_image(i, row, views, draws, crops)
        return failed

    def _cut_image(
        self, i: int, row: int, views: list[int], draws: dict[int, CropDraws], crops: dict[int, Tensor]
    ) -> Failed:
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
                crops[v][row] = crop_image(pixels, self.settings[v], box)
        else:
            picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
            for v, box in boxes(*size).items():
                crops[v][row] = crop_reduced(picture, scale, self.settings[v], box)
        return failed


class CropSource:
    """Has the crops of batches of about `batch_size` images cut, by `workers` processes or by this one."""

    def __init__(
        self,
        images: ImageSet,
        views: ViewsConfig,
        seed: int,
        workers: int,
        batch_size: int,
        device: torch.device,
    ) -> None:
        self.worker = CropWorker(images, views, seed)
        slot = self.worker.nbytes(tuple(self.worker.settings), TASK)
        self._pool = WorkerPool(self.worker.work, workers, slot)
        self._device = device
        # The model is on the device before the loader is made. A device that is pretended, as in tests, is not
        # initialised: it can lock no pages and has no streams.
        self._cuda = device.type == "cuda" and torch.cuda.is_initialized()
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._spare: dict[tuple[int, ...], list[Tensor]] = {}
        self.ahead = batches_ahead(batch_size, workers)

    def cut(self, task: Task, *, urgent: bool = False) -> Cut:
        """Begin to cut a batch; without processes, cut it."""
        memory = self._memory(task)
        crops = self.worker.crops(task.views, len(task.ids), memory)
        pieces = [(task[rows], [view[rows] for view in crops]) for rows in task_rows(len(task.ids))]
        # Of two urgent pieces, the later comes first.
        made = [
            self._pool.submit(*piece, urgent=urgent) for piece in (reversed(pieces) if urgent else pieces)
        ]
        return Cut(self, task, memory, made)

    @property
    def pids(self) -> list[int]:
        return self._pool.pids

    def close(self) -> None:
        self._pool.close()

    def send(self, memory: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """All crops of a batch to the device, in one copy that goes on beside what the device computes."""
        if self._stream is None:
            return memory.to(self._device), None
        with torch.cuda.stream(self._stream):
            there = memory.to(self._device, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return there, event

    def _memory(self, task: Task) -> Tensor:
        """Page-locked where there is CUDA; used again and again, since new pages cost more than a copy."""
        spare = self._spare.get(task.views)
        wanted = self.worker.nbytes(task.views, len(task.ids))
        if spare and len(spare[-1]) >= wanted:
            return spare.pop()
        return torch.empty(wanted, dtype=torch.uint8, pin_memory=self._cuda)

    def give_back(self, task: Task, memory: Tensor) -> None:
        """Memory that another batch may use."""
        self._spare.setdefault(task.views, []).append(memory)


class Cut:
    """The crops of one batch: first `wait`, then `send`, `take`, `release`."""

    def __init__(self, source: CropSource, task: Task, memory: Tensor, made: list[Future[Failed]]) -> None:
        self.task = task
        self._source, self._memory, self._made = source, memory, made
        self._crops: list[Tensor] = []
        self._event: torch.cuda.Event | None = None

    def wait(self) -> Failed:
        """Until all is cut; returns {id: where and why} of images that could not be read."""
        return wait_for(self._made)

    def send(self) -> None:
        """Begin to copy the crops to the device; a CPU has them."""
        there, self._event = self._source.send(self._memory)
        self._crops = self._source.worker.crops(self.task.views, len(self.task.ids), there)

    def take(self) -> list[Tensor]:
        """The crops on the device, uint8 (B, 3, S, S) of each view; what is computed next waits for the copy."""
        if self._event is not None:
            stream = torch.cuda.current_stream(self._crops[0].device)
            stream.wait_event(self._event)
            for crops in self._crops:
                crops.record_stream(stream)
        return self._crops

    def release(self) -> None:
        """The views are made (or, on a device, under way): another batch may use the memory."""
        if self._event is not None:
            self._event.synchronize()  # of a copy that began a step ago
        self._source.give_back(self.task, self._memory)

    def cancel(self) -> None:
        """Do not wait for what nobody will use; what is in work is left to end."""
        for future in self._made:
            future.cancel()
