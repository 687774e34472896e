"""Signals ask a run to stop (it finishes its step, saves, and ends) or to save (SIGUSR1)."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from adasim.util import terminal
from adasim.util.interrupts import Interrupts, Stopped, under_torchrun

P = ParamSpec("P")
T = TypeVar("T")


class StopRequests(Interrupts):
    """While the context is open, the first signal is answered and sets `requested`; a second one leaves at once.

    SIGINT, SIGTERM and SIGHUP ask to stop; so does a standard output that nobody reads any more, and the end of the
    torchrun that started this process. SIGUSR1 asks for a save; under Slurm, which sends it before a job's time is
    up, for a stop and a requeue.

    Args:
        say: how to answer; None leaves the answer to another process of the run.
    """

    gentle = True

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        answer = "Stopping after this step and a save. Ctrl-C again leaves at once, unsaved."
        super().__init__(answer, say or (lambda text: None))

    @property
    def requested(self) -> bool:
        return self.number is not None

    @property
    def number(self) -> int | None:
        """The signal that asks to stop, if one has come."""
        if self.received is None and terminal.is_unread():
            self.received = signal.SIGPIPE
        if self.received is None and under_torchrun() and os.getppid() != self.parent:
            self.received = signal.SIGHUP
            self._say("torchrun, which started this run, is gone. Stopping after this step and a save.")
        if self.received is None and self.save_asked and _slurm_job():
            return signal.SIGUSR1  # not kept: a run that is complete by then has not been interrupted
        return self.received

    def take_save(self) -> bool:
        """Whether a save was asked for since the last call."""
        if _slurm_job():  # there it asks to stop
            return False
        asked, self.save_asked = self.save_asked, False
        return asked


def stopped(number: int) -> Stopped:
    """What all processes of a run raise when they have stopped together."""
    error = Stopped(number)
    error.shared = True
    return error


def forgetting_frames(function: Callable[P, T]) -> Callable[P, T]:
    """A `Stopped` that leaves the function no longer holds its frames.

    Uncaught, it would keep networks and threads alive until Python ends, and torch might abort then.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Stopped as error:
            number = error.number
        raise stopped(number)

    return call


def requeue() -> str:
    """Ask Slurm to start this job again; returns what came of it, in words."""
    job = _slurm_job()
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
        problem = (done.stderr or done.stdout).strip() if done.returncode else ""
        failed = done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        problem, failed = str(error), True
    if failed:
        return f"Slurm was asked to requeue job {job} and refused ({problem or 'without a word'}): submit it again."
    return f"Slurm will start job {job} again."


def _slurm_job() -> str:
    return os.environ.get("SLURM_JOB_ID", "")
