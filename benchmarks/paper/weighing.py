"""What right and wrong partners would be worth: two numbers fitted to the gains of four arms. A remark, no finding.

    gain = a * right - b * wrong

*Right* and *wrong* are the shares of all pairs of a run that join two images of one class, or of two. a and b are
fitted by least squares to the runs of the paper's own arms; on ours, which are held out, they have the wrong sign.
"""

from __future__ import annotations

from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from .results import Lines, Results

FITTED = ("nearest", "adasim", "oracle:p=0.5", "oracle:p=0")


class Row(NamedTuple):
    """An arm, averaged over its seeds."""

    arm: str
    right: float
    wrong: float
    gain: float
    expected: float
    """The gain by the rule."""
    fitted: bool
    """Whether the rule was fitted to this arm, too."""


class Rule(NamedTuple):
    """a and b, in points of k-NN accuracy for all pairs."""

    a: float
    b: float


def shares(line: dict[str, Any], epochs: slice = slice(None)) -> tuple[float, float]:
    """Right and wrong partners as shares of all pairs, in these epochs of a run."""
    joined, right = (mean(line["curves"][name][epochs]) for name in ("bootstrapped", "partner_accuracy"))
    return joined - (1 - right), 1 - right


def weigh(results: Results, method: str, arms: list[str]) -> tuple[Rule, list[Row]] | None:
    """The rule, and every arm beside it; None where fewer than three runs could be fitted."""
    standard = {line["seed"]: line["knn"] for line in results.seeds(method, "standard")}
    runs: dict[str, Lines] = {
        arm: [x for x in results.seeds(method, arm) if x["seed"] in standard and "knn" in x] for arm in arms
    }
    fitted = [line for arm in FITTED for line in runs.get(arm, [])]
    if len(fitted) < 3:
        return None
    gains = [line["knn"] - standard[line["seed"]] for line in fitted]
    (a, b), *_ = np.linalg.lstsq(np.array([shares(line) for line in fitted]), np.array(gains), rcond=None)
    rule = Rule(float(a), -float(b))
    rows = []
    for arm, lines in runs.items():
        if lines:
            right, wrong = (mean(part) for part in zip(*map(shares, lines), strict=True))
            gain = mean(line["knn"] - standard[line["seed"]] for line in lines)
            expected = rule.a * right - rule.b * wrong
            rows.append(Row(arm, right, wrong, gain, expected, arm in FITTED))
    return rule, rows
