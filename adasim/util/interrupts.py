"""Ctrl-C and other signals that ask to stop: the first is answered at once, a second one leaves at once.

    with Interrupts("Leaving."):    # the first signal raises Stopped in the main thread
        ...

`train.signals.StopRequests` is the gentle kind, which lets a run finish its step and save.

Python runs signal handlers between two of its instructions, and the next one may be a minute away: behind a large
matrix product, say. So the answer, and leaving by force, are left to a thread, which the C-level handler wakes
through a pipe. Only the standard library is used here: this is imported before all that is slow to import.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Self

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end."""
_HANDLED = (*STOP, signal.SIGUSR1)  # the last one asks for a save; left alone, it would kill
# Schedulers and shells may send one SIGTERM or SIGHUP twice; Ctrl-C comes twice from people only.
_ECHO_S = 1.0
_GRACE_S = 5.0  # for tidying up after `Stopped`
_END = b"\0"  # no signal has this number
_BY_TORCHRUN = " torchrun ends all processes when one has failed: that one's last words, if any, say why."


class Stopped(SystemExit):
    """A signal (or a closed pipe) ended this. Uncaught, it ends the process with 128 + the signal's number."""

    shared = False
    """Whether every process of a run raises it."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


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
        self._timer: threading.Timer | None = None
        self._threads: list[threading.Thread] = []
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        if _open:
            self._take_over(_open[-1])
        _open.append(self)
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._watcher = threading.Thread(
            target=self._watch, args=(reader,), name="adasim-signals", daemon=True
        )
        self._watcher.start()
        self._writer_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in _HANDLED:
            # What runs under nohup outlives its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self not in _open:
            return
        signal.set_wakeup_fd(self._writer_before)
        # Closing alone would not end the thread that watches: forked processes have the pipe open, too.
        os.set_blocking(self._writer, True)
        os.write(self._writer, _END)
        os.close(self._writer)
        if self._timer is not None:
            self._timer.cancel()
        # A thread that outlived this might be the last to hold a run's networks, and free them while Python ends:
        # torch aborts then.
        self._watcher.join()
        for thread in self._threads:
            thread.join(0.5)
        _open.remove(self)
        for number, handler in self._before.items():  # at last: an outer context's may raise from here on
            if handler is not None:  # None: it was not Python's, and cannot be put back
                signal.signal(number, handler)  # type: ignore[arg-type]
        if _open:
            _open[-1]._take_over(self)

    def _start(self, thread: threading.Thread) -> None:
        thread.daemon = True
        self._threads.append(thread)
        thread.start()

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
            if not self.gentle:
                self._answered.wait(0.5)  # or the process might end first
                # There it would be lost; the process ends when its work or its grace does. An error that is on its
                # way out says more than this would.
                if not _forking and not isinstance(sys.exception(), Exception):
                    self.raised = True
                    # What was cut short while it was being made may complain at its end.
                    sys.unraisablehook = _nothing
                    raise Stopped(number)

    def _watch(self, reader: int) -> None:
        """In a thread of its own, at once."""
        numbers = b""
        while _END not in numbers:
            numbers = os.read(reader, 64)
            for number in numbers:
                if number not in STOP:
                    continue
                if self._answered_at is None:
                    self._answered_at = time.monotonic()
                    # Not here: a terminal that is stuck must not keep the second signal waiting.
                    self._start(threading.Thread(target=self._tell, args=(number,)))
                    if not self.gentle:
                        self._timer = threading.Timer(_GRACE_S, os._exit, [128 + number])
                        self._start(self._timer)
                elif number == signal.SIGINT or time.monotonic() - self._answered_at > _ECHO_S:
                    tidy = threading.Thread(target=_show_cursor, daemon=True)
                    tidy.start()
                    tidy.join(0.2)
                    os._exit(128 + number)
        os.close(reader)

    def _tell(self, number: int) -> None:
        another = number == signal.SIGTERM and not self.gentle and under_torchrun()
        self._say(f"{self.answer}{_BY_TORCHRUN if another else ''}")
        self._answered.set()


_open: list[Interrupts] = []  # the innermost last


def under_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first() -> bool:
    """Whether this process speaks for all that a launcher started (torchrun's variable, or Slurm's)."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    world = os.environ.get("WORLD_SIZE", "")
    lost = rank.isdecimal() and world.isdecimal() and int(rank) >= int(world)  # a number that nobody else has
    return lost or not rank.isdecimal() or int(rank) == 0


def _nothing(complaint: object) -> None:
    pass


def _show_cursor() -> None:
    """What a progress bar would do at its end."""
    for stream in (1, 2):
        if os.isatty(stream):
            os.write(stream, b"\x1b[?25h\n")
            return


def _say_on_stderr(text: str) -> None:
    if sys.stderr is None or not is_first():
        return
    with suppress(OSError, ValueError):
        print(f"{chr(10) if sys.stderr.isatty() else ''}adasim: {text}", file=sys.stderr, flush=True)


# A forked process (a loader's worker) shares the pipe: a signal to it must not count as one to its parent. It leaves
# all signals that reach the whole group to its parent, who ends it; SIGTERM ends it as usual.


_forking = False


def _hold_signals() -> None:
    global _forking
    if _open:
        _forking = True
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)


def _release_signals() -> None:
    global _forking
    if _open:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    _forking = False


def _be_a_child() -> None:
    global _forking
    _forking = False
    if _open:
        signal.set_wakeup_fd(-1)
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        _open.clear()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)


os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_be_a_child)
