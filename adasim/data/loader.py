"""`PairLoader`: whole epochs of view pairs, the same ones for any number of workers and from any step on.

Which images form a batch, which partner each one has and how each view is cut are pure functions of (seed,
epoch, id), so a loader keeps no state: resuming is asking for the same epoch from a later step. Partners come
in with the call and travel to the workers inside the tasks; no worker ever holds them.

Small images of one size are kept in memory, on the device, and cropped there. All others are cropped by loader
processes to 8-bit pixels. Everything after the crop happens in whole batches on the device, by one and the same code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.data.augment import BatchedViews
from adasim.data.crop_worker import CropSource, Cut, Task
from adasim.data.images import ImageSet
from adasim.data.quarantine import Quarantine, into_memory, read
from adasim.util import seeding
from adasim.util.errors import UserError

_IN_MEMORY_SIDE = 64  # pixels
_IN_MEMORY_BYTES = 2 * 1024**3


class Batch(NamedTuple):
    """B query images, their partners, and the views asked for, each float32 (B, 3, S, S); of a whole epoch that is
    [view 1, view 2, local crops...]."""

    ids: Tensor
    partners: Tensor
    views: list[Tensor]


class PairLoader:
    """Feeds a training loop.

    Args:
        images: the data set.
        views: how views are made.
        batch_size: images per step over all processes.
        seed: random seed.
        workers: loader processes for images that are not in memory; 0 works in this process.
        device: where batches are delivered.
        max_unreadable: the share of unreadable images above which a `UserError` stops the run.
        rank, world: this process makes the rank-th of `world` equal parts of every batch.
    """

    def __init__(
        self,
        images: ImageSet,
        views: ViewsConfig,
        *,
        batch_size: int,
        seed: int,
        workers: int = 0,
        device: str | torch.device = "cpu",
        max_unreadable: float = 0.01,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch_size > len(images):
            raise UserError(
                f"batch_size={batch_size} is more than the {len(images)} images of {images.name}. "
                f"Lower --batch-size."
            )
        if batch_size % world:
            raise UserError(f"batch_size={batch_size} cannot be divided by {world} processes.")
        self.images = images
        self.batch_size = batch_size
        self.steps_per_epoch = len(images) // batch_size
        self.workers = workers
        self._seed = seed
        self._world = world
        self._device = torch.device(device)
        self._part = slice(rank * batch_size // world, (rank + 1) * batch_size // world)
        self._views = BatchedViews(views)
        self._quarantine = Quarantine(len(images), max_unreadable)
        self._array = _array(images, views, seed, workers, self._quarantine)
        self._crops: CropSource | None = None
        if self._array is not None:
            self._array = self._array.to(self._device)
        else:
            self._crops = CropSource(images, views, seed, workers, batch_size // world, self._device)

    @property
    def quarantined(self) -> dict[int, str]:
        """{id: where and why} of the images found unreadable so far."""
        return self._quarantine.found

    def quarantine(self, found: dict[int, str]) -> None:
        """Take note of images that another process could not read; raises a `UserError` if they are too many."""
        self._quarantine.add(found)

    @property
    def in_memory(self) -> bool:
        """Whether the images are kept in memory; then there are no loader processes."""
        return self._array is not None

    @property
    def pids(self) -> list[int]:
        """Of the loader processes that run."""
        return [] if self._crops is None else self._crops.pids

    def how(self) -> str:
        """In words, where views are made, and how many images an epoch leaves out, if they are many."""
        unused = len(self.images) - self.steps_per_epoch * self.batch_size
        if unused * 10 < len(self.images):
            return self._where()
        return (
            f"{self._where()} With --batch-size {self.batch_size}, {unused} of the {len(self.images)} images, others "
            f"each time, are left out of an epoch."
        )

    def _where(self) -> str:
        if self.in_memory:
            return "The images are kept in memory and cropped there."
        if not self.workers:
            return "Images are read and cropped by this process."
        processes = f"{self.workers} loader process" + ("es" if self.workers > 1 else "")
        return f"Images are read and cropped by {processes}{' for each rank' if self._world > 1 else ''}."

    def epoch(self, epoch: int, partners: Tensor | None, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from step `start` on, with all views.

        `partners` (N,) holds each image's partner. None: they are not known yet, and view 2 is left to `fetch`.
        """
        numbers = [number for number in self._views.settings if number != 2 or partners is not None]
        return self.views(epoch, self.batches(epoch)[start:], numbers, partners)

    def batches(self, epoch: int) -> list[Tensor]:
        """The ids of each batch of an epoch, this process's part; the images left over at its end are dropped."""
        order = seeding.permutation(self._seed, "order", epoch, len(self.images))
        return [batch[self._part] for batch in order.split(self.batch_size)[: self.steps_per_epoch]]

    def views(
        self,
        epoch: int,
        batches: Iterable[Tensor],
        numbers: Sequence[int] = (1,),
        partners: Tensor | None = None,
    ) -> Iterator[Batch]:
        """The views with these numbers of any images, batch after batch as the ids in `batches` say: 1 shows the
        image, 2 its partner, 3 and up are local crops of the image.

        A view's pixels depend on (seed, epoch, id) and the partner alone, whatever it is asked for with. Without
        partners, each image is its own.
        """
        shown = tuple(numbers)
        tasks = (Task(epoch, ids, ids if partners is None else partners[ids], shown) for ids in batches)
        made = ((t, self._from_memory(t)) for t in tasks) if self._crops is None else self._from_crops(tasks)
        for task, views in made:
            yield Batch(task.ids.to(self._device), task.partners.to(self._device), views)

    def fetch(self, epoch: int, ids: Tensor, partners: Tensor) -> _Ready | _Fetched:
        """View 2 of these queries and partners, made in the background, ahead of all else: the pixels `epoch` would
        give. `result()` waits for them."""
        task = Task(epoch, ids.cpu(), partners.cpu(), (2,))
        if self._crops is None:
            return _Ready(self._from_memory(task)[0])
        return _Fetched(self, self._crops.cut(task, urgent=True))

    def close(self) -> None:
        """End the worker processes."""
        if self._crops is not None:
            self._crops.close()

    def _from_memory(self, task: Task) -> list[Tensor]:
        assert self._array is not None
        views = []
        for view in task.views:
            shown = task.partners if view == 2 else task.ids
            pixels = self._array.index_select(0, shown.to(self._array.device))
            views.append(self._views(pixels, view, self._seed, task.epoch, task.ids))
        return views

    def _from_crops(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, list[Tensor]]]:
        """The views of one task after the other, some tasks being cut ahead; on an accelerator, the crops of the
        next one are on their way to the device while the loop works on the last."""
        assert self._crops is not None
        waiting, cutting = iter(tasks), deque[Cut]()
        ahead: Cut | None = None
        try:
            while True:
                while len(cutting) < self._crops.ahead and (task := next(waiting, None)) is not None:
                    cutting.append(self._crops.cut(task))
                due = cutting.popleft() if cutting else None
                if due is not None:
                    self._quarantine.add(due.wait())
                    due.send()
                if self._device.type != "cpu":
                    due, ahead = ahead, due
                    if due is None and ahead is not None:
                        continue
                if due is None:
                    return
                yield due.task, self._finish(due)
        finally:
            for cut in (*cutting, *([ahead] if ahead else [])):
                cut.cancel()

    def _finish(self, cut: Cut) -> list[Tensor]:
        crops = zip(cut.task.views, cut.take(), strict=True)
        views = [self._views.of_crops(c, v, self._seed, cut.task.epoch, cut.task.ids) for v, c in crops]
        cut.release()
        return views


class _Ready(NamedTuple):
    view: Tensor

    def result(self) -> Tensor:
        return self.view


class _Fetched(NamedTuple):
    loader: PairLoader
    cut: Cut

    def result(self) -> Tensor:
        self.loader._quarantine.add(self.cut.wait())
        self.cut.send()
        return self.loader._finish(self.cut)[0]


def _array(
    images: ImageSet, views: ViewsConfig, seed: int, threads: int, quarantine: Quarantine
) -> Tensor | None:
    """The images in memory, if they are to be, else None: they are large, many, or of several sizes."""
    if not views.in_memory:
        return None
    array = images.as_array()
    C, H, W = (read(images, 0, seed)[0] if array is None else array[0]).shape
    if max(H, W) > _IN_MEMORY_SIDE or len(images) * C * H * W > _IN_MEMORY_BYTES:
        return None
    if array is None:
        array, failed = into_memory(images, seed, threads)
        quarantine.add(failed)
    return array
