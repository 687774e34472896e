"""Loader processes: each takes tasks from a pipe and leaves crops in memory that it shares with this process.

A thread of this process hands out tasks, urgent ones first, and copies what has been made to where it is wanted, so
that the processes never wait for the training loop. Each process has a few slots of shared memory of its own: what a
process can hold does not depend on the batch, no file descriptor and no /dev/shm is needed, and nothing but numbers
goes through the pipes.
"""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from adasim.data.loading.cutting import TASK, Cutter, Task
from adasim.util.errors import UserError

SLOTS = 2
"""Tasks that a process has at a time: one in work, and the next."""
_LOOK_S = 5.0  # how often an idle process looks whether its parent still lives

Failed = dict[int, str]
"""{id: where and why} of images that could not be read."""


class WorkerPool:
    """`count` processes that cut crops.

    They are forked, so images may be anything that lives in memory; they ignore Ctrl-C and SIGTERM, which reach the
    whole process group: the parent still needs crops then, finishes its step, saves, and ends them itself.
    """

    def __init__(self, cutter: Cutter, count: int) -> None:
        self._dispatcher = _Dispatcher(cutter, count)
        # Before multiprocessing, at exit, sends its children a SIGTERM and waits for them.
        self._end = util.Finalize(self, self._dispatcher.close, exitpriority=100)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid or 0 for worker in self._dispatcher.workers]

    def submit(self, task: Task, room: list[Tensor], *, urgent: bool = False) -> Future[Failed]:
        """Have a task of at most `TASK` images cut into `room`; an urgent one comes before all that wait.

        The future raises a RuntimeError if a process is lost, and whatever the task raised.
        """
        return self._dispatcher.submit(task, room, urgent)

    def close(self) -> None:
        """End the processes; what they have not made by then is cancelled."""
        self._end()


@dataclass
class _Job:
    task: Task
    room: list[Tensor]
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

    def __init__(self, cutter: Cutter, count: int) -> None:
        self._cutter = cutter
        self._waiting: deque[_Job] = deque()
        self._lock = threading.Lock()
        self._closed = self._ending = False
        self._lost: RuntimeError | None = None
        self._wake, self._woken = multiprocessing.Pipe(duplex=False)
        self.workers: list[_Worker] = []
        slot = TASK * cutter.bytes_of(tuple(cutter.settings))
        fork = multiprocessing.get_context("fork")
        for _ in range(count):
            shared = mmap.mmap(-1, SLOTS * slot)
            memory = list(torch.frombuffer(shared, dtype=torch.uint8).split(slot))
            mine, theirs = multiprocessing.Pipe()
            others = [mine, *(worker.pipe for worker in self.workers)]
            process = fork.Process(target=_work, args=(theirs, others, cutter, memory), daemon=True)
            process.start()
            theirs.close()
            self.workers.append(_Worker(process, mine, memory))
        self._thread = threading.Thread(target=self._run, name="adasim-loader", daemon=True)
        self._thread.start()

    def submit(self, task: Task, room: list[Tensor], urgent: bool) -> Future[Failed]:
        job = _Job(task, room)
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
                worker.pipe.send((slot, job.task))
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
        made = self._cutter.room(job.task.views, len(job.task.ids), worker.memory[slot])
        for here, there in zip(made, job.room, strict=True):
            there.copy_(here)
        job.future.set_result(failed)

    def _lose(self, worker: _Worker) -> None:
        if self._ending:
            return
        worker.process.join(1)
        code = worker.process.exitcode
        how = f"killed by signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        lost = RuntimeError(
            f"A loader process ended unexpectedly (process {worker.process.pid}, {how}). It was killed from outside, "
            f"most often for want of memory: resume the run, with fewer --data.workers if it happens again."
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


def _work(pipe: Connection, others: list[Connection], cutter: Cutter, memory: list[Tensor]) -> None:
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
            slot, task = pipe.recv()
            pipe.send(
                (slot, *_answer(cutter.cut, task, cutter.room(task.views, len(task.ids), memory[slot])))
            )


def _answer(
    cut: Callable[[Task, list[Tensor]], Failed], task: Task, room: list[Tensor]
) -> tuple[Failed, Exception | None]:
    try:
        return cut(task, room), None
    except UserError as error:
        return {}, error
    except Exception:
        return {}, RuntimeError(f"In a loader process:\n{traceback.format_exc()}")
