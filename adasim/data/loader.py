"""`PairLoader`: the views of any images of any epoch, the same ones for any number of workers and from any step on.

Which images form a batch and how each view is cut are pure functions of (seed, epoch, id), so a loader keeps no
state: resuming is asking for the same epoch from a later step.

Small images of one size are kept in memory, on the device, and cropped there. All others are cropped by loader
processes (pool.py) to 8-bit pixels. Everything after the crop happens in whole batches on the device, by one and
the same code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.data.augment import BatchedViews
from adasim.data.crops import CropWorker, first_readable
from adasim.data.images import ImageSet
from adasim.data.pool import Failed, WorkerPool, wait_for
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
        self.quarantined: Failed = {}
        """{id: where and why} of the images that could not be read so far."""
        self._seed, self._world, self._max_unreadable = seed, world, max_unreadable
        self._device = torch.device(device)
        self._part = slice(rank * batch_size // world, (rank + 1) * batch_size // world)
        self._views = BatchedViews(views)
        array = self._into_memory() if views.in_memory else None
        self._array = None if array is None else array.to(self._device)
        sizes = [settings.size for settings in self._views.settings.values()]
        work = CropWorker(images, views, seed)
        self._pool = WorkerPool(work, 0 if self.in_memory else workers, sum(3 * size**2 for size in sizes))
        # The model is on the device before the loader is made. A device that is pretended, as in tests, is not
        # initialised: it can lock no pages and has no streams.
        self._cuda = self._device.type == "cuda" and torch.cuda.is_initialized()
        self._stream = torch.cuda.Stream(self._device) if self._cuda else None

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
        return self._pool.pids

    def how(self) -> str:
        """In words, where views are made, and how many images an epoch leaves out, if they are many."""
        processes = f"{self.workers} loader process{'es' if self.workers > 1 else ''}" if self.workers else ""
        processes += " for each rank" if processes and self._world > 1 else ""
        text = f"Images are read and cropped by {processes or 'this process'}."
        if self.in_memory:
            text = "The images are kept in memory and cropped there."
        unused = len(self.images) - self.steps_per_epoch * self.batch_size
        if unused * 10 >= len(self.images):
            text += (
                f" With --batch-size {self.batch_size}, {unused} of the {len(self.images)} images, others each time, "
                f"are left out of an epoch."
            )
        return text

    def epoch(
        self, epoch: int, partners: Tensor | None, start: int = 0, *, show_partners: bool = True
    ) -> Iterator[Batch]:
        """The batches of one epoch from step `start` on, with all views.

        `partners` (N,) holds each image's partner. None: they are not known yet, and view 2 is left to `fetch`.
        Without `show_partners`, view 2 shows the image, too.
        """
        numbers = [number for number in self._views.settings if number != 2 or partners is not None]
        shown = partners if show_partners else None
        for batch in self.views(epoch, self.batches(epoch)[start:], numbers, shown):
            if partners is not None and not show_partners:
                batch = batch._replace(partners=partners[batch.ids.cpu()].to(self._device))
            yield batch

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
        asked = ((ids, ids if partners is None else partners[ids]) for ids in batches)
        if self.in_memory:
            for ids, shown in asked:
                yield self._batch(ids, shown, self._from_memory(epoch, numbers, ids, shown))
            return
        tasks = (
            ((epoch, numbers), _rows(ids, shown), self._empty(numbers, len(ids))) for ids, shown in asked
        )
        sent = deque[tuple[Any, list[Tensor], Any]]()
        ahead = int(self._device.type != "cpu")  # the next crops travel while the loop works on the last
        for (_, rows, crops), failed in self._pool.run(tasks, self._part.stop - self._part.start):
            self.quarantine(failed)
            sent.append((rows, *self._send(crops)))
            if len(sent) > ahead:
                yield self._finished(epoch, numbers, *sent.popleft())
        for arrived in sent:
            yield self._finished(epoch, numbers, *arrived)

    def fetch(self, epoch: int, ids: Tensor, partners: Tensor) -> Callable[[], Tensor]:
        """View 2 of these queries and partners, made in the background, ahead of all else: the pixels `epoch` would
        give. The call that is returned waits for them."""
        if self.in_memory:
            [view] = self._from_memory(epoch, (2,), ids.cpu(), partners.cpu())
            return lambda: view
        rows, crops = _rows(ids, partners), self._empty((2,), len(ids))
        futures = self._pool.begin((epoch, (2,)), rows, crops, urgent=True)

        def wait() -> Tensor:
            self.quarantine(wait_for(futures))
            return self._finished(epoch, (2,), rows, *self._send(crops)).views[0]

        return wait

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def _from_memory(self, epoch: int, numbers: Sequence[int], ids: Tensor, partners: Tensor) -> list[Tensor]:
        assert self._array is not None
        views = []
        for view in numbers:
            shown = (partners if view == 2 else ids).to(self._device)
            views.append(self._views(self._array.index_select(0, shown), view, self._seed, epoch, ids))
        return views

    def _empty(self, numbers: Sequence[int], count: int) -> list[Tensor]:
        """Memory for crops, page-locked where there is CUDA."""
        sizes = [self._views.settings[view].size for view in numbers]
        return [torch.empty(count, 3, s, s, dtype=torch.uint8, pin_memory=self._cuda) for s in sizes]

    def _send(self, crops: list[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Begin to copy crops to the device, beside what it computes; a CPU has them."""
        if self._stream is None:
            return [crop.to(self._device) for crop in crops], None
        with torch.cuda.stream(self._stream):
            there = [crop.to(self._device, non_blocking=True) for crop in crops]
            return there, self._stream.record_event()

    def _finished(
        self,
        epoch: int,
        numbers: Sequence[int],
        rows: list[tuple[int, int]],
        crops: list[Tensor],
        copied: torch.cuda.Event | None,
    ) -> Batch:
        if copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            for crop in crops:
                crop.record_stream(stream)
        ids, partners = torch.tensor(rows).unbind(1)
        named = zip(numbers, crops, strict=True)
        views = [self._views.of_crops(crop, view, self._seed, epoch, ids) for view, crop in named]
        return self._batch(ids, partners, views)

    def _batch(self, ids: Tensor, partners: Tensor, views: list[Tensor]) -> Batch:
        return Batch(ids.to(self._device), partners.to(self._device), views)

    def _into_memory(self) -> Tensor | None:
        """All images as uint8 (N, C, H, W), if they are few, small and of one size, else None."""
        images, array = self.images, self.images.as_array()
        first = first_readable(images, 0, self._seed, images.load)[0] if array is None else array[0]
        if max(first.shape[-2:]) > _IN_MEMORY_SIDE or len(images) * first.numel() > _IN_MEMORY_BYTES:
            return None
        if array is not None:
            return array
        pixels, failed = torch.empty(len(images), *first.shape, dtype=torch.uint8), Failed()

        def fill(i: int) -> bool:
            image, unread = first_readable(images, i, self._seed, images.load)
            failed.update(unread)
            if image.shape == first.shape:
                pixels[i] = image
            return image.shape == first.shape

        with ThreadPoolExecutor(max(1, self.workers)) as pool:
            for fits in pool.map(fill, range(len(images))):
                if not fits:
                    pool.shutdown(cancel_futures=True)
                    return None
        self.quarantine(failed)
        return pixels


def _rows(ids: Tensor, partners: Tensor) -> list[tuple[int, int]]:
    return list(zip(ids.tolist(), partners.tolist(), strict=True))
