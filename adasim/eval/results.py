"""What was measured: one line of JSON per result in a run's `results.jsonl`, and the results of several runs side by
side, in the terminal, in Markdown or in LaTeX."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from adasim.config import Config
from adasim.runs.folder import RunFolder, group_by_setting, versions
from adasim.util.csv import escape_latex
from adasim.util.errors import UserError
from adasim.util.terminal import few, printable
from adasim.util.units import mean_and_deviation, paired_gain, with_spread

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
LEGEND = (
    "Over seeds: mean ± standard deviation (mean gain over the first row's runs of the same seeds ± its standard "
    "error)."
)


@dataclass(frozen=True)
class Result:
    """One figure and all that it depends on."""

    protocol: str  # the evaluation's name: knn, linear, fewshot, segmentation, or one of your own
    setting: str  # in a few words, what must be equal for two figures to compare: `k=20`, `dino, quick`
    value: float  # the figure for tables; accuracies and IoU are in percent
    metrics: dict[str, Any]  # all figures
    data: dict[str, Any]  # at least `name` and `fingerprint`
    model: dict[str, Any]  # `name`, `weights` (their hash), `origin`; of a run's snapshot its `epoch`, too
    settings: dict[str, Any]  # every option of the protocol

    @property
    def column(self) -> tuple[str, str, str, str]:
        """Figures of one column may be compared."""
        return self.protocol, self.setting, str(self.data["name"]), str(self.data["fingerprint"])


def append_result(path: Path, result: Result, device: str) -> None:
    """Add a line, whole or not at all; a line that a crash cut short is closed first, and never read."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    line = json.dumps({"date": date, **vars(result), "versions": versions(device)}).encode() + b"\n"
    try:
        with open(path, "a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # two evaluations may end at the same time
            size = file.seek(0, os.SEEK_END)
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                line = b"\n" + line
            try:
                if os.write(file.fileno(), line) != len(line):
                    raise OSError("the disk is full")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
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
            float(result.value), result.column, result.model.get("epoch")  # what everybody asks of it
            result.metrics.get(COMPARED, {}).items()
            results.append(result)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            damaged.append(str(number))
    if damaged:
        lines = f"lines {few(damaged)} are" if damaged[1:] else f"line {damaged[0]} is"
        say(f"{file}: {lines} left out, as damaged.")
    return results


def column_order(protocol: str) -> int:
    """Where the columns of a protocol stand in a table; those of your own come last."""
    return list(NAMES).index(protocol) if protocol in NAMES else len(NAMES)


# ---- several runs ----


class Cell(NamedTuple):
    """The newest figure of a run, or of several that differ by their random seed alone."""

    value: float  # their mean
    deviation: float | None = None  # their standard deviation
    gain: float | None = None  # mean difference to the baseline's figures of the same seeds
    error: float | None = None  # the gain's standard error


@dataclass(frozen=True)
class Comparison:
    """Rows of runs, one for all that differ by their seed alone; columns of protocols and data. The first row is the
    baseline."""

    headings: list[tuple[str, str, str]]
    """Protocol, setting and data of each column."""
    rows: list[tuple[str, list[Cell | None]]]
    """A name, and its cells."""

    def text(self) -> list[tuple[str, list[tuple[str, str, bool]]]]:
        """The rows in words. Of a cell: the value, the gain, and whether it is the best of several in its column."""
        columns = zip(*(cells for _, cells in self.rows), strict=True)
        values = [[cell.value for cell in column if cell] for column in columns]
        best = [max(column) if len(column) > 1 else None for column in values]

        def words(cell: Cell | None, top: float | None) -> tuple[str, str, bool]:
            if cell is None:
                return "-", "", False
            gain = "" if cell.gain is None else f" ({with_spread(cell.gain, cell.error, '+')})"
            return with_spread(cell.value, cell.deviation), gain, cell.value == top

        return [(name, list(map(words, cells, best))) for name, cells in self.rows]

    def has_seeds(self) -> bool:
        """Whether any figure is a mean over seeds."""
        return any(cell and cell.deviation is not None for _, cells in self.rows for cell in cells)


def compare(runs: list[Path], say: Callable[[str], None] = lambda sentence: None) -> Comparison:
    """The newest results, in a row for each run, or for all runs that differ by their random seed alone. Few-shot
    results over several data sets get an average.

    `say` is told which lines of results are damaged and left out, and what is missing of a row.
    """
    if not runs:
        raise UserError("Name the run folders to compare: adasim eval table RUN RUN ...")
    tables: list[dict[tuple[str, ...], float]] = []
    for run in runs:
        # Without snapshots, and without the table at a run's end, whose images its seed has chosen.
        results = [r for r in read_results(run, say) if "epoch" not in r.model and COMPARED not in r.metrics]
        if not results:
            raise UserError(f"No results in {run}. Measure it first: adasim eval knn {run}")
        tables.append({result.column: float(result.value) for result in results})
    columns = sorted({c for table in tables for c in table}, key=lambda c: (column_order(c[0]), *c[1:]))
    columns = _with_averages(columns, tables)
    # Two data sets of one name but with different images are told apart by their fingerprints.
    short = [column[:3] for column in columns]
    headings = [
        (NAMES.get(c[0], c[0]), c[1], c[2] if short.count(c[:3]) == 1 else f"{c[2]} #{c[3][:6]}")
        for c in columns
    ]
    by_seed = _by_seed(runs)
    first, baseline = by_seed[0]

    def cell(name: str, members: dict[int | None, int], place: int) -> Cell | None:
        ours, base = (
            {seed: tables[run][columns[place]] for seed, run in row.items() if columns[place] in tables[run]}
            for row in (members, baseline)
        )
        if not ours:
            return None
        what = f"{name}: {', '.join(headings[place])}"
        if len(ours) < len(members):
            say(f"{what} was measured for {len(ours)} of {len(members)} seeds.")
        gain = None if members is baseline else paired_gain(ours, base)
        if gain is None and base and members is not baseline:
            if None in ours or None in base:  # an encoder that was not trained here has no seed
                gain = mean_and_deviation(ours.values())[0] - mean_and_deviation(base.values())[0], None
            else:
                say(f"{what} has no gain, since no seed is one of {first}, too.")
        return Cell(*mean_and_deviation(ours.values()), *(gain or ()))

    rows = [(name, [cell(name, members, i) for i in range(len(columns))]) for name, members in by_seed]
    return Comparison(headings, rows)


def _by_seed(runs: list[Path]) -> list[tuple[str, dict[int | None, int]]]:
    """The rows of a table: a name and, by random seed, the numbers of its runs; None is a seed that is not known.

    Runs of one setting and one seed, which differ by something that cannot be seen, have a row each.
    """
    known: dict[int, tuple[Config, str | None]] = {}
    for number, run in enumerate(runs):
        with suppress(UserError):  # results without their run
            folder = RunFolder.open(run.parent if run.name == RESULTS_FILE else run, lock=False)
            known[number] = folder.config, folder.facts.get("fingerprint")
    names, seeds = run_names(runs), {number: config.seed for number, (config, _) in known.items()}
    rows = {n: (name, dict[int | None, int]({seeds.get(n): n})) for n, name in enumerate(names)}
    for _, places in group_by_setting(list(known.values())):
        same = [list(known)[place] for place in places]
        by_seed: dict[int | None, int] = {seeds[number]: number for number in same}
        if 1 < len(by_seed) == len(same):
            shared = {_without_seed(names[number], seeds[number]) for number in same}
            label = shared.pop() if len(shared) == 1 else few(names[number] for number in same)
            rows[same[0]] = f"{label} ({len(same)} seeds)", by_seed
            for number in same[1:]:
                del rows[number]
    return list(rows.values())


def _without_seed(name: str, seed: int) -> str:
    """A run's name without what tells its seed.

    >>> _without_seed("t0.2-s10", 10), _without_seed("seed0/adasim", 0), _without_seed("resnet50", 0)
    ('t0.2', 'adasim', 'resnet50')
    """
    return re.sub(rf"(^|[-_./ ])(seed|s)?[-_. ]?{seed}(?![\d.])", "", name).strip("-_./ ") or name


def _with_averages(
    columns: list[tuple[str, ...]], tables: list[dict[tuple[str, ...], float]]
) -> list[tuple[str, ...]]:
    """After the few-shot columns of a setting, their mean, for the runs that have all of them."""
    listed: list[tuple[str, ...]] = []
    for column in columns:
        listed.append(column)
        group = [c for c in columns if c[:2] == column[:2]]
        if column[0] == "fewshot" and len(group) > 1 and column == group[-1]:
            listed.append((*column[:2], "average", ""))
            for table in tables:
                if all(c in table for c in group):
                    table[listed[-1]] = sum(table[c] for c in group) / len(group)
    return listed


def run_names(runs: list[Path]) -> list[str]:
    """A run's folder as its name, with as many folders above it as tell it from the others: a/t0.2 and b/t0.2."""
    paths = [Path(run).resolve() for run in runs]
    paths = [path.parent if path.name == RESULTS_FILE else path for path in paths]
    parts = [(path.with_suffix("") if path.suffix == ".jsonl" else path).parts for path in paths]
    names = []
    for own in parts:
        others = [other for other in parts if other != own]
        depth = 1
        while depth < len(own) and any(own[-depth:] == other[-depth:] for other in others):
            depth += 1
        names.append("/".join(own[-depth:]))
    return names


def print_comparison(comparison: Comparison, console: Console) -> None:
    """A row for each run; where that is too wide for the console, a table for each column. No number is ever cut.

    The best value of each column is bold; gains over the first run are green, losses red.
    """
    rows = [(Text(printable(name)), [_styled(*cell) for cell in cells]) for name, cells in comparison.text()]
    heads = [[printable(words) for words in heading] for heading in comparison.headings]
    table = Table(box=None, padding=(0, 2))
    table.add_column("run")
    for protocol, setting, data in heads:
        table.add_column(Text.assemble(protocol, "\n", (f"{setting}\n{data}", "dim")), justify="right")
    for name, cells in rows:
        table.add_row(name, *cells)
    if console.measure(table, options=console.options.update(max_width=10**6)).maximum <= console.width:
        return console.print(table)
    for place, head in enumerate(heads):
        table = Table(box=None, padding=(0, 2), show_header=False)
        table.add_column(overflow="fold")
        table.add_column(justify="right", no_wrap=True, min_width=max(len(cells[place]) for _, cells in rows))
        for name, cells in rows:
            table.add_row(name, cells[place])
        console.print(Text(", ".join(head)))
        console.print(table)


def _styled(value: str, gain: str, best: bool) -> Text:
    colour = "dim" if gain[3:6] == "0.0" else "green" if "+" in gain else "red"
    return Text(value, style="bold" if best else "").append(gain, style=colour)


def to_markdown(comparison: Comparison) -> str:
    """A table of pipes; the best value of each column is bold."""
    rows = [["run", *(", ".join(heading) for heading in comparison.headings)]]
    for name, cells in comparison.text():
        rows.append([name, *((f"**{value}**" if best else value) + gain for value, gain, best in cells)])
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---|" + "---:|" * len(comparison.headings), *lines[1:]]) + "\n"


def to_latex(comparison: Comparison) -> str:
    """A tabular with booktabs rules; the best value of each column is bold."""
    columns = "l" + "r" * len(comparison.headings)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    for level, first in enumerate(("Run", "", "")):  # protocol, setting, data
        heads = [escape_latex(heading[level]) for heading in comparison.headings]
        lines.append(" & ".join([first, *heads]) + r" \\")
    lines.append(r"\midrule")
    for name, cells in comparison.text():
        shown = [(rf"\textbf{{{value}}}" if best else value) + gain for value, gain, best in cells]
        lines.append(" & ".join([escape_latex(name), *shown]).replace("±", r"$\pm$") + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"
