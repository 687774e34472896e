"""`adasim.plot`: from run folders to a figure, 16:9, for a talk. At 1920 pixels across no letter is smaller than 18.

Colour and marker tell runs apart, the kind of line what is measured. The colours are Okabe and Ito's, which people of
any colour vision tell apart; their yellow, which is lost on white paper, is left out.
"""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

from adasim.tools.outputs import FIGURE_MARK, check_figure
from adasim.util.errors import UserError, suggest
from adasim.util.files import atomic_write, write_errors
from adasim.util.terminal import shortened, without_font_warnings

if TYPE_CHECKING:  # imports torch, and `adasim plot --help` lists the panels without it
    from adasim.api import Run

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "<", ">", "d")  # one more than colours, so that their pairs repeat late
STYLES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.5, 1, 1.5)))
INK = "#222222"
INCHES, DPI = (16.0, 9.0), 120  # 1920 x 1080 pixels
MOST_LINES = 24  # with more, the legend leaves no room for the curves
_COLUMNS = (1, 2, 2, 2, 3, 3, 4, 4, 3, 4, 4, 4)  # of one panel, of two, ...


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    lines: dict[str, str]
    """{label: metric in metrics.jsonl}"""
    kind: Literal["", "shares", "percent", "from zero", "relative"] = ""
    """shares: of 1, drawn in percent. from zero: 0 is in sight, where its distance matters more than differences.
    relative: each line is divided by its largest value, which its label tells; schedules share no unit."""


PANELS: dict[str, Panel] = {
    "loss": Panel("Loss (mean of each epoch)", {"": "epoch_loss"}),
    "schedules": Panel(
        "Optimiser's schedules (relative)",
        {"learning rate": "lr", "weight decay": "weight_decay"},
        "relative",
    ),
    "teacher-schedules": Panel(
        "Teacher's schedules (relative)",
        {"temperature": "teacher_temp", "1 - momentum": "1 - teacher_momentum"},
        "relative",
    ),
    "bootstrap": Panel("Bootstrapping ratio (% of pairs)", {"": "bootstrap_ratio"}, "shares"),
    "nn": Panel(
        "Nearest neighbour of the same class (%)",
        {"partner j* (often itself)": "partner_accuracy", "this epoch's list": "nn_accuracy_top1"},
        "shares",
    ),
    "second-nn": Panel(
        "Second neighbour of the same class (%)",
        {
            "p_win without j* and the image": "other_neighbour_accuracy",
            "this epoch's list": "nn_accuracy_top2",
        },
        "shares",
    ),
    "self-match": Panel("Nearest is the image itself (%)", {"": "nn_self_top1"}, "shares"),
    "knn": Panel("k-NN accuracy (%)", {"": "knn_top1"}, "percent"),
    "teacher-entropy": Panel("Teacher entropy (% of maximum)", {"": "epoch_teacher_entropy_share"}, "shares"),
    "spread": Panel("Feature spread (1: fills the sphere)", {"": "epoch_feature_spread"}, "from zero"),
    "rankme": Panel("RankMe (directions in use)", {"": "epoch_rankme"}, "from zero"),
}
"""By the names that `--curves` takes, in the order in which they are drawn."""


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
    from adasim.api import Run, load_run

    several = [runs] if isinstance(runs, str | Path | Run) else runs
    if not several:
        raise UserError("Which runs? Name the folder of one, or of several.")
    opened = [run if isinstance(run, Run) else load_run(run, say) for run in several]
    opened = list({run.path.resolve(): run for run in opened}.values())  # each once
    files = check_figure([run.path for run in opened], None if out is None else Path(out))
    read = [one for one in map(RunCurves, opened) if one.epochs]
    if not read:
        which = f"{opened[0].path} has" if len(opened) == 1 else "These runs have"
        raise UserError(f"{which} not finished an epoch yet: there is nothing to draw. Come back later.")
    for run in opened:
        if all(run is not one.run for one in read):
            say(f"{run.path} has not finished an epoch yet, and is left out.")
    panels = [_panel(name, read) for name in curves] or list(PANELS.values())
    groups, unsaid = group(read)
    if len(groups) > MOST_LINES:
        raise UserError(
            f"These runs are of {len(groups)} different settings, and a figure has room for {MOST_LINES}. "
            f"Name fewer."
        )
    figure = draw(groups, panels, unsaid, constant=bool(curves))
    if figure is None:
        wanted = f" for {', '.join(curves)}" if curves else ""
        raise UserError(f"There is nothing to draw{wanted}: {_paths(read)} logged no such numbers.")
    for one in groups:
        if len(groups) > 1 or len(one.runs) > 1:
            say(f"{one.label or 'mean and band'}: {_paths(one.runs)}")
    if unsaid:
        say(f"They also differ in {', '.join(unsaid)}.")
    for file in files:
        _write(figure, file)
        figure.set_layout_engine("none")  # everything has its place now, for the next file too
    return files


