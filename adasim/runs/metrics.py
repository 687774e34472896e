"""What a run writes down as it goes: numbers by step, for people (TensorBoard) and for programs (JSON lines), and the
images that could not be read."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from adasim.data import ImageSet
from adasim.runs.trackers import Tracker
from adasim.util.csv import original, to_csv
from adasim.util.files import atomic_write
from adasim.util.terminal import printable

TIMES = (
    "seconds",
    "images_per_second",
    "waiting",
    "epoch_seconds",
    "epoch_images_per_second",
    "epoch_waiting",
)
"""Metrics in which two runs of one configuration differ."""
UNREADABLE_FILE = "unreadable.csv"


def read_metrics(folder: Path, say: Callable[[str], None] = lambda sentence: None) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, oldest first; one that a kill cut short is passed over, and `say` is told
    of others that cannot be read."""
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in _lines_up_to(path, math.inf)]
    *whole, last = path.read_bytes().split(b"\n")
    cut_short = not last or (last.startswith(b"{") and b"\0" not in last)
    damaged = len(whole) - len(lines) + (not cut_short)
    if damaged:
        say(f"{path}: {damaged} {'lines are' if damaged > 1 else 'line is'} left out, as damaged.")
    return lines


class MetricsLog:
    """A line of JSON in metrics.jsonl and scalars in tensorboard/ for every logged step.

    On a resume at step s, pass `resume_step=s`: lines of later steps, which the resumed run will write again,
    and a line cut short by a kill are dropped first. Write a step's line before its checkpoint is saved, and
    `sync` in between: then each step appears once.

    A full disk does not stop training: what finds no room waits in memory.
    """

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        path = Path(folder) / "metrics.jsonl"
        self.pace = Pace()
        if resume_step is not None and path.exists():
            lines = list(_lines_up_to(path, resume_step))
            # Always anew: a process that lost the run to this one still holds the old file.
            atomic_write(path, b"".join(lines))
            self.pace = Pace.after(json.loads(line) for line in lines)
        self._lines = _GrowingFile(path)
        # TensorBoard hides what was logged from there on.
        self._board = _Board(Path(folder) / "tensorboard", None if resume_step is None else resume_step + 1)
        self.tracker: Tracker | None = None
        """A service that gets every line, too."""

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Log `values` at `step`. NaN and infinities become null in JSON, which has no such numbers."""
        line = {"step": step, **{name: _plain(value) for name, value in values.items()}}
        self._lines.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        numbers = {name: float(value) for name, value in values.items() if not isinstance(value, str)}
        self._board.write(step, numbers)
        if self.tracker is not None:
            self.tracker.write(step, values)

    def sync(self) -> None:
        """Wait until all lines are on the disk: no checkpoint is ahead of its metrics after a power cut."""
        self._lines.flush()
        os.fsync(self._lines.handle)

    def close(self) -> None:
        self._lines.close()
        self._board.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _GrowingFile:
    """A file that is written at its end. What cannot be written yet (full disk, quota) waits in memory."""

    def __init__(self, path: Path) -> None:
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._size = os.fstat(self.handle).st_size
        self._pending = b""

    def write(self, content: bytes) -> None:
        self._pending += content
        self.flush()

    def flush(self) -> None:
        with suppress(OSError):  # whoever needs it on the disk now calls fsync, and is told
            while self._pending:
                written = os.pwrite(self.handle, self._pending, self._size)
                self._size += written
                self._pending = self._pending[written:]

    def close(self) -> None:
        self.flush()
        os.close(self.handle)


class _Board:
    """A file of TensorBoard's. Its own writer has a thread, which dies of a full disk with a traceback."""

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        folder.mkdir(exist_ok=True)
        seconds, rest = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{rest:09d}"
        self._file = _GrowingFile(folder / name)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=purge_step, session_log=start))

    def write(self, step: int, numbers: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _add(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.write(record.getvalue())

    def close(self) -> None:
        self._file.close()


class Pace:
    """Time and speed: `count` every step; `lap` and `epoch` give the figures since the last call of their own.

    Args:
        seconds: of training before this process, in runs that were resumed.
        epoch_seconds: those of them that belong to the epoch in progress.
    """

    def __init__(
        self, seconds: float = 0.0, epoch_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._zero = clock() - seconds
        self._epoch_zero = clock() - epoch_seconds
        self._lap, self._epoch = _Span(clock()), _Span(clock())

    @classmethod
    def after(cls, lines: Iterable[dict[str, Any]]) -> Pace:
        """Going on after these lines of metrics."""
        seconds = epoch_began = 0.0
        for line in lines:
            seconds = float(line.get("seconds") or seconds)
            epoch_began = seconds if "epoch_seconds" in line else epoch_began
        return cls(seconds, seconds - epoch_began)

    def count(self, images: int, waited_s: float) -> None:
        """One more step, and how long it waited for its data."""
        for span in (self._lap, self._epoch):
            span.images += images
            span.waited += waited_s

    def lap(self) -> dict[str, float]:
        now = self._clock()
        speed, waiting = self._lap.figures(now)
        self._lap = _Span(now)
        return {"seconds": now - self._zero, "images_per_second": speed, "waiting": waiting}

    def epoch(self) -> dict[str, float]:
        now = self._clock()
        speed, waiting = self._epoch.figures(now)
        took, self._epoch_zero, self._epoch = now - self._epoch_zero, now, _Span(now)
        return {
            "seconds": now - self._zero,
            "epoch_seconds": took,
            "epoch_images_per_second": speed,
            "epoch_waiting": waiting,
        }


class _Span:
    """What happened since a moment."""

    def __init__(self, began: float) -> None:
        self.began, self.images, self.waited = began, 0, 0.0

    def figures(self, now: float) -> tuple[float, float]:
        """Images per second, and the share of the time that was spent waiting for data."""
        took = max(now - self.began, 1e-9)
        return self.images / took, min(1.0, self.waited / took)


def _lines_up_to(path: Path, step: float) -> Iterable[bytes]:
    with open(path, "rb") as file:
        for line in file:
            try:
                if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                    yield line
            except (ValueError, TypeError, KeyError, RecursionError):
                continue


def _plain(value: Any) -> float | int | str | None:
    """A number of any make (tensor, numpy) as JSON has it."""
    if isinstance(value, str | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


class UnreadableList:
    """RUN/unreadable.csv: the images that could not be read, one line each, over all resumes of the run.

    An image that was repaired since stays on the list: it was replaced in the past.
    """

    def __init__(self, run: Path, images: ImageSet) -> None:
        self.path = run / UNREADABLE_FILE
        self._images = images
        self._lines: dict[int, list[str]] = {}
        with suppress(OSError, ValueError, csv.Error):  # a damaged list is no reason to stop a run
            rows = list(csv.reader(self.path.read_text(encoding="utf-8").splitlines()))[1:]
            self._lines = {int(i): [original(where), original(reason)] for i, where, reason in rows}

    def update(self, problems: dict[int, str]) -> None:
        """Write the file anew if `problems`, {id: where and why}, has something to add. Raises an OSError."""
        lines = dict(self._lines)
        for i, text in problems.items():
            where = self._images.where(i)
            lines[i] = [printable(where), printable(text.removeprefix(f"{where}: "))]
        if lines != self._lines:
            rows = [[str(i), *lines[i]] for i in sorted(lines)]
            atomic_write(self.path, to_csv(["image", "file", "reason"], rows).encode())
            self._lines = lines
