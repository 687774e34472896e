"""The two ways to make a batch of views: whole batches from memory, or image by image in worker processes.

Both are asked with a `Task` and answer with `Made`; neither keeps anything between two tasks.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from adasim.config import ViewsConfig
from adasim.data.images import ImageSet
from adasim.data.loading.reading import read
from adasim.data.views.batched import BatchedViews
from adasim.data.views.parameters import view_uniforms
from adasim.data.views.per_image import Views

Made = tuple[list[Tensor], dict[int, str]]
"""The views asked for, and {id: where and why} of images that could not be read."""


@dataclass(frozen=True)
class Task:
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


def _unpack(epoch: int, ids: np.ndarray, partners: np.ndarray, views: tuple[int, ...]) -> Task:
    return Task(epoch, torch.from_numpy(ids), torch.from_numpy(partners), views)


class BatchEngine:
    """All images in memory, views made when asked for: an accelerator's queue overlaps them with training, and on
    a CPU a thread that prepared them would only take the cores that train."""

    def __init__(self, array: Tensor, views: ViewsConfig, seed: int, device: torch.device) -> None:
        self._array = array.to(device)
        self._views = BatchedViews(views)
        self._seed = seed

    def parts(self, count: int) -> int:
        return 1

    def make(self, task: Task) -> Made:
        views = []
        for view in task.views:
            pixels = self._array.index_select(0, task.sources(view).to(self._array.device))
            views.append(self._views(pixels, view, self._seed, task.epoch, task.ids))
        return views, {}

    def run(self, tasks: list[Task]) -> Iterator[Made]:
        return map(self.make, tasks)

    def close(self) -> None:
        pass


class ImageEngine:
    """One image at a time, in `workers` processes that may persist: they know nothing of epochs."""

    def __init__(self, images: ImageSet, views: ViewsConfig, seed: int, workers: int) -> None:
        self._items = _Items(images, Views(views), seed)
        self._workers = workers
        self._plan: list[Task] = []
        self._loader: DataLoader[Made] | None = None

    def parts(self, count: int) -> int:
        return max(1, min(self._workers, count))

    def make(self, task: Task) -> Made:
        return self._items[task]

    def run(self, tasks: list[Task]) -> Iterator[Made]:
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
                worker_init_fn=_leave_signals_to_the_parent,
                generator=torch.Generator(),  # else it would draw from the training loop's
            )
        batches = iter(self._loader)
        while True:
            try:
                made = next(batches)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                if not _tells_of_a_lost_worker(error):
                    raise
                self.close()
                raise RuntimeError(
                    f"A loader process ended unexpectedly ({error}). It was killed from outside, most often "
                    f"for want of memory: resume the run, with fewer --data.workers if it happens again."
                ) from error
            yield made

    def close(self) -> None:
        """End the worker processes, by force if they do not follow: they ignore the SIGTERM that Python sends
        its children at exit, and Python would wait for them for ever.
        """
        workers: Any = None if self._loader is None else self._loader._iterator
        self._loader = None
        if workers is not None:
            workers._shutdown_workers()
            for process in workers._workers:
                process.kill()


def _tells_of_a_lost_worker(error: Exception) -> bool:
    """torch names the process that ended, unless its half-sent batch breaks off first. An exception that was
    raised inside a worker comes as "Caught ... in DataLoader worker process".
    """
    if isinstance(error, RuntimeError):
        return "DataLoader worker (pid" in str(error)
    return not str(error).startswith("Caught ")


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach the whole process group. The parent still needs batches then: it
    finishes its step and saves, and ends the workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class _Items(Dataset[Made]):
    """Turns a task into its views; this is what lives in the workers."""

    def __init__(self, images: ImageSet, views: Views, seed: int) -> None:
        self._images = images
        self._views = views
        self._seed = seed

    def __getitem__(self, task: Task) -> Made:
        failed: dict[int, str] = {}
        decoded: dict[int, Tensor] = {}
        views = []
        for view in task.views:
            sources = task.sources(view).tolist()
            for i in sources:
                if i not in decoded:  # a standard pair's two views share one decoding
                    decoded[i], missing = read(self._images, i, self._seed)
                    failed.update(missing)
            uniforms = view_uniforms(self._seed, view, task.epoch, task.ids)
            views.append(self._views.batch([decoded[i] for i in sources], view, uniforms))
        return views, failed
