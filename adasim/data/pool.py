"""Loader processes, for training and evaluation: tasks go through pipes, pixels come back through shared memory.

for ids, (pixels,), failed in read_batches(load, torch.arange(1000).split(256), [(3, 224, 224)], workers=4):
"""

from __future__ import annotations

import itertools
import math
import mmap
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import closing, suppress
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from adasim.util.errors import UserError
from adasim.util.rgb import Unreadable

TASK = 16
"""Images in a task: enough to be worth a message, few enough to be small and soon done."""
_SLOTS = 2  # tasks that a process has at a time: one in work, and the next
_MOST_WORKERS = 16  # a process that trains on one device is hardly ever faster than so many can feed
_LOOK_S = 2.0  # how often an idle process looks whether its parent still lives
_QUOTA = Path("/sys/fs/cgroup/cpu.max")

Failed = dict[int, str]
"""{id: where and why} of images that could not be read."""
Work = Callable[[Any, Any, list[Tensor]], Failed]
"""`work(asked, rows, out)` writes what it makes of B rows into `out`, uint8 tensors (B, ...)."""
Asked = tuple[Any, list[Any], list[Tensor]]
"""A batch: what `work` is called with."""


def read_batches(
    load: Callable[[int], tuple[Tensor, ...]],
    batches: Sequence[Tensor],
    shapes: list[tuple[int, ...]],
    workers: int,
) -> Iterator[tuple[Tensor, list[Tensor], Failed]]:
    """What `load` gives for batches of images, in order: their ids (B,), a uint8 tensor (B, ...) for each of the
    shapes, and which images could not be read, whose rows hold nothing.

    `load` is called in `workers` processes, or in this one if there are none.
    """

    def work(_: None, ids: list[int], out: list[Tensor]) -> Failed:
        failed: Failed = {}
        for row, i in enumerate(ids):
            try:
                for there, made in zip(out, load(i), strict=True):
                    there[row] = made
            except Unreadable as error:
                failed[i] = str(error)
        return failed

    tasks = (
        (None, ids.tolist(), [torch.empty(len(ids), *shape, dtype=torch.uint8) for shape in shapes])
        for ids in batches
    )
    with closing(WorkerPool(work, workers, sum(map(math.prod, shapes)))) as pool:
        largest = max([1, *map(len, batches)])
        for ids, ((_, _, out), failed) in zip(batches, pool.run(tasks, largest), strict=True):
            yield ids, out, failed


def worker_count(wanted: int | Literal["auto"]) -> int:
    """`auto` is this process's share of the machine's cores less one for itself: at least 1, at most 16.

    torchrun's processes on a machine share its cores (LOCAL_WORLD_SIZE); Slurm's have cores of their own.
    """
    if wanted != "auto":
        return wanted
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    share = usable_cores() // (int(ranks) if ranks.isdecimal() and int(ranks) else 1)
    return max(1, min(_MOST_WORKERS, share - 1))