def _panel(name: str, runs: Sequence[RunCurves]) -> Panel:
    logged = {metric for one in runs for metric in one.metrics()}
    if name not in PANELS and name not in logged:
        hint = suggest(name, [*PANELS, *sorted(logged - PANELS.keys())])
        raise UserError(f"--curves {name}: these runs have logged nothing of that name. {hint}")
    return PANELS.get(name) or Panel(name.replace("_", " "), {"": name})


def _paths(runs: Iterable[RunCurves]) -> str:
    return ", ".join(str(one.run.path) for one in runs)


def _write(figure: Any, file: Path) -> None:
    """One file, whole or not at all; the same bytes for the same curves."""
    from matplotlib import rc_context

    kind, buffer = file.suffix.lower()[1:], io.BytesIO()
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    mark = {"Software" if kind == "png" else "Creator": FIGURE_MARK, **dated}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": FIGURE_MARK}), without_font_warnings():
        figure.savefig(buffer, format=kind, dpi=DPI, metadata=mark)
    with write_errors(file):
        atomic_write(file, buffer.getvalue())


# ---- the curves of a run ----

Curve = dict[float, float]
"""{epochs done: value}, in this order."""


class RunCurves:
    """What a run has logged, by epochs done instead of steps.

    Attributes:
        run: the run.
        epochs: how many epochs it has finished; 0 means that there is nothing to draw yet.
        reached: the same with the part of the epoch that it is in.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        placed = [line for line in run.metrics if _is_number(line["step"]) and _is_number(line.get("epoch"))]
        # A line of epoch e (from 0) stands at most e + 1 epochs into the run, and at an epoch's end just there.
        self._steps = max((line["step"] / (line["epoch"] + 1) for line in placed), default=0.0)
        self.reached = max((line["step"] for line in placed), default=0) / (self._steps or 1.0)
        # In the first epoch nobody knows how long one is.
        known = any(line["epoch"] or "epoch_loss" in line for line in placed)
        self.epochs = int(self.reached + 1e-6) if known else 0

    def metrics(self) -> set[str]:
        """The names of all numbers that were logged."""
        names = {name for line in self.run.metrics for name, value in line.items() if _is_number(value)}
        return names - {"step", "epoch"}

    def curve(self, metric: str, in_percent: bool = False) -> Curve:
        """The points of a metric; what is no number (an infinite loss) is left out."""
        logged = self.run.curve(metric.removeprefix("1 - ")).items()
        points = {round(s / self._steps, 6): y for s, y in logged if _is_number(s) and _is_number(y)}
        if metric == "knn_top1" and not points:
            # Of the run's snapshots, as measured last: on the same images with the same setting.
            measured = [one for one in self.run.results if one.protocol == "knn" and "epoch" in one.model]
            points = {one.model["epoch"]: one.value for one in measured if one.column == measured[-1].column}
        scale, start = (100, 0) if in_percent else (-1, 1) if metric.startswith("1 - ") else (1, 0)
        return {x: start + scale * y for x, y in sorted(points.items())}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@dataclass(frozen=True)
class Band:
    """Several curves as one."""

    epochs: list[float]
    """Where all of them have a value."""
    mean: list[float]
    low: list[float]
    high: list[float]
    rest: list[Curve]
    """The curves beyond the last of these epochs, each by itself: of runs that are ahead of the others."""

    def values(self) -> list[float]:
        return [*self.low, *self.high, *(y for curve in self.rest for y in curve.values())]


def band(curves: Sequence[Curve]) -> Band:
    """Mean, smallest and largest value of the curves that have any."""
    curves = [curve for curve in curves if curve]
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    values = [[curve[x] for curve in curves] for x in common]
    last = common[-1] if common else -math.inf
    rest = [{x: y for x, y in curve.items() if x >= last} for curve in curves if max(curve) > last]
    mean = [sum(at) / len(at) for at in values]
    return Band(common, mean, [*map(min, values)], [*map(max, values)], rest)


# ---- which runs are one setting with several random seeds ----

_MOST_WORDS = 3  # settings in a label; a talk has no room for more
_LETTERS = 48  # of a name in a legend
_WORDS = {
    "method": "{}",
    "pairs": "{} pairs",
    "neighbors.tau": "tau {}",
    "neighbors.window": "window {}",
    "neighbors.k": "K {}",
    "model.name": "{}",
    "data.source": "{}",
    "epochs": "{} epochs",
    "batch_size": "batch {}",
    "optim.lr": "learning rate {}",
}
"""The settings that people compare most, the most telling first."""
_NAMES = {"dino": "DINO", "simsiam": "SimSiam", "nnclr": "NNCLR", "adasim": "AdaSim"}


@dataclass
class Group:
    """Runs that are drawn as one line."""

    label: str
    runs: list[RunCurves]


def group(runs: Sequence[RunCurves]) -> tuple[list[Group], list[str]]:
    """Runs that differ by their random seed alone together; each group labelled by what tells it from the others.
    Also the settings in which the groups differ, too, and for which the labels have no room.

    Two runs of the same settings and the same seed differ by something that we cannot see (a version, a repetition):
    they are kept apart, and named by their folders.
    """
    from adasim.runs.folder import group_by_setting

    grouped = group_by_setting([(one.run.config, one.run.data_fingerprint) for one in runs])
    words, unsaid = labels([settings for settings, _ in grouped])
    names = [_folder(one) for one in runs]
    if len(set(names)) < len(names):
        names = [shortened(one.run.path, _LETTERS) for one in runs]
    groups: list[tuple[str, list[int]]] = []
    for label, (_, places) in zip(words, grouped, strict=True):
        seeds = {runs[i].run.config.seed for i in places}
        groups += [(label, places)] if len(seeds) == len(places) else [(label, [i]) for i in places]
    taken = Counter(label for label, _ in groups)
    unique = [_joined(label, names[places[0]] if taken[label] > 1 else "") for label, places in groups]
    return [
        Group(label, [runs[i] for i in places]) for label, (_, places) in zip(unique, groups, strict=True)
    ], unsaid


def labels(settings: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """A label for each: its values of the settings in which they differ; and those settings that were left out."""

    def kinds(names: Sequence[str]) -> int:
        return len({json.dumps([one.get(name, "absent") for name in names]) for one in settings})

    order = {name: place for place, name in enumerate(_WORDS)}
    known = sorted(
        {name for one in settings for name in one}, key=lambda one: (order.get(one, len(order)), one)
    )
    differing = [n for n in known if len({json.dumps(one[n]) for one in settings if n in one}) > 1]
    chosen: list[str] = []
    for name in differing:
        if kinds([*chosen, name]) > kinds(chosen):  # it tells apart what those before do not
            chosen.append(name)
    chosen += [name for name in differing if name not in chosen][: max(0, _MOST_WORDS - len(chosen))]
    shown = [name for name in differing if name in chosen]
    words = [_joined(*(in_words(name, one[name]) for name in shown if name in one)) for one in settings]
    return words, [name for name in differing if name not in chosen]


def in_words(name: str, value: Any) -> str:
    """A setting as people say it: `tau 0.2`, `AdaSim pairs`, `teacher temp 0.07`."""
    if name == "data.source":
        value = PurePath(str(value)).name or value  # by name, not by path
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    if name in ("method", "pairs"):
        value = _NAMES.get(str(value), value)
    pattern = _WORDS.get(name, f"{name.split('.')[-1].replace('_', ' ')} {{}}")
    return shortened(pattern.format(value), _LETTERS)


def _folder(one: RunCurves) -> str:
    return shortened(one.run.path.resolve().name, _LETTERS)


def _joined(*words: str) -> str:
    return ", ".join(word for word in words if word)


# ---- drawing ----


def draw(
    groups: Sequence[Group], panels: Sequence[Panel], unsaid: Sequence[str] = (), *, constant: bool = True
) -> Any:
    """A matplotlib Figure with these panels; those that no run has numbers for are left out.

    Args:
        unsaid: settings in which the groups differ beside their labels; the title counts them.
        constant: draw also the schedules that are one number, always and in all runs.

    Returns None if nothing is left.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawn = [(panel, lines) for panel in panels if (lines := _lines(groups, panel, constant))]
    if not drawn:
        return None
    count = len(drawn)
    columns = _COLUMNS[count - 1] if count <= len(_COLUMNS) else math.ceil(math.sqrt(count * 4 / 3))
    size = {1: 15.0, 2: 14.0, 3: 12.0}.get(columns, 11.0)  # points, 1/72 inch: 11 are 18.3 pixels
    look = Path(__file__).parent / "templates" / "curves.mplstyle"
    with rc_context({"font.size": size, "legend.fontsize": size, "axes.titlesize": size * 1.1}, look):
        figure: Any = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.02, hspace=0.03)
        longest = max(one.reached for group in groups for one in group.runs)
        for place, (panel, lines) in enumerate(drawn):
            axes = figure.add_subplot(math.ceil(count / columns), columns, place + 1)
            _draw_panel(axes, panel, lines, len(groups))
            axes.set_title(panel.title, loc="left", color=INK, parse_math=False)
            axes.set_xlim(0, longest * 1.02)
            axes.xaxis.get_major_locator().set_params(integer=True, nbins=5, steps=[1, 2, 5, 10])
            if place + columns >= count:
                axes.set_xlabel("epochs")
        _head(figure, groups, unsaid, size * 1.3)
    return figure


