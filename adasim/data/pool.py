"""Loader processes, for training and evaluation: they take tasks from pipes and leave pixels in shared memory.

    for ids, (pixels,), failed in read_batches(load, torch.arange(1000).split(256), [(3, 224, 224)], workers=4):

A thread of this process hands out tasks, urgent ones first, and copies what has been made to where it is wanted, so
that the processes never wait for whoever uses it. Each process has a few slots of shared memory of its own: what a
process can hold does not depend on the batch, no file descriptor and no /dev/shm is needed, and nothing but numbers
goes through the pipes.
"""

from __future__ import annotations

import itertools
import math
import mmap
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from adasim.data.images import Unreadable
from adasim.util.errors import UserError

TASK = 16
"""Images in a task: enough to be worth a message, few enough to be small and soon done."""
SLOTS = 2
"""Tasks that a process has at a time: one in work, and the next."""
MOST = 16
"""Loader processes by default: a process that trains on one device is hardly ever faster than so many can feed."""
_LOOK_S = 5.0  # how often an idle process looks whether its parent still lives
_QUOTA = Path("/sys/fs/cgroup/cpu.max")

Failed = dict[int, str]
"""{id: where and why} of images that could not be read."""
Work = Callable[[Any, list[Tensor]], Failed]
"""Does a task: writes what it makes into the tensors, uint8."""


class LostWorkerError(UserError):
    """A loader process is gone."""

    exit_code = 1


class WorkerPool:
    """`count` processes that work; they start with the first task. Without any, tasks are done by this process.

    They are forked, so images may be anything that lives in memory; they ignore Ctrl-C and SIGTERM, which reach the
    whole process group: the parent may still need what they make, to finish a step and save, and ends them itself.

    Args:
        work: what they do.
        count: of the processes.
        slot: bytes that one task makes at most.
    """

    def __init__(self, work: Work, count: int, slot: int) -> None:
        self._work, self._count, self._slot = work, count, slot
        self._dispatcher: _Dispatcher | None = None
        self._end: Callable[[], object] = lambda: None

    @property
    def pids(self) -> list[int]:
        return [] if self._dispatcher is None else [w.process.pid or 0 for w in self._dispatcher.workers]

    def submit(self, task: Any, out: list[Tensor], *, urgent: bool = False) -> Future[Failed]:
        """Have a task done, its results in `out`; an urgent one comes before all that wait.

        The future raises a `LostWorkerError` if a process is lost, and whatever the task raised.
        """
        if not self._count:
            done: Future[Failed] = Future()
            done.set_result(self._work(task, out))
            return done
        if self._dispatcher is None:
            self._dispatcher = _Dispatcher(self._work, self._count, self._slot)
            # Before multiprocessing, at exit, sends its children a SIGTERM and waits for them.
            self._end = util.Finalize(self, self._dispatcher.close, exitpriority=100)
        return self._dispatcher.submit(task, out, urgent)

    def close(self) -> None:
        """End the processes; what they have not made by then is cancelled."""
        self._end()


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

    def work(numbers: list[int], out: list[Tensor]) -> Failed:
        failed: Failed = {}
        for row, i in enumerate(numbers):
            try:
                for there, made in zip(out, load(i), strict=True):
                    there[row] = made
            except Unreadable as error:
                failed[i] = str(error)
        return failed

    ahead = batches_ahead(max([1, *map(len, batches)]), workers)
    waiting = iter(batches)
    begun = deque[tuple[Tensor, list[Tensor], list[Future[Failed]]]]()
    with closing(WorkerPool(work, workers, TASK * sum(map(math.prod, shapes)))) as pool:
        while True:
            while len(begun) < ahead and (batch := next(waiting, None)) is not None:
                out = [torch.empty(len(batch), *shape, dtype=torch.uint8) for shape in shapes]
                tasks = [
                    (batch[rows].tolist(), [part[rows] for part in out]) for rows in task_rows(len(batch))
                ]
                begun.append((batch, out, [pool.submit(*task) for task in tasks]))
            if not begun:
                return
            batch, out, made = begun.popleft()
            yield batch, out, wait_for(made)


