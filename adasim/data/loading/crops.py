"""Crops of whole batches, cut by loader processes (or right here), and their way to the device."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.data.images import ImageSet
from adasim.data.loading.cutting import TASK, Cutter, Task
from adasim.data.loading.pool import SLOTS, Failed, WorkerPool


class CropSource:
    """Cuts the crops of batches of up to `batch_size` images, in `workers` processes that start with the first batch
    and stay."""

    def __init__(
        self,
        images: ImageSet,
        views: ViewsConfig,
        seed: int,
        workers: int,
        batch_size: int,
        device: torch.device,
    ) -> None:
        self._cutter = Cutter(images, views, seed)
        self._workers = workers
        self._pool: WorkerPool | None = None
        self._device = device
        # The model is on the device before the loader is made. A device that is pretended, as in tests, is not
        # initialised: it can lock no pages and has no streams.
        self._cuda = device.type == "cuda" and torch.cuda.is_initialized()
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._spare: dict[tuple[int, ...], list[Tensor]] = {}
        tasks = -(-batch_size // TASK)
        self.ahead = 1 if not workers else 1 + max(2, -(-SLOTS * workers // tasks))
        """How many batches to have in hand: the one that is due, and two or more, enough for all processes."""

    def cut(self, task: Task, *, urgent: bool = False) -> Cut:
        """Begin to cut a batch; without processes, cut it."""
        memory = self._memory(task)
        room = self._cutter.room(task.views, len(task.ids), memory)
        made: list[Future[Failed]] = []
        if self._workers and self._pool is None:
            self._pool = WorkerPool(self._cutter, self._workers)
        pieces = [(piece, [view[rows] for view in room]) for rows, piece in task.pieces()]
        # Of two urgent pieces, the later comes first.
        for piece, part in reversed(pieces) if urgent else pieces:
            if self._pool is None:
                made.append(Future())
                made[-1].set_result(self._cutter.cut(piece, part))
            else:
                made.append(self._pool.submit(piece, part, urgent=urgent))
        return Cut(self, task, memory, room, made)

    @property
    def pids(self) -> list[int]:
        return [] if self._pool is None else self._pool.pids

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

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
        wanted = len(task.ids) * self._cutter.bytes_of(task.views)
        if spare and len(spare[-1]) >= wanted:
            return spare.pop()
        return torch.empty(wanted, dtype=torch.uint8, pin_memory=self._cuda)

    def give_back(self, task: Task, memory: Tensor) -> None:
        self._spare.setdefault(task.views, []).append(memory)


class Cut:
    """The crops of one batch: first `wait`, then `send`, `take`, `release`."""

    def __init__(
        self, source: CropSource, task: Task, memory: Tensor, room: list[Tensor], made: list[Future[Failed]]
    ) -> None:
        self.task = task
        self._source, self._memory, self._room, self._made = source, memory, room, made
        self._event: torch.cuda.Event | None = None

    def wait(self) -> Failed:
        """Until all is cut; returns {id: where and why} of images that could not be read."""
        failed: Failed = {}
        for future in self._made:
            failed |= future.result()
        return failed

    def send(self) -> None:
        """Begin to copy the crops to the device; a CPU has them."""
        there, self._event = self._source.send(self._memory)
        self._room = self._source._cutter.room(self.task.views, len(self.task.ids), there)

    def take(self) -> list[Tensor]:
        """The crops on the device, uint8 (B, 3, S, S) of each view; what is computed next waits for the copy."""
        if self._event is not None:
            stream = torch.cuda.current_stream(self._room[0].device)
            stream.wait_event(self._event)
            for crops in self._room:
                crops.record_stream(stream)
        return self._room

    def release(self) -> None:
        """The views are made (or, on a device, under way): another batch may use the memory."""
        if self._event is not None:
            self._event.synchronize()  # of a copy that began a step ago
        self._source.give_back(self.task, self._memory)

    def cancel(self) -> None:
        """Do not wait for what nobody will use; what is in work is left to end."""
        for future in self._made:
            future.cancel()
