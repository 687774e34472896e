"""Ctrl-C and other signals that ask to stop: the first is answered at once, a second one leaves at once.

    with Interrupts("Leaving."):      # the first signal raises Stopped in the main thread
        ...
    with StopRequests() as stop:      # the first signal sets stop.requested: a run finishes its step and saves
        ...

Python runs signal handlers between two of its instructions, and the next one may be a minute away, behind a backward
pass on a CPU. So a thread, which the C-level handler wakes through a pipe, answers, and leaves by force. Only the
standard library is used here: this is imported before all that is slow to import.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from types import FrameType
from typing import ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end."""
_HANDLED = (*STOP, signal.SIGUSR1)  # the last one asks for a save; left alone, it would kill
# Schedulers and shells may send one SIGTERM or SIGHUP twice; Ctrl-C comes twice from people only.
_ECHO_S = 1.0
_GRACE_S = 5.0  # for tidying up after `Stopped`
_END = 0  # no signal has this number


class Stopped(SystemExit):
    """A signal (or a closed pipe) ended this. Uncaught, it ends the process with 128 + the signal's number.

    `shared`: every process of a run raises it.
    """

    def __init__(self, number: int, shared: bool = False) -> None:
        super().__init__(128 + number)
        self.number, self.shared = number, shared


class Interrupts:
    """While the context is open, the first signal is answered and raises `Stopped`; a second one exits.

    Outside the main thread, where Python allows no handlers, signals keep their usual effect. What an outer
    context has received counts in an inner one, and the other way round.

    Args:
        answer: what to say to the first signal.
        say: how to say it; on standard error by default.
    """

    gentle = False
    """Whether the first signal sets `received` and nothing more."""

    def __init__(self, answer: str, say: Callable[[str], None] | None = None) -> None:
        self.answer = answer
        self.received: int | None = None
        """The first signal that asked to stop."""
        self.raised = False
        """Whether `Stopped` was."""
        self.save_asked = False
        """Whether SIGUSR1 has come."""
        self.parent = os.getppid()
        self._say = say or _say_on_stderr
        self._answered = threading.Event()
        self._answered_at: float | None = None
        self._speaker: threading.Thread | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        if _open:
            self._take_over(_open[-1])
        _open.append(self)
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._watcher = threading.Thread(target=self._watch, args=(reader,), daemon=True)
        self._watcher.start()
        self._writer_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in _HANDLED:
            # What runs under nohup outlives its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self not in _open:
            return
        signal.set_wakeup_fd(self._writer_before)
        # Closing alone would not end the thread: forked processes have the pipe open, too. And a thread that outlived
        # this might be the last to hold a run's networks, and free them while Python ends: torch aborts then.
        os.write(self._writer, bytes([_END]))
        self._watcher.join(1)
        if self._speaker is not None:
            self._speaker.join(1)
        os.close(self._writer)
        _open.remove(self)
        for number, handler in self._before.items():  # at last: an outer context's may raise from here on
            if handler is not None:  # None: it was not Python's, and cannot be put back
                signal.signal(number, handler)  # type: ignore[arg-type]
        if _open:
            _open[-1]._take_over(self)

    def _take_over(self, other: Interrupts) -> None:
        self.received = self.received or other.received
        self._answered_at = self._answered_at or other._answered_at
        self.save_asked, self.parent = other.save_asked, other.parent

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, when Python gets round to it."""
        if number == signal.SIGUSR1:
            self.save_asked = True
        elif self.received is None:
            self.received = number
            # An error that is on its way out says more than `Stopped` would.
            if not self.gentle and not isinstance(sys.exception(), Exception):
                self._answered.wait(0.5)  # or the process might end first
                self.raised = True
                # What was cut short in the making may complain at its end.
                sys.unraisablehook = lambda _: None
                raise Stopped(number)

    def _watch(self, reader: int) -> None:
        """In a thread of its own, at once: answer the first signal, leave by the second, or when tidying up takes too
        long."""
        leaving = None
        while True:
            if leaving is not None and not select.select([reader], [], [], _GRACE_S)[0]:
                os._exit(128 + leaving)
            numbers = os.read(reader, 64)
            for number in filter(STOP.__contains__, numbers):
                if self._answered_at is None:
                    self._answered_at = time.monotonic()
                    leaving = None if self.gentle else number
                    failed = number == signal.SIGTERM and not self.gentle and under_torchrun()
                    answer = self.answer + (_BY_TORCHRUN if failed else "")
                    # Not here: an output that nobody reads must not keep the second signal waiting.
                    self._speaker = threading.Thread(target=self._tell, args=(answer,), daemon=True)
                    self._speaker.start()
                elif number == signal.SIGINT or time.monotonic() - self._answered_at > _ECHO_S:
                    terminals = list(filter(os.isatty, (1, 2)))[:1]
                    for stream in select.select([], terminals, [], 0)[1]:  # those that take it at once
                        os.write(stream, b"\x1b[?25h\n")  # shows the cursor, as a progress bar does
                    os._exit(128 + number)
            if _END in numbers:
                return os.close(reader)

    def _tell(self, answer: str) -> None:
        self._say(answer)
        self._answered.set()


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
        from adasim.util.terminal import is_unread

        if self.received is None and is_unread():
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


def forgetting_frames(function: Callable[P, T]) -> Callable[P, T]:
    """A `Stopped` that leaves the function no longer holds its frames.

    Uncaught, it would keep networks and threads alive until Python ends, and torch might abort then.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Stopped as error:
            raise error.with_traceback(None) from None

    return call


def requeue() -> str:
    """Ask Slurm to start this job again; returns what came of it, in words."""
    import subprocess

    job = _slurm_job()
    try:
        subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=True)
        return f"Slurm will start job {job} again."
    except subprocess.CalledProcessError as error:
        problem = (error.stderr or error.stdout).strip() or "without a word"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    return f"Slurm was asked to requeue job {job} and refused ({problem}): submit it again."


def under_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first() -> bool:
    """Whether this process speaks for all that a launcher started (torchrun's variable, or Slurm's)."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    world = os.environ.get("WORLD_SIZE", "")
    lost = rank.isdecimal() and world.isdecimal() and int(rank) >= int(world)  # a number that nobody else has
    return lost or not rank.isdecimal() or int(rank) == 0


def _slurm_job() -> str:
    return os.environ.get("SLURM_JOB_ID", "")


def _say_on_stderr(text: str) -> None:
    if sys.stderr is None or not is_first():
        return
    with suppress(OSError, ValueError):
        print(f"{chr(10) if sys.stderr.isatty() else ''}adasim: {text}", file=sys.stderr, flush=True)


# A forked process (a loader's worker) shares the pipe: a signal to it must not count as one to its parent. It leaves
# signals that reach the whole group to its parent, who ends it; SIGTERM ends it as usual.


def _mask_signals(how: int) -> None:
    if _open:
        signal.pthread_sigmask(how, _HANDLED)


def _be_a_child() -> None:
    if _open:
        signal.set_wakeup_fd(-1)
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        _mask_signals(signal.SIG_UNBLOCK)
        _open.clear()


_BY_TORCHRUN = " torchrun ends all processes when one has failed: that one's last words, if any, say why."
_open: list[Interrupts] = []  # the innermost last
os.register_at_fork(
    before=partial(_mask_signals, signal.SIG_BLOCK),
    after_in_parent=partial(_mask_signals, signal.SIG_UNBLOCK),
    after_in_child=_be_a_child,
)
