"""From run folders to files: read the runs, draw them, write the figure."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from adasim.curves.drawing import DPI, draw
from adasim.curves.grouping import Grouped, group
from adasim.curves.outputs import MARK, outputs
from adasim.curves.panels import PANELS, Panel, panel_of_metric
from adasim.curves.reading import RunCurves
from adasim.run import Run, load_run
from adasim.util.errors import UserError
from adasim.util.files import atomic_write, remedy
from adasim.util.terminal import without_font_warnings

MOST_LINES = 24  # with more, the legend leaves no room for the curves


def plot(
    runs: str | Path | Run | Sequence[str | Path | Run],
    out: str | Path | None = None,
    *,
    curves: Sequence[str] = (),
    say: Callable[[str], None] = lambda sentence: None,
) -> list[Path]:
    """Draw the curves of a run, or of several in one figure; returns the files that were written.

    Runs that differ by their random seed alone become one line, their mean, in a band from the smallest to the
    largest value. An earlier figure of ours is replaced, any other file is not.

    Args:
        runs: run folders, finished or not.
        out: a file (.png, .svg, .pdf), or a folder for curves.png and curves.svg: by default the run's own, and of
            several runs this one.
        curves: which panels, by the names that `adasim plot --help` lists, or any metric; all by default.
        say: takes a sentence about each group of runs, and about those that are left out.

    >>> import adasim
    >>> adasim.plot("runs/demo")                                          # doctest: +SKIP
    >>> adasim.plot(["runs/a", "runs/b"], "knn.svg", curves=["knn"])      # doctest: +SKIP
    """
    opened = open_runs([runs] if isinstance(runs, str | Path | Run) else runs)
    files = outputs([run.path for run in opened], None if out is None else Path(out))
    read = with_epochs(opened, say)
    panels = chosen_panels(curves, read)
    grouped = group(read)
    if len(grouped.groups) > MOST_LINES:
        raise UserError(
            f"These runs are of {len(grouped.groups)} different settings, and a figure has room for {MOST_LINES}. "
            f"Name fewer."
        )
    figure = draw(grouped, panels, constant=bool(curves))
    if figure is None:
        wanted = f" for {', '.join(curves)}" if curves else ""
        raise UserError(f"There is nothing to draw{wanted}: {_names(read)} logged no such numbers.")
    describe(grouped, say)
    for file in files:
        write(figure, file)
        figure.set_layout_engine("none")  # everything has its place now, for the next file too
    return files


def open_runs(runs: Sequence[str | Path | Run]) -> list[Run]:
    """Each run once, in the order given."""
    if not runs:
        raise UserError("Which runs? Name the folder of one, or of several.")
    opened = [run if isinstance(run, Run) else load_run(run) for run in runs]
    return list({run.path.resolve(): run for run in opened}.values())


def with_epochs(runs: Sequence[Run], say: Callable[[str], None]) -> list[RunCurves]:
    """The runs that have finished an epoch."""
    read = []
    for run in runs:
        try:
            one = RunCurves(run)
        except OSError as error:
            raise UserError(
                f"{run.path / 'metrics.jsonl'} cannot be read: {error.strerror}. Leave out this run."
            ) from None
        if one.epochs:
            read.append(one)
        elif len(runs) > 1:
            say(f"{run.path} has not finished an epoch yet, and is left out.")
    if not read:
        which = f"{runs[0].path} has" if len(runs) == 1 else "These runs have"
        raise UserError(f"{which} not finished an epoch yet: there is nothing to draw. Come back later.")
    return read


def chosen_panels(names: Sequence[str], runs: Sequence[RunCurves]) -> list[Panel]:
    """The panels of these names; all where none is named."""
    if not names:
        return list(PANELS.values())
    logged = {metric for one in runs for metric in one.metrics()}
    panels = []
    for name in names:
        if name not in PANELS and name not in logged:
            known = dict.fromkeys([*PANELS, *sorted(logged)])
            nearest = get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"Did you mean {' or '.join(nearest)}?" if nearest else f"There are {', '.join(PANELS)}."
            raise UserError(f"--curves {name}: these runs have logged nothing of that name. {hint}")
        panels.append(PANELS[name] if name in PANELS else panel_of_metric(name))
    return panels


def write(figure: Any, file: Path) -> None:
    """One file, whole or not at all; the same bytes for the same curves."""
    from matplotlib import rc_context

    kind = file.suffix.lower()[1:]
    marks: dict[str, dict[str, Any]] = {
        "png": {"Software": MARK},
        "svg": {"Creator": MARK, "Date": None},
        "pdf": {"Creator": MARK, "CreationDate": None},
    }
    buffer = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": MARK}), without_font_warnings():
        figure.savefig(buffer, format=kind, dpi=DPI, metadata=marks[kind])
    try:
        atomic_write(file, buffer.getvalue())
    except OSError as error:
        raise UserError(
            f"{file} cannot be written: {error.strerror or error}. {remedy(error)}, or choose another --out."
        ) from None


def describe(grouped: Grouped, say: Callable[[str], None]) -> None:
    """Which folders are behind each line of the legend, and what it does not say."""
    for one in grouped.groups:
        if len(grouped.groups) > 1 or len(one.runs) > 1:
            say(f"{one.label or 'mean and band'}: {_names(one.runs)}")
    if grouped.unsaid:
        say(f"They also differ in {', '.join(grouped.unsaid)}.")


def _names(runs: Sequence[RunCurves]) -> str:
    return ", ".join(str(one.run.path) for one in runs)