def batches_ahead(batch_size: int, workers: int) -> int:
    """How many batches to have in hand: the one that is due, and two or more, enough for all processes."""
    tasks = -(-batch_size // TASK)
    return 1 if not workers else 1 + max(2, -(-SLOTS * workers // tasks))


def task_rows(count: int) -> list[slice]:
    """The rows of a batch that each of its tasks makes."""
    return [slice(start, start + TASK) for start in range(0, count, TASK)]


def wait_for(made: Sequence[Future[Failed]]) -> Failed:
    """Until all is done; returns {id: where and why} of images that could not be read."""
    return {i: why for future in made for i, why in future.result().items()}


def carve(memory: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Tensors of these shapes, one after another in `memory`, which is uint8 and may be larger."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = memory[: sum(sizes)].split(sizes)
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def worker_count(wanted: int | Literal["auto"], environment: Mapping[str, str] = os.environ) -> int:
    """`auto` is this process's share of the machine's cores less one for itself: at least 1, at most 16.

    torchrun's processes on a machine share its cores (LOCAL_WORLD_SIZE); Slurm's have cores of their own.
    """
    if wanted != "auto":
        return wanted
    ranks = environment.get("LOCAL_WORLD_SIZE", "")
    share = usable_cores() // (int(ranks) if ranks.isdecimal() and int(ranks) else 1)
    return max(1, min(MOST, share - 1))


def usable_cores() -> int:
    """The cores that this process may use: its affinity, or fewer where a container allows less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such file, or "max"
        allowed, period = (int(word) for word in _QUOTA.read_text().split())
        cores = min(cores, math.ceil(allowed / period))
    return max(1, cores)


@dataclass
class _Job:
    task: Any
    out: list[Tensor]
    future: Future[Failed] = field(default_factory=Future)


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    memory: list[Tensor]
    """One piece for each slot."""
    jobs: dict[int, _Job] = field(default_factory=dict)
    """By slot: what the process was given and has not answered."""


class _Dispatcher:
    """The thread, and what it knows. It holds no reference to the pool, so that a forgotten pool ends."""

    def __init__(self, work: Work, count: int, slot: int) -> None:
        self._waiting: deque[_Job] = deque()
        self._lock = threading.Lock()
        self._closed = self._ending = False
        self._lost: Exception | None = None
        self._wake, self._woken = multiprocessing.Pipe(duplex=False)
        self.workers: list[_Worker] = []
        fork = multiprocessing.get_context("fork")
        for _ in range(count):
            shared = mmap.mmap(-1, SLOTS * slot)
            memory = list(torch.frombuffer(shared, dtype=torch.uint8).split(slot))
            mine, theirs = multiprocessing.Pipe()
            others = [mine, *(worker.pipe for worker in self.workers)]
            process = fork.Process(target=_work, args=(theirs, others, work, memory), daemon=True)
            process.start()
            theirs.close()
            self.workers.append(_Worker(process, mine, memory))
        self._thread = threading.Thread(target=self._run, name="adasim-loader", daemon=True)
        self._thread.start()

    def submit(self, task: Any, out: list[Tensor], urgent: bool) -> Future[Failed]:
        job = _Job(task, out)
        with self._lock:
            if self._lost is not None:
                raise self._lost
            if self._closed:
                raise RuntimeError("the loader is closed")
            (self._waiting.appendleft if urgent else self._waiting.append)(job)
        self._woken.send_bytes(b".")
        return job.future

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = self._ending = True
        self._woken.send_bytes(b".")
        if threading.current_thread() is not self._thread:  # a pool may be forgotten anywhere
            self._thread.join()
        for worker in self.workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()

    # ---- in the thread ----

    def _run(self) -> None:
        try:
            self._serve()
            self._drop_all(RuntimeError("the loader was closed"))
        except Exception as error:  # or whoever waits would wait for ever
            self._lost = RuntimeError(f"The loader's thread failed: {error!r}")
            self._drop_all(error)

    def _serve(self) -> None:
        ends = {worker.process.sentinel: worker for worker in self.workers}
        pipes = {worker.pipe: worker for worker in self.workers}
        while not self._ending:
            self._hand_out()
            for ready in wait([self._wake, *pipes, *ends]):
                if ready is self._wake:
                    self._wake.recv_bytes()
                elif ready in pipes:
                    self._take(pipes[ready])
                else:
                    self._lose(ends[ready])

    def _hand_out(self) -> None:
        while self._lost is None:
            worker = min(self.workers, key=lambda w: len(w.jobs))
            if len(worker.jobs) == SLOTS:
                return
            with self._lock:
                if not self._waiting:
                    return
                job = self._waiting.popleft()
            if not job.future.set_running_or_notify_cancel():
                continue
            slot = next(s for s in itertools.count() if s not in worker.jobs)
            worker.jobs[slot] = job
            try:
                worker.pipe.send((slot, job.task, [tuple(part.shape) for part in job.out]))
            except OSError:
                self._lose(worker)

    def _take(self, worker: _Worker) -> None:
        try:
            slot, failed, error = worker.pipe.recv()
        except (OSError, EOFError):
            self._lose(worker)
            return
        job = worker.jobs.pop(slot)
        if error is not None:
            job.future.set_exception(error)
            return
        for here, there in zip(
            carve(worker.memory[slot], [part.shape for part in job.out]), job.out, strict=True
        ):
            there.copy_(here)
        job.future.set_result(failed)

    def _lose(self, worker: _Worker) -> None:
        if self._ending:
            return
        worker.process.join(1)
        code = worker.process.exitcode
        how = f"killed by signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        lost = LostWorkerError(
            f"A loader process ended unexpectedly (process {worker.process.pid}, {how}). It was killed from outside, "
            f"most often for want of memory. Give the same command again, or resume the run; if it happens again, "
            f"with fewer loader processes (--workers, --data.workers)."
        )
        with self._lock:
            self._lost = lost
        self._drop_all(lost)
        self._ending = True

    def _drop_all(self, error: Exception) -> None:
        with self._lock:
            jobs = [*self._waiting, *(job for worker in self.workers for job in worker.jobs.values())]
            self._waiting.clear()
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)


def _work(pipe: Connection, others: list[Connection], work: Work, memory: list[Tensor]) -> None:
    """A process's life: it ends when its pipe does, or its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = os.getppid()
    for other in others:  # the parent's ends: a pipe ends when nobody holds its other end any more
        other.close()
    with suppress(OSError, EOFError):
        while True:
            while not pipe.poll(_LOOK_S):
                if os.getppid() != parent:
                    return
            slot, task, shapes = pipe.recv()
            pipe.send((slot, *_answer(work, task, carve(memory[slot], shapes))))


def _answer(work: Work, task: Any, out: list[Tensor]) -> tuple[Failed, Exception | None]:
    try:
        return work(task, out), None
    except UserError as error:
        return {}, error
    except Exception:
        return {}, RuntimeError(f"In a loader process:\n{traceback.format_exc()}")
