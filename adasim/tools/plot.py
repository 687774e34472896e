"""`adasim.plot`: from run folders to a figure, 16:9, for a talk. At 1920 pixels across no letter is smaller than 18.

Colour and marker tell runs apart, the kind of line what is measured. The colours are Okabe and Ito's, which people of
any colour vision tell apart; their yellow, which is lost on white paper, is left out.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adasim.run import Run, load_run
from adasim.tools.curves import (
    PANELS,
    Band,
    Curve,
    Group,
    Grouped,
    Line,
    Panel,
    RunCurves,
    band,
    folder_name,
    group,
    shared_words,
)
from adasim.tools.outputs import FIGURE_MARK, check_figure
from adasim.util.errors import UserError, suggest
from adasim.util.files import atomic_write, write_errors
from adasim.util.terminal import without_font_warnings

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "<", ">", "d")  # one more than colours, so that their pairs repeat late
STYLES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.5, 1, 1.5)))
INK, QUIET = "#222222", "#d9d9d9"
INCHES, DPI = (16.0, 9.0), 120  # 1920 x 1080 pixels
_COLUMNS = (1, 2, 2, 2, 3, 3, 4, 4, 3, 4, 4, 4)  # of one panel, of two, ...
_FEW = 12  # points that are each marked
_BAND = "line: mean over random seeds; band: smallest to largest"
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
    several = [runs] if isinstance(runs, str | Path | Run) else runs
    if not several:
        raise UserError("Which runs? Name the folder of one, or of several.")
    opened = [run if isinstance(run, Run) else load_run(run, say) for run in several]
    opened = list({run.path.resolve(): run for run in opened}.values())  # each once
    files = check_figure([run.path for run in opened], None if out is None else Path(out))
    read = _with_epochs(opened, say)
    panels = _panels(curves, read)
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
    for one in grouped.groups:
        if len(grouped.groups) > 1 or len(one.runs) > 1:
            say(f"{one.label or 'mean and band'}: {_names(one.runs)}")
    if grouped.unsaid:
        say(f"They also differ in {', '.join(grouped.unsaid)}.")
    for file in files:
        _write(figure, file)
        figure.set_layout_engine("none")  # everything has its place now, for the next file too
    return files


def _with_epochs(runs: Sequence[Run], say: Callable[[str], None]) -> list[RunCurves]:
    """The runs that have finished an epoch."""
    read = []
    for run in runs:
        one = RunCurves(run)
        if one.epochs:
            read.append(one)
        elif len(runs) > 1:
            say(f"{run.path} has not finished an epoch yet, and is left out.")
    if not read:
        which = f"{runs[0].path} has" if len(runs) == 1 else "These runs have"
        raise UserError(f"{which} not finished an epoch yet: there is nothing to draw. Come back later.")
    return read


def _panels(names: Sequence[str], runs: Sequence[RunCurves]) -> list[Panel]:
    """The panels of these names; all where none is named."""
    if not names:
        return list(PANELS.values())
    logged = {metric for one in runs for metric in one.metrics()}
    panels = []
    for name in names:
        if name not in PANELS and name not in logged:
            hint = suggest(name, [*PANELS, *sorted(logged - PANELS.keys())])
            raise UserError(f"--curves {name}: these runs have logged nothing of that name. {hint}")
        panels.append(PANELS.get(name) or Panel(name.replace("_", " "), (Line((name,)),)))
    return panels


def _write(figure: Any, file: Path) -> None:
    """One file, whole or not at all; the same bytes for the same curves."""
    from matplotlib import rc_context

    kind = file.suffix.lower()[1:]
    marks: dict[str, dict[str, Any]] = {
        "png": {"Software": FIGURE_MARK},
        "svg": {"Creator": FIGURE_MARK, "Date": None},
        "pdf": {"Creator": FIGURE_MARK, "CreationDate": None},
    }
    buffer = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": FIGURE_MARK}), without_font_warnings():
        figure.savefig(buffer, format=kind, dpi=DPI, metadata=marks[kind])
    with write_errors(file):
        atomic_write(file, buffer.getvalue())


def _names(runs: Sequence[RunCurves]) -> str:
    return ", ".join(str(one.run.path) for one in runs)


# ---- drawing ----


def draw(grouped: Grouped, panels: Sequence[Panel], *, constant: bool = True) -> Any:
    """A matplotlib Figure with these panels; those that no run has numbers for are left out.

    Args:
        constant: draw also the schedules that are one number, always and in all runs.

    Returns None if nothing is left.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    groups = grouped.groups
    drawn = [(panel, lines) for panel in panels if (lines := _lines(groups, panel, constant))]
    if not drawn:
        return None
    rows, columns = _grid(len(drawn))
    size = {1: 15.0, 2: 14.0, 3: 12.0}.get(columns, 11.0)  # points, 1/72 inch: 11 are 18.3 pixels
    with rc_context({**_LOOK, "font.size": size, "legend.fontsize": size, "axes.titlesize": size * 1.1}):
        figure: Any = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.02, hspace=0.03)
        longest = max(one.reached for group in groups for one in group.runs)
        for place, (panel, lines) in enumerate(drawn):
            axes = figure.add_subplot(rows, columns, place + 1)
            _draw_panel(axes, panel, lines, len(groups))
            axes.set_title(panel.title, loc="left", color=INK, parse_math=False)
            axes.set_xlim(0, longest * 1.02)
            axes.xaxis.get_major_locator().set_params(integer=True, nbins=5, steps=[1, 2, 5, 10])
            if place + columns >= len(drawn):
                axes.set_xlabel("epochs")
        _head(figure, grouped, size * 1.3)
    return figure


