"""What was measured: one line of JSON per result in the run's `results.jsonl`, and tables of several runs."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adasim.data.sources.found import few
from adasim.runs.settings import versions
from adasim.util.errors import UserError

RESULTS_FILE = "results.jsonl"
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
    """`name`, `weights` (their hash), `origin`."""
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
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # two evaluations may end at the same time
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line
            try:
                if os.pwrite(handle, line, size) != len(line):
                    raise OSError("the disk is full")
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, size)
                raise
        finally:
            os.close(handle)
    except OSError as error:
        raise UserError(f"The result could not be written to {path}: {error.strerror or error}.") from None


def read_results(path: Path, say: Callable[[str], None] = lambda sentence: None) -> list[Result]:
    """The results of a run folder or of a file, oldest first; torn and foreign lines are left out, which is said."""
    path = Path(path)
    file = path / RESULTS_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"No results in {path}. Measure it first: adasim eval knn {path}")
    found, damaged = [], []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            record = json.loads(line)
            result = Result(**{name: record[name] for name in Result.__dataclass_fields__})
            float(result.value), result.column
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged.append(str(number))
            continue
        found.append(result)
    if damaged:
        lines = f"lines {few(damaged)} are" if damaged[1:] else f"line {damaged[0]} is"
        say(f"{file}: {lines} left out, as damaged.")
    return found


@dataclass(frozen=True)
class Comparison:
    """Rows of runs, columns of protocols and data; the first row is the baseline."""

    headings: list[tuple[str, str, str]]
    """Protocol, setting and data of each column."""
    rows: list[tuple[str, list[tuple[float, float | None] | None]]]
    """A run's name and its cells: the newest value and its difference to the baseline's, or None."""


def compare(runs: list[Path], say: Callable[[str], None] = lambda sentence: None) -> Comparison:
    """The newest result of each run in each column; few-shot results over several data sets get an average.

    Lines of results that are damaged are left out, and `say` is told.
    """
    if not runs:
        raise UserError("Name the run folders to compare: adasim eval table RUN RUN ...")
    tables = []
    for run in runs:
        newest: dict[tuple[str, ...], float] = {}
        for result in read_results(run, say):
            newest[result.column] = float(result.value)
        if not newest:
            raise UserError(f"No results in {run}. Measure it first: adasim eval knn {run}")
        tables.append(newest)
    columns = sorted(
        {c for table in tables for c in table}, key=lambda c: (column_order(c[0]), c[1], c[2], c[3])
    )
    columns = _with_averages(columns, tables)
    baseline = tables[0]
    rows = []
    for name, table in zip(run_names(runs), tables, strict=True):
        cells: list[tuple[float, float | None] | None] = []
        for column in columns:
            value, first = table.get(column), baseline.get(column)
            gap = None if value is None or first is None or table is baseline else value - first
            cells.append(None if value is None else (value, gap))
        rows.append((name, cells))
    return Comparison(_headings(columns), rows)


def _with_averages(
    columns: list[tuple[str, ...]], tables: list[dict[tuple[str, ...], float]]
) -> list[tuple[str, ...]]:
    """After the few-shot columns of a setting, their mean, for the runs that have all of them."""
    listed: list[tuple[str, ...]] = []
    for place, column in enumerate(columns):
        listed.append(column)
        group = [c for c in columns if c[:2] == column[:2]]
        last = place + 1 == len(columns) or columns[place + 1][:2] != column[:2]
        if column[0] == "fewshot" and last and len(group) > 1:
            average = (*column[:2], "average", "")
            for table in tables:
                if all(c in table for c in group):
                    table[average] = sum(table[c] for c in group) / len(group)
            listed.append(average)
    return listed


def _headings(columns: list[tuple[str, ...]]) -> list[tuple[str, str, str]]:
    """Two data sets of one name but with different images are told apart by their fingerprints."""
    short = [column[:3] for column in columns]
    return [
        (NAMES.get(c[0], c[0]), c[1], c[2] if short.count(c[:3]) == 1 else f"{c[2]} #{c[3][:6]}")
        for c in columns
    ]


def column_order(protocol: str) -> int:
    """Where the columns of a protocol stand in a table; those of your own come last."""
    return list(NAMES).index(protocol) if protocol in NAMES else len(NAMES)


def run_names(runs: list[Path]) -> list[str]:
    """A run's folder as its name, with as many folders above it as tell it from the others: a/t0.2 and b/t0.2."""
    paths = []
    for run in runs:
        path = Path(run).resolve()
        if path.name == RESULTS_FILE:
            path = path.parent
        paths.append(path.with_suffix("") if path.suffix == ".jsonl" else path)
    names = []
    for path in paths:
        others = {other for other in paths if other != path}
        depth = 1
        while depth < len(path.parts) and any(
            path.parts[-depth:] == other.parts[-depth:] for other in others
        ):
            depth += 1
        names.append("/".join(path.parts[-depth:]))
    return names
