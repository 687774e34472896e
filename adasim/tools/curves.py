"""What a figure of runs is made of: panels, the curves of runs by epoch, and which runs become one line.

Nothing here needs torch before runs are grouped: `adasim plot --help` lists the panels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from adasim.util.terminal import shortened

if TYPE_CHECKING:
    from adasim.run import Run

# ---- panels ----


@dataclass(frozen=True)
class Line:
    """One curve of each run in a panel."""

    metrics: tuple[str, ...]
    """Names in metrics.jsonl, of which the first that the run has is drawn."""
    label: str = ""
    """What tells it from the panel's other lines."""
    value: Callable[[float], float] = lambda value: value
    """From the number in the file to the one in the figure."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    lines: tuple[Line, ...]
    percent: bool = False
    """Whether its values lie between 0 and 100."""
    from_zero: bool = False
    """Whether 0 is in sight, where its distance matters more than small differences."""
    of_peak: bool = False
    """Divide each line by its largest value, which its label then tells: for schedules, which share no unit."""


def _shares(title: str, *lines: tuple[str, str]) -> Panel:
    """Shares of 1 in the file, percent in the figure."""
    return Panel(
        title,
        tuple(Line((metric,), label, lambda share: 100 * share) for metric, label in lines),
        percent=True,
    )


_SNAPSHOTS = "snapshot_knn"  # from results.jsonl: of `adasim eval knn RUN --all-snapshots`
PANELS: dict[str, Panel] = {
    "loss": Panel("Loss (mean of each epoch)", (Line(("epoch_loss", "loss")),)),
    "schedules": Panel(
        "Optimiser's schedules (relative)",
        (Line(("lr",), "learning rate"), Line(("weight_decay",), "weight decay")),
        of_peak=True,
    ),
    "teacher-schedules": Panel(
        "Teacher's schedules (relative)",
        (
            Line(("teacher_temp",), "temperature"),
            Line(("teacher_momentum",), "1 - momentum", lambda momentum: 1 - momentum),
        ),
        of_peak=True,
    ),
    "bootstrap": _shares("Bootstrapping ratio (% of pairs)", ("bootstrap_ratio", "")),
    "nn": _shares(
        "Nearest neighbour of the same class (%)",
        ("partner_accuracy", "partner j* (often itself)"),
        ("nn_accuracy_top1", "this epoch's list"),
    ),
    "second-nn": _shares(
        "Second neighbour of the same class (%)",
        ("other_neighbour_accuracy", "p_win without j* and the image"),
        ("nn_accuracy_top2", "this epoch's list"),
    ),
    "self-match": _shares("Nearest is the image itself (%)", ("nn_self_top1", "")),
    "knn": Panel("k-NN accuracy (%)", (Line(("knn_top1", _SNAPSHOTS)),), percent=True),
    "teacher-entropy": _shares("Teacher entropy (% of maximum)", ("epoch_teacher_entropy_share", "")),
    "spread": Panel(
        "Feature spread (1: fills the sphere)",
        (Line(("epoch_feature_spread", "feature_spread")),),
        from_zero=True,
    ),
    "rankme": Panel("RankMe (directions in use)", (Line(("epoch_rankme",)),), from_zero=True),
}
"""By the names that `--curves` takes, in the order in which they are drawn."""


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
        placed = [line for line in run.metrics if _is_count(line["step"]) and _is_count(line.get("epoch"))]
        # A line of epoch e (from 0) stands at most e + 1 epochs into the run, and at an epoch's end just there.
        self._steps = max((line["step"] / (line["epoch"] + 1) for line in placed), default=0.0)
        self.reached = (
            max((line["step"] / self._steps for line in placed), default=0.0) if self._steps else 0.0
        )
        # In the first epoch nobody knows how long one is.
        known = any(line["epoch"] or "epoch_loss" in line for line in placed)
        self.epochs = int(self.reached + 1e-6) if known else 0

    def metrics(self) -> list[str]:
        """All numbers that were logged, by name."""
        names = {name for line in self.run.metrics for name, value in line.items() if _is_number(value)}
        return sorted(names - {"step", "epoch"})

    def curve(self, line: Line) -> Curve:
        """The line's points; without those that are no number (a loss that was infinite, a damaged line)."""
        for name in line.metrics:
            points = (
                self._snapshots()
                if name == _SNAPSHOTS
                else {
                    round(step / self._steps, 6): line.value(value)
                    for step, value in self.run.curve(name).items()
                    if _is_count(step) and _is_number(value) and self._steps
                }
            )
            if points:
                return dict(sorted(points.items()))
        return {}

    def _snapshots(self) -> Curve:
        """k-NN accuracy of the run's snapshots, as measured last: on the same images with the same setting."""
        knn = [one for one in self.run.results if one.protocol == "knn"]
        measured = [one for one in knn if _is_count(one.model.get("epoch"))]
        return {one.model["epoch"]: one.value for one in measured if one.column == measured[-1].column}


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


