"""`PairLoader`: whole epochs of view pairs, the same ones for any number of workers and from any step on.

Which images form a batch, which partner each one has and how each view is cut are pure functions of (seed,
epoch, id), so a loader keeps no state: resuming is asking for the same epoch from a later step. Partners come
in with the call and travel to the workers inside the tasks; no worker ever holds them.

Small images of one size are kept in memory, on the device, and cropped there. All others are cropped by loader
processes to 8-bit pixels. Everything after the crop happens in whole batches on the device, by one and the same code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.data.augment import BatchedViews
from adasim.data.crop_worker import CropSource, Cut, Task, first_readable
from adasim.data.images import ImageSet
from adasim.data.pool import Failed
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
        self.images = images
        self.batch_size = batch_size
        self.steps_per_epoch = len(images) // batch_size
        self.workers = workers
        self._seed = seed
        self._world = world
        self._device = torch.device(device)
        self._part = slice(rank * batch_size // world, (rank + 1) * batch_size // world)
        self._views = BatchedViews(views)
        self.quarantined: Failed = {}
        """{id: where and why} of the images that could not be read so far."""
        self._max_unreadable = max_unreadable
        array = self._into_memory() if views.in_memory else None
        self._array = None if array is None else array.to(self._device)
        self._crops: CropSource | None = None
        if array is None:
            self._crops = CropSource(images, views, seed, workers, batch_size // world, self._device)

    def quarantine(self, failed: Failed) -> None:
        """Take note of images that could not be read; raises a `UserError` if they are too many."""
        self.quarantined.update(failed)
        if len(self.quarantined) > self._max_unreadable * len(self.images):
            first = "; ".join(self.quarantined[i] for i in sorted(self.quarantined)[:3])
            raise UserError(
                f"{len(self.quarantined)} of {len(self.images)} images cannot be read, more than "
                f"data.max_unreadable={self._max_unreadable:g} allows: {first}. Repair or remove them, or raise "
                f"--data.max-unreadable."
            )

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

    def fetch(self, epoch: int, ids: Tensor, partners: Tensor) -> Callable[[], Tensor]:
        """View 2 of these queries and partners, made in the background, ahead of all else: the pixels `epoch` would
        give. The call that is returned waits for them."""
        task = Task(epoch, ids.cpu(), partners.cpu(), (2,))
        if self._crops is None:
            [view] = self._from_memory(task)
            return lambda: view
        cut = self._crops.cut(task, urgent=True)

        def wait() -> Tensor:
            self.quarantine(cut.wait())
            cut.send()
            return self._finish(cut)[0]

        return wait

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
                    self.quarantine(due.wait())
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

    def _into_memory(self) -> Tensor | None:
        """The images, if they are few, small and of one size, else None."""
        images = self.images
        array = images.as_array()
        first = first_readable(images, 0, self._seed, images.load)[0] if array is None else array[0]
        if max(first.shape[-2:]) > _IN_MEMORY_SIDE or len(images) * first.numel() > _IN_MEMORY_BYTES:
            return None
        if array is None:
            array, failed = _read_all(images, self._seed, self.workers)
            self.quarantine(failed)
        return array


def _read_all(images: ImageSet, seed: int, threads: int) -> tuple[Tensor | None, Failed]:
    """All images as uint8 (N, 3, H, W), or None if sizes differ; and what could not be read."""
    first, failed = first_readable(images, 0, seed, images.load)
    array = torch.empty(len(images), *first.shape, dtype=torch.uint8)

    def fill(i: int) -> Failed | None:
        pixels, missing = first_readable(images, i, seed, images.load)
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
