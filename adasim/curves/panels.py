"""What there is to draw: each panel of the figure, its title in plain words, and the metrics behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _percent(share: float) -> float:
    return 100 * share


def _same(value: float) -> float:
    return value


@dataclass(frozen=True)
class Line:
    """One curve of each run in a panel."""

    metrics: tuple[str, ...]
    """Names in metrics.jsonl, of which the first that the run has is drawn."""
    label: str = ""
    """What tells it from the panel's other lines."""
    value: Callable[[float], float] = _same
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
    return Panel(title, tuple(Line((metric,), label, _percent) for metric, label in lines), percent=True)


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
        ("second_neighbour_accuracy", "p_win without j*"),
        ("nn_accuracy_top2", "this epoch's list"),
    ),
    "self-match": _shares("Nearest is the image itself (%)", ("nn_self_top1", "")),
    "knn": Panel("k-NN accuracy (%)", (Line(("knn_top1",)),), percent=True),
    "teacher-entropy": _shares("Teacher entropy (% of maximum)", ("epoch_teacher_entropy_share", "")),
    "spread": Panel(
        "Feature spread (1: fills the sphere)",
        (Line(("epoch_feature_spread", "feature_spread")),),
        from_zero=True,
    ),
    "rankme": Panel("RankMe (directions in use)", (Line(("epoch_rankme",)),), from_zero=True),
}
"""By the names that `--curves` takes, in the order in which they are drawn."""


def panel_of_metric(metric: str) -> Panel:
    """A panel for any number that a run has logged."""
    return Panel(metric.replace("_", " "), (Line((metric,)),))
