"""`PairLoader`: whole epochs of view pairs, the same ones for any number of workers and from any step on.

Which images form a batch, which partner each one has and how each view is cut are pure functions of (seed,
epoch, id), so a loader keeps no state: resuming is asking for the same epoch from a later step. Partners come
in with the call and travel to the workers inside the items; no worker ever holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from adasim import seeding
from adasim.config import ViewsConfig
from adasim.data.images import ImageSet
from adasim.data.loading.engines import BatchEngine, ImageEngine, Made, Task
from adasim.data.loading.reading import Quarantine, into_memory, read
from adasim.errors import UserError

_AUTO_SIDE = 64  # pixels
_AUTO_BYTES = 2 * 1024**3


class Batch(NamedTuple):
    """B query images, their partners, and [view 1, view 2, local crops...], each float32 (B, 3, S, S)."""

    ids: Tensor
    partners: Tensor
    views: list[Tensor]


class Pending(Protocol):
    """Views on their way; `result` waits for them."""

    def result(self) -> Tensor: ...


class PairLoader:
    """Feeds a training loop.

    Args:
        images: the data set.
        views: how views are made, and by which engine.
        batch_size: images per step over all processes.
        seed: random seed.
        workers: loader processes of the per-image engine; 0 works in this process.
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
        self._seed = seed
        self._device = torch.device(device)
        self._part = slice(rank * batch_size // world, (rank + 1) * batch_size // world)
        self._count = 2 + views.local_crops
        self._quarantine = Quarantine(len(images), max_unreadable)
        array = _array(images, views, seed, workers, self._quarantine)
        self._engine: BatchEngine | ImageEngine
        if array is not None:
            self._engine = BatchEngine(array, views, seed, self._device)
        else:
            self._engine = ImageEngine(images, views, seed, workers)
        self._pool = ThreadPoolExecutor(max(1, workers), thread_name_prefix="adasim-fetch")

    @property
    def quarantined(self) -> dict[int, str]:
        """{id: where and why} of the images found unreadable so far."""
        return self._quarantine.found

    def quarantine(self, found: dict[int, str]) -> None:
        """Take note of images that another process could not read; raises a `UserError` if they are too many."""
        self._quarantine.add(found)

    @property
    def engine(self) -> str:
        """`batch` or `image`: which one makes the views."""
        return "batch" if isinstance(self._engine, BatchEngine) else "image"

    def epoch(
        self, epoch: int, partners: Tensor, start: int = 0, *, first_only: bool = False
    ) -> Iterator[Batch]:
        """The batches of one epoch from step `start` on; the images left over at its end are dropped.

        `partners` (N,) holds each image's partner. With `first_only`, batches have no view 2 (the partner is
        not known yet; see `fetch`), and their views are [view 1, local crops...].
        """
        order = seeding.permutation(self._seed, "order", epoch, len(self.images))
        numbers = tuple(v for v in range(1, self._count + 1) if not (first_only and v == 2))
        tasks = []
        for step in range(start, self.steps_per_epoch):
            ids = order[step * self.batch_size : (step + 1) * self.batch_size][self._part]
            tasks.append(Task(epoch, ids, partners[ids], numbers))
        for task, (views, failed) in zip(tasks, self._engine.run(tasks), strict=True):
            self._quarantine.add(failed)
            yield Batch(task.ids.to(self._device), task.partners.to(self._device), self._deliver(views))

    def fetch(self, epoch: int, ids: Tensor, partners: Tensor) -> Pending:
        """View 2 of these queries and partners, made in the background: the pixels `epoch` would give."""
        ids, partners = ids.cpu(), partners.cpu()
        parts = self._engine.parts(len(ids))
        futures = [
            self._pool.submit(self._engine.make, Task(epoch, i, p, (2,)))
            for i, p in zip(ids.tensor_split(parts), partners.tensor_split(parts), strict=True)
        ]
        return _Fetched(futures, self._quarantine, self._deliver)

    def close(self) -> None:
        """End the background threads and the worker processes."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._engine.close()

    def _deliver(self, views: list[Tensor]) -> list[Tensor]:
        return [view.to(self._device, non_blocking=True) for view in views]


class _Fetched:
    def __init__(
        self,
        futures: list[Future[Made]],
        quarantine: Quarantine,
        deliver: Callable[[list[Tensor]], list[Tensor]],
    ) -> None:
        self._futures = futures
        self._quarantine = quarantine
        self._deliver = deliver

    def result(self) -> Tensor:
        made = [future.result() for future in self._futures]
        for _, failed in made:
            self._quarantine.add(failed)
        return self._deliver([torch.cat([views[0] for views, _ in made])])[0]


def _array(
    images: ImageSet, views: ViewsConfig, seed: int, workers: int, quarantine: Quarantine
) -> Tensor | None:
    """The images in memory if the batch engine is to work on them, else None for the per-image engine."""
    if views.engine == "image":
        return None
    array = images.as_array()
    if views.engine == "auto":
        C, H, W = (read(images, 0, seed)[0] if array is None else array[0]).shape
        if max(H, W) > _AUTO_SIDE or len(images) * C * H * W > _AUTO_BYTES:
            return None
    if array is None:
        array, failed = into_memory(images, seed, workers)
        quarantine.add(failed)
    if array is None and views.engine == "batch":
        raise UserError(
            f"views.engine=batch needs images of one size, and those of {images.name} differ. "
            f"Use --views.engine image."
        )
    return array