@dataclass(frozen=True)
class _Drawn:
    """One line of a panel, of one group of runs; `group` is None where it is the same in all of them."""

    group: int | None
    number: int
    line: Line
    band: Band

    @property
    def colour(self) -> str:
        return INK if self.group is None else COLOURS[self.group % len(COLOURS)]

    @property
    def marker(self) -> str:
        return "" if self.group is None else MARKERS[self.group % len(MARKERS)]

    def values(self) -> list[float]:
        return [*self.band.low, *self.band.high, *(y for curve in self.band.rest for y in curve.values())]


def _lines(groups: Sequence[Group], panel: Panel, constant: bool) -> list[_Drawn]:
    """All lines of the panel that have any numbers."""
    lines: list[_Drawn] = []
    for number, line in enumerate(panel.lines):
        curves = [[run.curve(line) for run in group.runs] for group in groups]
        if panel.of_peak and len(groups) > 1 and (same := _same_in_all([c for some in curves for c in some])):
            drawn = [_Drawn(None, number, line, band([same]))]
        else:
            drawn = [_Drawn(place, number, line, band(some)) for place, some in enumerate(curves)]
        lines += [one for one in drawn if one.band.epochs or one.band.rest]
    if constant or not panel.of_peak:
        return lines
    moving = {one.number for one in lines if len(set(one.values())) > 1}
    differing = {one.number for one in lines if one.group is not None and len(groups) > 1}
    return [one for one in lines if one.number in moving | differing]


def _same_in_all(curves: Sequence[Curve]) -> Curve:
    """The curve that all of these are parts of, if there is one."""
    whole: Curve = {}
    for curve in curves:
        if any(whole.get(x, y) != y for x, y in curve.items()):
            return {}
        whole |= curve
    return dict(sorted(whole.items()))


def _draw_panel(axes: Any, panel: Panel, lines: Sequence[_Drawn], groups: int) -> None:
    peaks: dict[int, float] = {}
    for one in lines:
        peaks[one.number] = max(peaks.get(one.number, -math.inf), *one.values())
    for one in lines:
        unit = peaks[one.number] if panel.of_peak and peaks[one.number] > 0 else 1.0
        look = {"color": one.colour, "linestyle": STYLES[one.number % len(STYLES)]}
        epochs = one.band.epochs
        if epochs:
            if one.band.low != one.band.high:
                low, high = ([y / unit for y in edge] for edge in (one.band.low, one.band.high))
                axes.fill_between(epochs, low, high, color=one.colour, alpha=0.18, linewidth=0)
            marks = _marks(len(epochs), one.group or 0, groups)
            axes.plot(epochs, [y / unit for y in one.band.mean], marker=one.marker, markevery=marks, **look)
        for curve in one.band.rest:
            alone = one.marker if len(curve) == 1 else ""
            axes.plot(list(curve), [y / unit for y in curve.values()], linewidth=1.2, marker=alone, **look)
    _limit(axes, panel)
    if len(panel.lines) > 1:
        _explain(axes, panel, {one.number: one.line for one in lines}, peaks)


