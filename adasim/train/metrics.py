"""Numbers of a run by step, for people (TensorBoard) and for programs (JSON lines)."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from adasim.files import atomic_write


class MetricsLog:
    """A line of JSON in metrics.jsonl and scalars in tensorboard/ for every logged step.

    On a resume at step s, pass `resume_step=s`: lines of later steps, which the resumed run will write again,
    and a line cut short by a kill are dropped first. Write a step's line before its checkpoint is saved, and
    `sync` in between: then each step appears once.

    A full disk does not stop training: lines wait in memory until there is room; TensorBoard goes without.
    """

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a slow import, of use to training alone

        path = Path(folder) / "metrics.jsonl"
        if resume_step is not None and path.exists():
            atomic_write(path, b"".join(_lines_up_to(path, resume_step)))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._size = os.fstat(self._file).st_size
        self._pending = b""
        purge = (
            None if resume_step is None else resume_step + 1
        )  # TensorBoard hides what was logged from there on
        self._boards = Path(folder) / "tensorboard"
        self._board: SummaryWriter | None = SummaryWriter(str(self._boards), purge_step=purge)
        self._place = _inode(self._boards)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Log `values` at `step`. NaN and infinities become null in JSON, which has no such numbers."""
        line = {"step": step, **{name: _plain(value) for name, value in values.items()}}
        self._pending += json.dumps(line, allow_nan=False).encode() + b"\n"
        self._flush()
        self._check_place()
        try:
            for name, value in values.items():
                if self._board is not None and not isinstance(value, str):
                    self._board.add_scalar(name, float(value), step)
        except OSError:  # its writing thread died of a full disk some time ago and cannot be revived
            self._board = None

    def _flush(self) -> None:
        try:
            while self._pending:
                written = os.pwrite(self._file, self._pending, self._size)
                self._size += written
                self._pending = self._pending[written:]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def _check_place(self) -> None:
        """TensorBoard opens its file by name each time: never one in a folder that was made anew in this place."""
        if _inode(self._boards) != self._place:
            self._board = None

    def sync(self) -> None:
        """Wait until all lines are on the disk: no checkpoint is ahead of its metrics after a power cut."""
        self._flush()
        os.fsync(self._file)

    def close(self) -> None:
        self._flush()
        os.close(self._file)
        self._check_place()
        if self._board is not None:
            with suppress(OSError):
                self._board.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _inode(folder: Path) -> tuple[int, int] | None:
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _lines_up_to(path: Path, step: int) -> Iterable[bytes]:
    with open(path, "rb") as file:
        for line in file:
            try:
                if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                    yield line
            except (ValueError, TypeError, KeyError):
                continue


def _plain(value: Any) -> float | int | str | None:
    """A number of any make (tensor, numpy) as JSON has it."""
    if isinstance(value, str | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