def band(curves: list[Curve]) -> Band:
    """Mean, smallest and largest value of the curves that have any."""
    curves = [curve for curve in curves if curve]
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    values = [[curve[x] for curve in curves] for x in common]
    last = common[-1] if common else -math.inf
    rest = [{x: y for x, y in curve.items() if x >= last} for curve in curves if max(curve) > last]
    mean = [sum(at) / len(at) for at in values]
    return Band(common, mean, [*map(min, values)], [*map(max, values)], rest)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


# ---- which runs are one setting with several random seeds ----

_MOST_WORDS = 3  # settings in a label; a talk has no room for more
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
_LETTERS = 48  # of a name in a legend
_NAMES = {"dino": "DINO", "simsiam": "SimSiam", "nnclr": "NNCLR", "adasim": "AdaSim"}


@dataclass
class Group:
    """Runs that are drawn as one line."""

    label: str
    runs: list[RunCurves]


@dataclass
class Grouped:
    """All runs of a figure."""

    groups: list[Group]
    unsaid: list[str]
    """Settings in which the groups differ, too, and for which the labels have no room."""


def group(runs: Sequence[RunCurves]) -> Grouped:
    """Runs that differ by their random seed alone together; each group labelled by what tells it from the others.

    Two runs of the same settings and the same seed differ by something that we cannot see (a version, a repetition):
    they are kept apart, and named by their folders.
    """
    from adasim.runs.grouping import group_by_setting  # torch comes with it

    grouped = group_by_setting([(one.run.config, one.run.data_fingerprint) for one in runs])
    words, unsaid = labels([settings for settings, _ in grouped])
    names = [folder_name(one.run) for one in runs]
    if len(set(names)) < len(names):
        names = [shortened(one.run.path, _LETTERS) for one in runs]
    groups: list[Group] = []
    for label, (_, places) in zip(words, grouped, strict=True):
        seeds = {runs[i].run.config.seed for i in places}
        if len(seeds) == len(places):
            groups.append(Group(label, [runs[i] for i in places]))
        else:
            groups += [Group(_joined([label, names[i]]), [runs[i]]) for i in places]
    again = [one for one in groups if [other.label for other in groups].count(one.label) > 1]
    for one in again:  # what tells them apart has no place in both, as between versions
        one.label = _joined([one.label, names[list(runs).index(one.runs[0])]])
    return Grouped(groups, unsaid)


def labels(settings: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """A label for each: its values of the settings in which they differ; and those settings that were left out."""
    values: dict[str, set[str]] = {}
    for one in settings:
        for name, value in one.items():
            values.setdefault(name, set()).add(json.dumps(value))
    order = list(_WORDS)
    differing = sorted(
        (name for name, different in values.items() if len(different) > 1),
        key=lambda name: (order.index(name) if name in order else len(order), name),
    )
    chosen = _telling(differing, settings) if len(differing) > _MOST_WORDS else [*differing]
    chosen += [name for name in differing if name not in chosen][: max(0, _MOST_WORDS - len(chosen))]
    shown = [name for name in differing if name in chosen]
    words = [_joined([in_words(name, one[name]) for name in shown if name in one]) for one in settings]
    return words, [name for name in differing if name not in chosen]


def _telling(names: Sequence[str], settings: Sequence[dict[str, Any]]) -> list[str]:
    """Those of the names, in their order, that each tell apart what the ones before do not."""
    chosen: list[str] = []
    apart = 1
    for name in names:
        kinds = {json.dumps([one.get(part) for part in [*chosen, name]]) for one in settings}
        if len(kinds) > apart:
            chosen.append(name)
            apart = len(kinds)
    return chosen


def in_words(name: str, value: Any) -> str:
    """A setting as people say it: `tau 0.2`, `AdaSim pairs`, `teacher temp 0.07`."""
    if name == "data.source":
        value = PurePath(str(value)).name or value  # by name, not by path
    if isinstance(value, list):
        value = " to ".join(map(str, value)) if len(value) == 2 else ", ".join(map(str, value))
    if isinstance(value, bool):
        value = "on" if value else "off"
    if name in ("method", "pairs"):
        value = _NAMES.get(str(value), value)
    pattern = _WORDS.get(name, f"{name.split('.')[-1].replace('_', ' ')} {{}}")
    return shortened(pattern.format(value), _LETTERS)


def shared_words(runs: Sequence[RunCurves]) -> str:
    """What all runs have in common, for a title: method, encoder, pairs, images."""
    from adasim.runs.grouping import settings_of

    settings = [settings_of(one.run.config) for one in runs]
    words = [
        in_words(name, settings[0][name])
        for name in ("method", "model.name", "pairs", "data.source")
        if all(one[name] == settings[0][name] for one in settings)
    ]
    return _joined(words)


def folder_name(run: Run) -> str:
    return shortened(run.path.resolve().name, _LETTERS)


def _joined(words: Sequence[str]) -> str:
    return ", ".join(word for word in words if word)
