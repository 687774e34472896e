"""What was measured: one line of JSON per result in the run's `results.jsonl`."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adasim.runs.folder import versions
from adasim.util.errors import UserError
from adasim.util.terminal import few

RESULTS_FILE = "results.jsonl"
COMPARED = "compared"
"""Of a run's own table, among the metrics: the same figure of raw pixels and of the encoder before the run."""
NAMES = {
    "knn": "k-NN",
    "linear": "linear",
    "fewshot": "few-shot",
    "segmentation": "segmentation",
    "views": "own views",
}
"""Protocols in the order of a table's columns."""


@dataclass(frozen=True)
class Result:
    """One figure and all that it depends on."""

    protocol: str
    """The evaluation's name: knn, linear, fewshot, segmentation, or one of your own."""
    setting: str
    """In a few words, what must be equal for two figures to compare: `k=20`, `dino, quick`."""
    value: float
    """The figure for tables; accuracies and IoU are in percent."""
    metrics: dict[str, Any]
    """All figures."""
    data: dict[str, Any]
    """At least `name` and `fingerprint`."""
    model: dict[str, Any]
    """`name`, `weights` (their hash), `origin`; of a run's snapshot its `epoch`, too."""
    settings: dict[str, Any]
    """Every option of the protocol."""

    @property
    def column(self) -> tuple[str, str, str, str]:
        """Figures of one column may be compared."""
        return self.protocol, self.setting, str(self.data["name"]), str(self.data["fingerprint"])


def append_result(path: Path, result: Result, device: str) -> None:
    """Add a line, whole or not at all; a line that a crash cut short is closed first, and never read."""
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **vars(result),
        "versions": versions(device),
    }
    line = json.dumps(record).encode() + b"\n"
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # two evaluations may end at the same time
            size = os.fstat(file.fileno()).st_size
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                line = b"\n" + line
            try:
                if os.pwrite(file.fileno(), line, size) != len(line):
                    raise OSError("the disk is full")
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), size)
                raise
    except OSError as error:
        raise UserError(f"The result could not be written to {path}: {error.strerror or error}.") from None


def read_results(path: Path, say: Callable[[str], None] = lambda sentence: None) -> list[Result]:
    """The results of a run folder or of a file, oldest first; torn and foreign lines are left out, which is said."""
    path = Path(path)
    file = path / RESULTS_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"No results in {path}. Measure it first: adasim eval knn {path}")
    results, damaged = [], []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            record = json.loads(line)
            result = Result(**{name: record[name] for name in Result.__dataclass_fields__})
            (
                float(result.value),
                result.column,
                result.metrics.get(COMPARED, {}).items(),
                result.model.get("epoch"),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            damaged.append(str(number))
            continue
        results.append(result)
    if damaged:
        lines = f"lines {few(damaged)} are" if damaged[1:] else f"line {damaged[0]} is"
        say(f"{file}: {lines} left out, as damaged.")
    return results


def column_order(protocol: str) -> int:
    """Where the columns of a protocol stand in a table; those of your own come last."""
    return list(NAMES).index(protocol) if protocol in NAMES else len(NAMES)
