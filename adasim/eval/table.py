"""Results of several runs side by side: in the terminal, in Markdown, in LaTeX."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from adasim.config import Config
from adasim.eval.results import COMPARED, NAMES, RESULTS_FILE, column_order, read_results
from adasim.runs.folder import RunFolder
from adasim.runs.grouping import group_by_setting
from adasim.util.csv import escape_latex
from adasim.util.errors import UserError
from adasim.util.statistics import mean_and_deviation, paired_gain, with_spread
from adasim.util.terminal import few, printable

LEGEND = (
    "Over seeds: mean ± standard deviation (mean gain over the first row's runs of the same seeds ± its standard "
    "error)."
)


class Cell(NamedTuple):
    """The newest figure of a run, or of several that differ by their random seed alone."""

    value: float
    """Their mean."""
    deviation: float | None = None
    """Their standard deviation, of several."""
    gain: float | None = None
    """The mean difference to the baseline's figures of the same seeds."""
    error: float | None = None
    """The gain's standard error, over several seeds."""


@dataclass(frozen=True)
class Comparison:
    """Rows of runs, one for all that differ by their seed alone; columns of protocols and data. The first row is the
    baseline."""

    headings: list[tuple[str, str, str]]
    """Protocol, setting and data of each column."""
    rows: list[tuple[str, list[Cell | None]]]
    """A name, and its cells."""

    def text(self) -> list[list[tuple[str, str, bool]]]:
        """Of each cell: the value, the gain, and whether the value is the best of several in its column."""
        columns = zip(*(cells for _, cells in self.rows), strict=True)
        values = [[cell.value for cell in column if cell] for column in columns]
        best = [max(column) if len(column) > 1 else None for column in values]
        return [
            [
                ("-", "", False) if cell is None else (*_figures(cell), cell.value == top)
                for cell, top in zip(cells, best, strict=True)
            ]
            for _, cells in self.rows
        ]

    def has_seeds(self) -> bool:
        """Whether any figure is a mean over seeds."""
        return any(cell and cell.deviation is not None for _, cells in self.rows for cell in cells)


def _figures(cell: Cell) -> tuple[str, str]:
    gain = "" if cell.gain is None else f" ({with_spread(cell.gain, cell.error, '+')})"
    return with_spread(cell.value, cell.deviation), gain


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
        finals = [
            result
            for result in read_results(run, say)
            if "epoch" not in result.model and COMPARED not in result.metrics
        ]
        tables.append({result.column: float(result.value) for result in finals})
        if not tables[-1]:
            raise UserError(f"No results in {run}. Measure it first: adasim eval knn {run}")
    columns = sorted({c for table in tables for c in table}, key=lambda c: (column_order(c[0]), *c[1:]))
    columns = _with_averages(columns, tables)
    # Two data sets of one name but with different images are told apart by their fingerprints.
    short = [column[:3] for column in columns]
    headings = [
        (NAMES.get(c[0], c[0]), c[1], c[2] if short.count(c[:3]) == 1 else f"{c[2]} #{c[3][:6]}")
        for c in columns
    ]
    rows: list[tuple[str, list[Cell | None]]] = []
    by_seed = _by_seed(runs)
    first, baseline = by_seed[0]
    for name, members in by_seed:
        cells: list[Cell | None] = []
        for heading, column in zip(headings, columns, strict=True):
            ours, base = (
                {seed: tables[number][column] for seed, number in arm.items() if column in tables[number]}
                for arm in (members, baseline)
            )
            what = f"{name}: {', '.join(heading)}"
            if 0 < len(ours) < len(members):
                say(f"{what} was measured for {len(ours)} of {len(members)} seeds.")
            gain = paired_gain(ours, base) if rows else None
            if ours and base and rows and gain is None:
                if None in ours or None in base:  # of an encoder that was not trained here
                    gain = mean_and_deviation(ours.values())[0] - mean_and_deviation(base.values())[0], None
                else:
                    say(f"{what} has no gain, since no seed is one of {first}, too.")
            cells.append(Cell(*mean_and_deviation(ours.values()), *(gain or ())) if ours else None)
        rows.append((name, cells))
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
    rows = {
        number: {known[number][0].seed if number in known else None: number} for number in range(len(runs))
    }
    for _, places in group_by_setting(list(known.values())):
        same = [list(known)[place] for place in places]
        seeds: dict[int | None, int] = {known[number][0].seed: number for number in same}
        if len(seeds) == len(same):
            rows = {number: row for number, row in rows.items() if number not in same[1:]}
            rows[same[0]] = seeds
    each = run_names(runs)
    members = [[each[number] for number in row.values()] for row in rows.values()]
    shared = [_shared_name(names) for names in members]
    names = [
        names[0]
        if len(names) == 1
        else f"{own if own and shared.count(own) == 1 else few(names)} ({len(names)} seeds)"
        for own, names in zip(shared, members, strict=True)
    ]
    return list(zip(names, rows.values(), strict=True))


def _shared_name(names: list[str]) -> str:
    """What the names of runs share, without what numbers the seeds.

    >>> _shared_name(["t0.2-s10", "t0.2-s11"]), _shared_name(["seed0/adasim", "seed1/adasim"]), _shared_name(["a"])
    ('t0.2', 'adasim', 'a')
    >>> _shared_name(["resnet50", "resnet50-s1"])
    'resnet50'
    """
    start = _common_start(names)
    rests = [name[len(start) :] for name in names]
    end = _common_start([rest[::-1] for rest in rests])[::-1]
    if any(rest[:1].isdigit() for rest in rests):  # the start of the seed's number is not a name's
        start = start.rstrip("0123456789")
    start = re.sub(r"(^|[-_./ ])(seed|s)?[-_. ]*$", "", start)
    return (start + end).strip("-_./ ")


def _common_start(names: list[str]) -> str:
    return "".join(letters[0] for letters in takewhile(lambda x: len(set(x)) == 1, zip(*names, strict=False)))


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
    colour = "dim" if gap[3:6] == "0.0" else "green" if "+" in gap else "red"
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
        lines.append(" & ".join([escape_latex(name), *shown]).replace("±", r"$\pm$") + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"