def _marks(points: int, place: int, groups: int) -> list[int]:
    """Which points bear a marker: all of a few; of many about five, at other places for each of several runs."""
    if points <= _FEW:
        return list(range(points))
    if groups == 1:
        return []
    apart = points / 5
    return sorted({min(points - 1, int(apart * (i + (place + 0.5) / groups))) for i in range(5)})


def _limit(axes: Any, panel: Panel) -> None:
    """Room around the curves, but no percent beyond 0 and 100, and no noise blown up to the panel's height."""
    axes.yaxis.get_major_locator().set_params(nbins=5)
    low, high = axes.get_ylim()
    least = 5.0 if panel.percent else 1e-3 * max(abs(low), abs(high), 1e-6)
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
    if panel.percent:
        low, high = max(low, -0.02 * (high - low)), min(high, 100 + 0.02 * (high - low))
    if panel.from_zero:
        low, high = min(low, 0.0), 1.05 * high
    if panel.of_peak:
        low, high = -0.03, 1.5  # with room for the legend, which would lie on the lines
        axes.set_yticks([0, 0.5, 1])
    axes.set_ylim(low, high)


def _explain(axes: Any, panel: Panel, lines: dict[int, Line], peaks: dict[int, float]) -> None:
    """A legend for the kinds of line."""
    from matplotlib.lines import Line2D

    handles = []
    for number, line in sorted(lines.items()):
        peak = f" (1 = {peaks[number]:.3g})" if panel.of_peak else ""
        handles.append(
            Line2D([], [], color=INK, linestyle=STYLES[number % len(STYLES)], label=line.label + peak)
        )
    where = "upper right" if panel.of_peak else "best"
    # In a full panel no place is free: the words then lie on a pale ground, not among the lines.
    axes.legend(handles=handles, loc=where, frameon=True, framealpha=0.8, edgecolor="none")


def _head(figure: Any, grouped: Grouped, size: float) -> None:
    """Above the panels: what was trained, and which line is which if there are several."""
    from matplotlib.lines import Line2D

    groups, title = grouped.groups, _title(grouped)
    if any(len(group.runs) > 1 for group in groups):
        title += "\n" * bool(title) + _BAND
    if len(groups) == 1:
        figure.suptitle(title, fontsize=size, parse_math=False)
        return
    handles = []
    for place, one in enumerate(groups):
        count = f" ({len(one.runs)} seeds)" if len(one.runs) > 1 else ""
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        handles.append(Line2D([], [], label=one.label + count, color=colour, marker=marker))
    letters = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(len(handles), 130 // (letters + 6)))
    legend = figure.legend(
        handles=handles, loc="outside upper center", ncols=columns, title=title, title_fontsize=size
    )
    legend.get_title().set_multialignment("center")
    for text in (legend.get_title(), *legend.get_texts()):
        text.set_parse_math(False)


def _title(grouped: Grouped) -> str:
    runs = [one for group in grouped.groups for one in group.runs]
    shared = shared_words(runs)
    if len(grouped.groups) > 1:
        count = len(grouped.unsaid)
        more = f"{count} more {'setting differs' if count == 1 else 'settings differ'}" if count else ""
        return "; ".join(words for words in (shared, more) if words)
    (*_, one) = runs
    if len(runs) > 1:
        return f"{shared}, {len(runs)} random seeds"
    total = one.run.config.epochs
    so_far = f", epoch {one.epochs} of {total}" if one.epochs < total else ""
    return f"{folder_name(one.run)}: {shared}{so_far}"


def _grid(panels: int) -> tuple[int, int]:
    """Rows and columns that fill a wide page: 1 x 2 for two panels, 3 x 3 for nine, 3 x 4 for ten."""
    columns = _COLUMNS[panels - 1] if panels <= len(_COLUMNS) else math.ceil(math.sqrt(panels * 4 / 3))
    return math.ceil(panels / columns), columns


_LOOK: dict[Any, Any] = {
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), "white"),
    **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color", "text.color"), INK),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
    "axes.edgecolor": "#777777",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": QUIET,
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.4,
    "lines.markersize": 7.0,
    "lines.markeredgecolor": "white",
    "lines.markeredgewidth": 0.8,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "legend.labelspacing": 0.3,
    "font.family": "DejaVu Sans",
}
