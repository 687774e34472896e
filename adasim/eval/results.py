"""What was measured: one line of JSON per result in the run's `results.jsonl`, and tables that compare runs."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from adasim.runs.folder import versions
from adasim.util.csv import escape_latex
from adasim.util.errors import UserError
from adasim.util.terminal import few, printable

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


# ---- tables of several runs ----


@dataclass(frozen=True)
class Comparison:
    """Rows of runs, columns of protocols and data; the first row is the baseline."""

    headings: list[tuple[str, str, str]]
    """Protocol, setting and data of each column."""
    rows: list[tuple[str, list[tuple[float, float | None] | None]]]
    """A run's name and its cells: the newest value and its difference to the baseline's, or None."""

    def text(self) -> list[list[tuple[str, str, bool]]]:
        """Of each cell: the value, the difference, and whether the value is the best of several in its column."""
        columns = [
            [cell[0] for cell in column if cell] for column in zip(*(c for _, c in self.rows), strict=True)
        ]
        best = [max(values) if len(values) > 1 else None for values in columns]
        return [
            [
                ("-", "", False)
                if cell is None
                else (f"{cell[0]:.1f}", "" if cell[1] is None else f" ({cell[1]:+.1f})", cell[0] == top)
                for cell, top in zip(cells, best, strict=True)
            ]
            for _, cells in self.rows
        ]


def compare(runs: list[Path], say: Callable[[str], None] = lambda sentence: None) -> Comparison:
    """The newest result of each run in each column; few-shot results over several data sets get an average.

    Lines of results that are damaged are left out, and `say` is told.
    """
    if not runs:
        raise UserError("Name the run folders to compare: adasim eval table RUN RUN ...")
    tables: list[dict[tuple[str, ...], float]] = []
    for run in runs:
        finals = [result for result in read_results(run, say) if "epoch" not in result.model]
        tables.append({result.column: float(result.value) for result in finals})
        if not tables[-1]:
            raise UserError(f"No results in {run}. Measure it first: adasim eval knn {run}")
    columns = sorted({c for table in tables for c in table}, key=lambda c: (column_order(c[0]), *c[1:]))
    columns = _with_averages(columns, tables)
    rows = []
    for name, table in zip(run_names(runs), tables, strict=True):
        cells: list[tuple[float, float | None] | None] = []
        for column in columns:
            value, first = table.get(column), tables[0].get(column)
            gap = None if value is None or first is None or table is tables[0] else value - first
            cells.append(None if value is None else (value, gap))
        rows.append((name, cells))
    # Two data sets of one name but with different images are told apart by their fingerprints.
    short = [column[:3] for column in columns]
    headings = [
        (NAMES.get(c[0], c[0]), c[1], c[2] if short.count(c[:3]) == 1 else f"{c[2]} #{c[3][:6]}")
        for c in columns
    ]
    return Comparison(headings, rows)


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
        others = [other.parts for other in paths if other != path]
        depth = 1
        while depth < len(path.parts) and any(path.parts[-depth:] == other[-depth:] for other in others):
            depth += 1
        names.append("/".join(path.parts[-depth:]))
    return names


def print_comparison(comparison: Comparison, console: Console) -> None:
    """A row for each run; where that is too wide for the console, a column for each, as many as fit side by side.

    The best value of each protocol is bold; gains over the first run are green, losses red. No number is ever cut.
    """
    names = [printable(name) for name, _ in comparison.rows]
    cells = [[_styled(*cell) for cell in row] for row in comparison.text()]
    table = Table(box=None, padding=(0, 2))
    table.add_column("run")
    for protocol, setting, data in comparison.headings:
        what = "\n".join(map(printable, (setting, data)))
        table.add_column(Text.assemble(printable(protocol), "\n", (what, "dim")), justify="right")
    for name, row in zip(names, cells, strict=True):
        table.add_row(Text(name), *row)
    wanted = console.measure(table, options=console.options.update(max_width=10**6)).maximum
    if wanted <= console.width:
        console.print(table)
        return
    # Names are wrapped, so as to have many runs side by side.
    width = max(len(cell) for row in cells for cell in row)
    heads = [Text(", ".join(map(printable, heading))) for heading in comparison.headings]
    left = console.width - 2 - len(names) * (width + 2)
    first = min(max(map(len, heads)), max(20, console.width // 3, left))
    side_by_side = max(1, (console.width - first - 2) // (width + 2))
    for start in range(0, len(names), side_by_side):
        if start:
            console.print()
        shown = slice(start, start + side_by_side)
        table = Table(box=None, padding=(0, 1))
        table.add_column("", width=first, overflow="fold")
        for name in names[shown]:
            table.add_column(Text(name), width=width, justify="right", overflow="fold")
        for head, *row in zip(heads, *cells[shown], strict=True):
            table.add_row(head, *row)
        console.print(table)


def _styled(value: str, gap: str, best: bool) -> Text:
    colour = "dim" if gap[3:] == "0.0)" else "green" if "+" in gap else "red"
    return Text(value, style="bold" if best else "").append(gap, style=colour)


def to_markdown(comparison: Comparison) -> str:
    """A table of pipes; the best value of each column is bold."""
    heads = [", ".join(heading) for heading in comparison.headings]
    rows = [["run", *heads], *([name] for name, _ in comparison.rows)]
    for row, cells in zip(rows[1:], comparison.text(), strict=True):
        row += [(f"**{value}**" if best else value) + gap for value, gap, best in cells]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---|" + "---:|" * len(heads), *lines[1:]]) + "\n"


def to_latex(comparison: Comparison) -> str:
    """A tabular with booktabs rules; the best value of each column is bold."""
    columns = "l" + "r" * len(comparison.headings)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    for level in range(3):  # protocol, setting, data
        heads = [escape_latex(heading[level]) for heading in comparison.headings]
        lines.append(" & ".join(["Run" if level == 0 else "", *heads]) + r" \\")
    lines.append(r"\midrule")
    for (name, _), cells in zip(comparison.rows, comparison.text(), strict=True):
        shown = [(rf"\textbf{{{value}}}" if best else value) + gap for value, gap, best in cells]
        lines.append(" & ".join([escape_latex(name), *shown]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"
