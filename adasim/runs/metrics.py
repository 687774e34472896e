"""What a run writes down as it goes: numbers by step, for people (TensorBoard; with `--log` wandb or MLflow) and for
programs (JSON lines), and the images that could not be read."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adasim.data import ImageSet
from adasim.runs.folder import flatten
from adasim.util.csv import original, to_csv
from adasim.util.errors import UserError
from adasim.util.files import atomic_write
from adasim.util.terminal import printable

TIMES = (
    *("seconds", "images_per_second", "waiting"),
    *("epoch_seconds", "epoch_images_per_second", "epoch_waiting"),
)
"""Metrics in which two runs of one configuration differ."""
UNREADABLE_FILE = "unreadable.csv"
PROJECT = "adasim"
"""The project or experiment of a service, where its own environment variable names none."""
WAIT_S = 30.0
"""Seconds that the end of a run waits for a service."""
_LINES = 10_000  # that may wait for a service; more are dropped
_TAG = "adasim.run"


def read_metrics(folder: Path, say: Callable[[str], None] = lambda sentence: None) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, oldest first; one that a kill cut short is passed over, and `say` is told
    of others that cannot be read."""
    path = folder / "metrics.jsonl"
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

    `step` is where the run stands: lines of later steps, which a resumed run will write again, and a line cut short
    by a kill are dropped first. Write a step's line before its checkpoint is saved, and `sync` in between: then each
    step appears once.

    A full disk does not stop training: what finds no room waits in memory.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        path, lines = folder / "metrics.jsonl", list[bytes]()
        if path.exists():
            lines = list(_lines_up_to(path, step))
            # Always anew: a process that lost the run to this one still holds the old file.
            atomic_write(path, b"".join(lines))
        self.pace = Pace.after(json.loads(line) for line in lines)
        self._lines = _GrowingFile(path)
        self._board = _Board(folder / "tensorboard", step)
        self.tracker: Tracker | None = None
        """A service that gets every line, too."""

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Log `values` at `step`. NaN and infinities become null in JSON, which has no such numbers."""
        line = {"step": step, **{name: _plain(value) for name, value in values.items()}}
        self._lines.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        numbers = {name: float(value) for name, value in values.items() if not isinstance(value, str)}
        self._board.scalars(step, numbers)
        if self.tracker is not None:
            self.tracker.write(step, numbers)

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


class _Board(_GrowingFile):
    """A file of TensorBoard's. Its own writer has a thread, which dies of a full disk with a traceback."""

    def __init__(self, folder: Path, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        folder.mkdir(exist_ok=True)
        seconds, rest = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{rest:09d}"
        super().__init__(folder / name)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)  # TensorBoard hides what was logged from there on
        self._add(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def scalars(self, step: int, numbers: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _add(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self.write(record.getvalue())


class Pace:
    """Time and speed: `count` every step; `lap` and `epoch` give the figures since the last call of their own.

    Args:
        seconds: of training before this process, in runs that were resumed.
        epoch_seconds: those of them that belong to the epoch in progress.
    """

    def __init__(
        self, seconds: float = 0.0, epoch_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        now = clock()
        self._clock, self._zero, self._epoch_zero = clock, now - seconds, now - epoch_seconds
        self._lap, self._epoch = [now, 0, 0.0], [now, 0, 0.0]  # since when; images, and seconds of waiting

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
            span[1] += images
            span[2] += waited_s

    def lap(self) -> dict[str, float]:
        now = self._clock()
        return {"seconds": now - self._zero, **self._figures(self._lap, now, "")}

    def epoch(self) -> dict[str, float]:
        now = self._clock()
        took, self._epoch_zero = now - self._epoch_zero, now
        figures = self._figures(self._epoch, now, "epoch_")
        return {"seconds": now - self._zero, "epoch_seconds": took, **figures}

    @staticmethod
    def _figures(span: list[float], now: float, prefix: str) -> dict[str, float]:
        """Images per second and the share of waiting of a span, which begins anew."""
        began, images, waited = span
        took = max(now - began, 1e-9)
        span[:] = [now, 0, 0.0]
        return {f"{prefix}images_per_second": images / took, f"{prefix}waiting": min(1.0, waited / took)}


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


def list_unreadable(run: Path, images: ImageSet, problems: dict[int, str]) -> None:
    """Add the images that could not be read, {id: where and why}, to RUN/unreadable.csv. Raises an OSError.

    It has a line for each, over all resumes of the run; one that was repaired since was replaced in the past.
    """
    known: dict[int, list[str]] = {}
    with suppress(OSError, ValueError, csv.Error):  # a damaged list is no reason to stop a run
        rows = list(csv.reader((run / UNREADABLE_FILE).read_text(encoding="utf-8").splitlines()))[1:]
        known = {int(i): [original(where), original(reason)] for i, where, reason in rows}
    lines = dict(known)
    for i, text in problems.items():
        where = images.where(i)
        lines[i] = [printable(where), printable(text.removeprefix(f"{where}: "))]
    if lines != known:
        rows = [[str(i), *lines[i]] for i in sorted(lines)]
        atomic_write(run / UNREADABLE_FILE, to_csv(["image", "file", "reason"], rows).encode())


# Services. One may be slow, unreachable or out of order; a run neither waits for it nor ends by it. Lines go to a
# thread, and what does not arrive is still in metrics.jsonl. Each service is set up as its users know it: by its own
# environment variables, logins and offline modes.


class Wandb:
    """A run of Weights & Biases whose id is the run's own, so that a resumed run goes on in it."""

    def __init__(self, identity: str, name: str, config: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=identity,
            name=name,
            resume="allow",
            config=config,
            settings=wandb.Settings(silent=True, console="off"),  # the terminal is the progress bar's
        )
        self._from = self._run.step  # steps below are there already
        offline = self._run.settings.mode == "offline"
        where = Path(self._run.dir).parent
        self.place = f"{where} (send it later with: wandb sync {where})" if offline else str(self._run.url)

    def send(self, step: int, values: dict[str, Any]) -> None:
        if step >= self._from:
            self._run.log(values, step=step)

    def finish(self, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)


class Mlflow:
    """A run of MLflow that bears the run's id as a tag, by which a resumed run finds it again."""

    def __init__(self, identity: str, name: str, config: dict[str, Any]) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = client = MlflowClient()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = client.get_experiment_by_name(experiment)
        number = client.create_experiment(experiment) if known is None else known.experiment_id
        runs = client.search_runs([number], f"tags.`{_TAG}` = '{identity}'", max_results=1)
        self._last = -1
        if runs:
            self._id = runs[0].info.run_id
            sent = client.get_metric_history(self._id, "epoch")
            self._last = max((point.step for point in sent), default=-1)
            client.update_run(self._id, status="RUNNING")
        else:
            self._id = client.create_run(number, run_name=name, tags={_TAG: identity}).info.run_id
            settings = [Param(key, str(value)[:500]) for key, value in flatten(config).items()]
            for first in range(0, len(settings), 100):  # as many as it takes at once
                client.log_batch(self._id, params=settings[first : first + 100])
        self.place = f"{client.tracking_uri}, experiment {experiment}, run {self._id}"

    def send(self, step: int, values: dict[str, Any]) -> None:
        if step <= self._last:  # sent before the run was resumed from an earlier step
            return
        now = int(1000 * time.time())
        metrics = [self._metric(name, x, now, step) for name, x in values.items() if math.isfinite(x)]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, complete: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if complete else "KILLED")


SERVICES: dict[str, Callable[[str, str, dict[str, Any]], Any]] = {"wandb": Wandb, "mlflow": Mlflow}
"""Called with the run's id, its name and its configuration. `place` says where people find the metrics."""


def check_installed(log: str) -> None:
    """Refuse, before a run begins, a service whose package is not there."""
    try:
        installed = log not in SERVICES or find_spec(log) is not None
    except ValueError:  # a module that is there in name alone
        installed = False
    if not installed:
        raise UserError(
            f"--log {log} needs {log}, which is not installed: pip install 'adasim[{log}]'. Without --log, metrics "
            f"go to the run folder alone."
        )


class Tracker:
    """Hands lines to a service in a thread of its own."""

    def __init__(self, log: str, service: Any, say: Callable[[str], None]) -> None:
        self._log, self._service, self._say = log, service, say
        self._lines: queue.Queue[tuple[int, dict[str, float]] | bool] = queue.Queue()
        self._lost, self._problem, self._told = 0, "", False
        self._thread = threading.Thread(target=self._send, name="adasim-log", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls, log: str, identity: str, name: str, config: dict[str, Any], say: Callable[[str], None]
    ) -> Tracker | None:
        """A tracker of that service; None for "files" alone, and if the service cannot be reached, which is said."""
        if log not in SERVICES:
            return None
        try:
            service = SERVICES[log](identity, name, config)
        except Exception as error:  # of any make: networks, logins, disks
            say(
                f"Metrics do not go to {log}: {_reason(error)}. The run goes on; they are in its metrics.jsonl."
            )
            return None
        say(f"Metrics go to {log}, too: {service.place}")
        return cls(log, service, say)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Send the numbers, some time; returns at once."""
        if self._lines.qsize() < _LINES:
            self._lines.put((step, numbers))
        else:
            self._lost += 1
        if self._problem and not self._told:
            self._told = True
            self._say(f"{self._log} does not take metrics at the moment: {self._problem}. The run goes on.")

    def close(self, complete: bool = True) -> None:
        """Give the service some time for what it has not got yet."""
        self._lines.put(complete)
        self._thread.join(WAIT_S)
        busy = self._thread.is_alive()
        if lost := self._lost + (self._lines.qsize() if busy else 0):
            why = f" ({self._problem})" if self._problem else ""
            self._say(f"{lost} lines of metrics did not reach {self._log}{why}; all are in metrics.jsonl.")
        elif busy:
            self._say(f"{self._log} may not have got the last metrics yet; all are in metrics.jsonl.")

    def _send(self) -> None:
        while True:
            line = self._lines.get()
            try:
                if isinstance(line, bool):
                    return self._service.finish(line)
                self._service.send(*line)
            except Exception as error:
                self._problem = _reason(error)
                if isinstance(line, bool):
                    return
                self._lost += 1


def _reason(error: Exception) -> str:
    return (next(iter(str(error).strip().splitlines()), "") or type(error).__name__).rstrip(".")
