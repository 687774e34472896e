"""The curves of runs: numbers by epoch, and the mean and band of runs that differ by their random seed alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from adasim.curves.panels import Line
from adasim.run import Run

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
            found = {
                round(step / self._steps, 6): line.value(value)
                for step, value in self.run.curve(name).items()
                if _is_count(step) and _is_number(value) and self._steps
            }
            if found:
                return dict(sorted(found.items()))
        return {}


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
    return Band(
        common,
        [sum(at) / len(at) for at in values],
        [min(at) for at in values],
        [max(at) for at in values],
        rest,
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