def _lines(groups: Sequence[Group], panel: Panel, constant: bool) -> list[tuple[str, Any, dict[int, Band]]]:
    """Label, style and, by group, values of each line that has any."""
    lines = []
    for (label, metric), style in zip(panel.lines.items(), STYLES, strict=False):
        curves = [[run.curve(metric, panel.kind == "shares") for run in group.runs] for group in groups]
        bands = {number: one for number, one in enumerate(map(band, curves)) if one.values()}
        different = {y for one in bands.values() for y in one.values()}
        if different and (constant or panel.kind != "relative" or len(different) > 1):
            lines.append((label, style, bands))
    return lines


def _draw_panel(axes: Any, panel: Panel, lines: list[tuple[str, Any, dict[int, Band]]], groups: int) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for label, style, bands in lines:
        unit = 1.0
        if panel.kind == "relative":
            peak = max(y for band in bands.values() for y in band.values())
            unit, label = peak if peak > 0 else 1.0, f"{label} (1 = {peak:.3g})"
        handles.append(Line2D([], [], color=INK, linestyle=style, label=label))
        for group, band in bands.items():
            colour, marker = _look(group)
            few = len(band.epochs) <= 12
            every = 1 if few else len(band.epochs) // 5
            mean, low, high = ([y / unit for y in part] for part in (band.mean, band.low, band.high))
            look = {"color": colour, "linestyle": style}
            if low != high:
                axes.fill_between(band.epochs, low, high, color=colour, alpha=0.18, linewidth=0)
            if band.epochs:  # of many points some are marked, at other places for each of several groups
                marked, places = marker if few or groups > 1 else "", (every * group // groups, every)
                axes.plot(band.epochs, mean, marker=marked, markevery=places, **look)
            for curve in band.rest:
                alone = marker if len(curve) == 1 else ""
                axes.plot(
                    list(curve), [y / unit for y in curve.values()], linewidth=1.2, marker=alone, **look
                )
    _limit(axes, panel)
    if len(panel.lines) > 1:
        where = "upper right" if panel.kind == "relative" else "best"
        # In a full panel no place is free: the words then lie on a pale ground, not among the lines.
        axes.legend(handles=handles, loc=where, frameon=True, framealpha=0.8, edgecolor="none")


def _look(group: int) -> tuple[str, str]:
    """Colour and marker of a group."""
    return COLOURS[group % len(COLOURS)], MARKERS[group % len(MARKERS)]


def _limit(axes: Any, panel: Panel) -> None:
    """Room around the curves, but no percent beyond 0 and 100, and no noise blown up to the panel's height."""
    axes.yaxis.get_major_locator().set_params(nbins=5)
    low, high = axes.get_ylim()
    percent = panel.kind in ("shares", "percent")
    least = 5.0 if percent else 1e-3 * max(abs(low), abs(high), 1e-6)
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
    if percent:
        low, high = max(low, -0.02 * (high - low)), min(high, 100 + 0.02 * (high - low))
    elif panel.kind == "from zero":
        low, high = min(low, 0.0), 1.05 * high
    elif panel.kind == "relative":
        low, high = -0.03, 1.5  # with room for the legend, which would lie on the lines
        axes.set_yticks([0, 0.5, 1])
    axes.set_ylim(low, high)


def _head(figure: Any, groups: Sequence[Group], unsaid: Sequence[str], size: float) -> None:
    """Above the panels: what was trained, and which line is which if there are several."""
    from matplotlib.lines import Line2D

    title = _title(groups, len(unsaid))
    if any(len(group.runs) > 1 for group in groups):
        title += "\n" * bool(title) + "line: mean over random seeds; band: smallest to largest"
    if len(groups) == 1:
        figure.suptitle(title, fontsize=size, parse_math=False)
        return
    handles = []
    for place, one in enumerate(groups):
        count = f" ({len(one.runs)} seeds)" if len(one.runs) > 1 else ""
        colour, marker = _look(place)
        handles.append(Line2D([], [], label=one.label + count, color=colour, marker=marker))
    letters = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(len(handles), 130 // (letters + 6)))
    legend = figure.legend(
        handles=handles, loc="outside upper center", ncols=columns, title=title, title_fontsize=size
    )
    legend.get_title().set_multialignment("center")
    for text in (legend.get_title(), *legend.get_texts()):
        text.set_parse_math(False)


def _title(groups: Sequence[Group], unsaid: int) -> str:
    """What all runs have in common, and of one alone how far it is."""
    from adasim.runs.folder import settings_of

    runs = [one for group in groups for one in group.runs]
    first, *others = [settings_of(one.run.config) for one in runs]
    names = ("method", "model.name", "pairs", "data.source")
    same = [name for name in names if all(other[name] == first[name] for other in others)]
    shared = _joined(*(in_words(name, first[name]) for name in same))
    if len(groups) > 1:
        more = f"{unsaid} more {'setting differs' if unsaid == 1 else 'settings differ'}" if unsaid else ""
        return "; ".join(words for words in (shared, more) if words)
    if len(runs) > 1:
        return f"{shared}, {len(runs)} random seeds"
    done, total = runs[0].epochs, runs[0].run.config.epochs
    return f"{_folder(runs[0])}: {shared}" + (f", epoch {done} of {total}" if done < total else "")
