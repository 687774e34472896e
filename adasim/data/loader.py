"""`PairLoader`: whole epochs of view pairs, the same ones for any number of workers and from any step on.

Which images form a batch, which partner each one has and how each view is cut are pure functions of (seed,
epoch, id), so a loader keeps no state: resuming is asking for the same epoch from a later step. Partners come
in with the call and travel to the workers inside the items; no worker ever holds them.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from adasim import seeding
from adasim.config import ViewsConfig
from adasim.data.batched import BatchedViews
from adasim.data.images import ImageSet
from adasim.data.params import UNIFORMS
from adasim.data.reading import Quarantine, into_memory, read
from adasim.data.views import Views
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


@dataclass(frozen=True)
class _Task:
    """Which views to make: numbers 1, 2 and up, of these queries and partners."""

    epoch: int
    ids: Tensor
    partners: Tensor
    views: tuple[int, ...]

    def __reduce__(self) -> tuple[object, ...]:
        # As arrays: a tensor would take its whole storage, all N ids, to the worker through shared memory.
        return _unpack, (self.epoch, self.ids.numpy(), self.partners.numpy(), self.views)

    def sources(self, view: int) -> Tensor:
        """Whose pixels a view shows. Only view 2 is the partner's; its name is still the query's."""
        return self.partners if view == 2 else self.ids


def _unpack(epoch: int, ids: np.ndarray, partners: np.ndarray, views: tuple[int, ...]) -> _Task:
    return _Task(epoch, torch.from_numpy(ids), torch.from_numpy(partners), views)


class PairLoader:
    """Feeds a training loop.

    Args:
        images: the data set.
        views: how views are made, and by which engine.
        batch_size: images per step over all processes.
        seed: names every random choice.
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
        self._engine: _BatchEngine | _ImageEngine
        if array is not None:
            self._engine = _BatchEngine(array, views, seed, self._device)
        else:
            self._engine = _ImageEngine(images, views, seed, workers)
        self._pool = ThreadPoolExecutor(max(1, workers), thread_name_prefix="adasim-fetch")

    @property
    def quarantined(self) -> dict[int, str]:
        """{id: where and why} of the images found unreadable so far."""
        return self._quarantine.found

    @property
    def engine(self) -> str:
        """`batch` or `image`: which one makes the views."""
        return "batch" if isinstance(self._engine, _BatchEngine) else "image"

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
            tasks.append(_Task(epoch, ids, partners[ids], numbers))
        for task, (views, failed) in zip(tasks, self._engine.run(tasks), strict=True):
            self._quarantine.add(failed)
            yield Batch(task.ids.to(self._device), task.partners.to(self._device), self._deliver(views))

    def fetch(self, epoch: int, ids: Tensor, partners: Tensor) -> Pending:
        """View 2 of these queries and partners, made in the background: the pixels `epoch` would give."""
        ids, partners = ids.cpu(), partners.cpu()
        parts = self._engine.parts(len(ids))
        futures = [
            self._pool.submit(self._engine.make, _Task(epoch, i, p, (2,)))
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
        futures: list[Future[tuple[list[Tensor], dict[int, str]]]],
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


class _BatchEngine:
    """All images in memory; on a CPU a thread prepares the next batches, on an accelerator its queue does."""

    AHEAD = 2  # batches ready before they are asked for

    def __init__(self, array: Tensor, views: ViewsConfig, seed: int, device: torch.device) -> None:
        self._array = array.to(device)
        self._views = BatchedViews(views)
        self._seed = seed

    def parts(self, count: int) -> int:
        return 1

    def make(self, task: _Task) -> tuple[list[Tensor], dict[int, str]]:
        views = []
        for view in task.views:
            pixels = self._array.index_select(0, task.sources(view).to(self._array.device))
            views.append(self._views(pixels, view, self._seed, task.epoch, task.ids))
        return views, {}

    def run(self, tasks: list[_Task]) -> Iterator[tuple[list[Tensor], dict[int, str]]]:
        if self._array.device.type != "cpu":
            return map(self.make, tasks)
        return _ahead(self.make, tasks, self.AHEAD)

    def close(self) -> None:
        pass


def _ahead(
    make: Callable[[_Task], tuple[list[Tensor], dict[int, str]]], tasks: list[_Task], depth: int
) -> Iterator[tuple[list[Tensor], dict[int, str]]]:
    """make(task) for each task in order, up to `depth` of them made in a thread before they are needed."""
    ready: queue.Queue[Future[tuple[list[Tensor], dict[int, str]]]] = queue.Queue()
    with ThreadPoolExecutor(1, thread_name_prefix="adasim-views") as thread:
        try:
            for i in range(len(tasks) + depth):
                if i < len(tasks):
                    ready.put(thread.submit(make, tasks[i]))
                if i >= depth:
                    yield ready.get().result()
        finally:  # also when the consumer stops in mid-epoch
            thread.shutdown(wait=True, cancel_futures=True)


class _ImageEngine:
    """One image at a time, in `workers` processes that may persist: they know nothing of epochs."""

    def __init__(self, images: ImageSet, views: ViewsConfig, seed: int, workers: int) -> None:
        self._items = _Items(images, Views(views), seed)
        self._workers = workers
        self._plan: list[_Task] = []
        self._loader: DataLoader[tuple[list[Tensor], dict[int, str]]] | None = None

    def parts(self, count: int) -> int:
        return max(1, min(self._workers, count))

    def make(self, task: _Task) -> tuple[list[Tensor], dict[int, str]]:
        return self._items[task]

    def run(self, tasks: list[_Task]) -> Iterator[tuple[list[Tensor], dict[int, str]]]:
        if not self._workers:
            yield from map(self.make, tasks)
            return
        self._plan[:] = tasks
        if self._loader is None:
            self._loader = DataLoader(
                self._items,
                batch_size=None,
                sampler=self._plan,
                num_workers=self._workers,
                persistent_workers=True,
            )
        batches = iter(self._loader)
        while True:
            try:
                made = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if "worker" not in str(error):
                    raise
                self._loader = None
                raise RuntimeError(
                    f"A loader process ended unexpectedly ({error}). It was killed from outside, most often "
                    f"for want of memory: resume the run, with fewer --data.workers if it happens again."
                ) from error
            yield made

    def close(self) -> None:
        self._loader = None


class _Items(Dataset[tuple[list[Tensor], dict[int, str]]]):
    """Turns a task into its views; this is what lives in the workers."""

    def __init__(self, images: ImageSet, views: Views, seed: int) -> None:
        self._images = images
        self._views = views
        self._seed = seed

    def __getitem__(self, task: _Task) -> tuple[list[Tensor], dict[int, str]]:
        failed: dict[int, str] = {}
        decoded: dict[int, Tensor] = {}
        views = []
        for view in task.views:
            sources = task.sources(view).tolist()
            for i in sources:
                if i not in decoded:  # a standard pair's two views share one decoding
                    decoded[i], missing = read(self._images, i, self._seed)
                    failed.update(missing)
            uniforms = seeding.uniform(self._seed, f"view{view}", task.epoch, task.ids, UNIFORMS)
            views.append(self._views.batch([decoded[i] for i in sources], view, uniforms))
        return views, failed


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
