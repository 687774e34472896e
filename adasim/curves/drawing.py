"""The figure: 16:9, for a talk. At 1920 pixels across no letter is smaller than 18 pixels.

Colour and marker tell runs apart, the kind of line what is measured. The colours are Okabe and Ito's, which people of
any colour vision tell apart; their yellow, which is lost on white paper, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adasim.curves.grouping import Group, Grouped, folder_name, shared_words
from adasim.curves.panels import Line, Panel
from adasim.curves.reading import Band, Curve, band

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "<", ">", "d")  # one more than colours, so that their pairs repeat late
STYLES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.5, 1, 1.5)))
INK, QUIET = "#222222", "#d9d9d9"
INCHES, DPI = (16.0, 9.0), 120  # 1920 x 1080 pixels
_COLUMNS = (1, 2, 2, 2, 3, 3, 4, 4, 3, 4, 4, 4)  # of one panel, of two, ...
_FEW = 12  # points that are each marked
_BAND = "line: mean over random seeds; band: smallest to largest"


def draw(grouped: Grouped, panels: Sequence[Panel], *, constant: bool = True) -> Any:
    """A matplotlib Figure with these panels; those that no run has numbers for are left out.

    Args:
        constant: draw also the schedules that are one number, always and in all runs.

    Returns None if nothing is left.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    groups = grouped.groups
    drawn = [(panel, found) for panel in panels if (found := _lines(groups, panel, constant))]
    if not drawn:
        return None
    rows, columns = _grid(len(drawn))
    size = {1: 15.0, 2: 14.0, 3: 12.0}.get(columns, 11.0)  # points, 1/72 inch: 11 are 18.3 pixels
    with rc_context({**_LOOK, "font.size": size, "legend.fontsize": size, "axes.titlesize": size * 1.1}):
        figure: Any = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.02, hspace=0.03)
        longest = max(one.reached for group in groups for one in group.runs)
        for place, (panel, found) in enumerate(drawn):
            axes = figure.add_subplot(rows, columns, place + 1)
            _draw_panel(axes, panel, found, len(groups))
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
    found: list[_Drawn] = []
    for number, line in enumerate(panel.lines):
        curves = [[run.curve(line) for run in group.runs] for group in groups]
        if panel.of_peak and len(groups) > 1 and (same := _same_in_all([c for some in curves for c in some])):
            drawn = [_Drawn(None, number, line, band([same]))]
        else:
            drawn = [_Drawn(place, number, line, band(some)) for place, some in enumerate(curves)]
        found += [one for one in drawn if one.band.epochs or one.band.rest]
    if constant or not panel.of_peak:
        return found
    moving = {one.number for one in found if len(set(one.values())) > 1}
    differing = {one.number for one in found if one.group is not None and len(groups) > 1}
    return [one for one in found if one.number in moving | differing]


def _same_in_all(curves: Sequence[Curve]) -> Curve:
    """The curve that all of these are parts of, if there is one."""
    whole: Curve = {}
    for curve in curves:
        if any(whole.get(x, y) != y for x, y in curve.items()):
            return {}
        whole |= curve
    return dict(sorted(whole.items()))


def _draw_panel(axes: Any, panel: Panel, found: Sequence[_Drawn], groups: int) -> None:
    peaks: dict[int, float] = {}
    for one in found:
        peaks[one.number] = max(peaks.get(one.number, -math.inf), *one.values())
    for one in found:
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
        _explain(axes, panel, {one.number: one.line for one in found}, peaks)


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
    for place, group in enumerate(groups):
        count = f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else ""
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        handles.append(Line2D([], [], label=group.label + count, color=colour, marker=marker))
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
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "axes.facecolor": "white",
    "axes.edgecolor": "#777777",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": QUIET,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 2.4,
    "lines.markersize": 7.0,
    "lines.markeredgecolor": "white",
    "lines.markeredgewidth": 0.8,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "legend.labelspacing": 0.3,
    "text.color": INK,
    "font.family": "DejaVu Sans",
}