def usable_cores() -> int:
    """The cores that this process may use: its affinity, or fewer where a container allows less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such file, or "max"
        allowed, period = (int(word) for word in _QUOTA.read_text().split())
        cores = min(cores, math.ceil(allowed / period))
    return max(1, cores)


class LostWorkerError(UserError):
    """A loader process is gone."""

    exit_code = 1


class WorkerPool:
    """`count` processes that call `work`, with TASK rows at a time. Without any, this process does.

    Processes are forked with the first task, so `work` may be anything that lives in memory. They ignore Ctrl-C and
    SIGTERM, which reach the whole process group: the parent may still need what they make, to finish a step and save,
    and ends them itself.

    A thread for each process gives it tasks, urgent ones first, and copies what it has made, so that it never waits
    for whoever uses that. Pixels come through anonymous shared memory, two slots a process: what a process holds does
    not depend on the batch, and neither file descriptors nor /dev/shm are needed for them.

    Args:
        work: what they do.
        count: of the processes.
        row_bytes: what `work` makes of a row at most.
    """

    def __init__(self, work: Work, count: int, row_bytes: int) -> None:
        self._work, self._count, self._slot = work, count, TASK * row_bytes
        self._jobs: queue.PriorityQueue[Any] = queue.PriorityQueue()  # (urgency, number, job)
        self._numbers = itertools.count()
        self._workers: list[_Worker] = []
        self._end: Callable[[], object] = lambda: None

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid or 0 for worker in self._workers]

    def run(self, batches: Iterable[Asked], batch_size: int) -> Iterator[tuple[Asked, Failed]]:
        """Batches as they are done, in order. Two or more are in work beside the one that is due,
        enough for all processes."""
        tasks = -(-batch_size // TASK)
        ahead = max(2, -(-_SLOTS * self._count // tasks)) if self._count else 0
        begun = deque[tuple[Asked, list[Future[Failed]]]]()
        try:
            for batch in batches:
                begun.append((batch, self.begin(*batch)))
                if len(begun) > ahead:
                    yield begun[0][0], wait_for(begun.popleft()[1])
            while begun:
                yield begun[0][0], wait_for(begun.popleft()[1])
        finally:
            for _, futures in begun:
                for future in futures:
                    future.cancel()

    def begin(
        self, asked: Any, rows: list[Any], out: list[Tensor], *, urgent: bool = False
    ) -> list[Future[Failed]]:
        """Have a batch done, ahead of all that wait if it is urgent.

        A future raises a `LostWorkerError` if a process is lost, and whatever `work` raised.
        """
        if not self._count:
            done: Future[Failed] = Future()
            done.set_result(self._work(asked, rows, out))
            return [done]
        if not self._workers:
            self._start()
        jobs = []
        for start in range(0, len(rows), TASK):
            part = slice(start, start + TASK)
            jobs.append(_Job((asked, rows[part]), [view[part] for view in out], Future()))
            self._jobs.put((not urgent, next(self._numbers), jobs[-1]))
        return [job.future for job in jobs]

    def close(self) -> None:
        """End the processes; what they have not made by then is cancelled."""
        self._end()
        self._workers = []

    def _start(self) -> None:
        # Before multiprocessing, at exit, sends its children a SIGTERM and waits for them.
        self._end = util.Finalize(self, _end, args=(self._workers, self._jobs), exitpriority=100)
        try:
            for _ in range(self._count):
                self._workers.append(_Worker(self._work, self._slot))
            for worker in self._workers:
                thread = threading.Thread(target=_serve, args=(worker, self._jobs), daemon=True)
                thread.start()
                worker.thread = thread
        except BaseException:  # the system has no more processes or threads, or Ctrl-C
            self.close()
            raise


class _Job(NamedTuple):
    task: tuple[Any, list[Any]]
    out: list[Tensor]
    future: Future[Failed]


class _Worker:
    """A process, the pipe to it, and the memory that is shared with it."""

    thread: threading.Thread | None = None

    def __init__(self, work: Work, slot: int) -> None:
        shared = mmap.mmap(-1, _SLOTS * slot)
        self.memory = torch.frombuffer(shared, dtype=torch.uint8).split(slot)
        self.pipe, theirs = multiprocessing.Pipe()
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=_work, args=(theirs, work, self.memory, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()


def wait_for(futures: list[Future[Failed]]) -> Failed:
    return {i: why for future in futures for i, why in future.result().items()}


def _carve(memory: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Tensors of these shapes, one after another in `memory`, which may be larger."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = memory[: sum(sizes)].split(sizes)
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def _serve(worker: _Worker, jobs: queue.PriorityQueue[Any]) -> None:
    """The life of a worker's thread. It holds no reference to the pool, so that a forgotten pool ends."""
    given, slots = deque[tuple[_Job, Tensor]](), itertools.cycle(worker.memory)
    try:
        while True:
            with suppress(queue.Empty):
                while len(given) < _SLOTS:
                    job = jobs.get(block=not given)[-1]
                    if job is None:
                        for job, _ in given:
                            job.future.set_exception(CancelledError())
                        return
                    if job.future.set_running_or_notify_cancel():
                        given.append((job, next(slots)))
                        worker.pipe.send((*job.task, [tuple(part.shape) for part in job.out]))
            failed, error = worker.pipe.recv()
            job, slot = given.popleft()
            if error is None:
                for made, there in zip(_carve(slot, [part.shape for part in job.out]), job.out, strict=True):
                    there.copy_(made)
                job.future.set_result(failed)
            else:
                job.future.set_exception(error)
    except Exception as error:
        lost = _lost(worker) if isinstance(error, OSError | EOFError) else error
        for job, _ in given:
            job.future.set_exception(lost)
        while (job := jobs.get()[-1]) is not None:  # whoever waits would wait for ever
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(lost)


def _lost(worker: _Worker) -> LostWorkerError:
    worker.process.join(1)
    code = worker.process.exitcode
    how = f"killed by signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
    return LostWorkerError(
        f"A loader process ended unexpectedly (process {worker.process.pid}, {how}), most often for want of memory. "
        f"Give the same command again, or resume the run; if it happens again, with fewer loader processes "
        f"(--workers, --data.workers)."
    )


def _end(workers: list[_Worker], jobs: queue.PriorityQueue[Any]) -> None:
    with suppress(queue.Empty):
        while True:
            jobs.get_nowait()[-1].future.cancel()
    for number, worker in enumerate(workers):
        if worker.thread is not None:
            jobs.put((-1, number, None))
        worker.process.kill()
    for worker in workers:
        if worker.thread not in (None, threading.current_thread()):  # a pool may be forgotten anywhere
            worker.thread.join()
        worker.process.join()
        worker.pipe.close()


def _work(pipe: Connection, work: Work, memory: Sequence[Tensor], parent: int) -> None:
    """The life of a process: it ends when its parent does, if that has not ended it before."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    with suppress(OSError, EOFError):
        for slot in itertools.cycle(memory):
            while not pipe.poll(_LOOK_S):
                if os.getppid() != parent:
                    return
            asked, rows, shapes = pipe.recv()
            failed, problem = Failed(), None
            try:
                failed = work(asked, rows, _carve(slot, shapes))
            except Exception as error:
                text = f"In a loader process:\n{traceback.format_exc()}"
                problem = error if isinstance(error, UserError) else RuntimeError(text)
            pipe.send((failed, problem))
