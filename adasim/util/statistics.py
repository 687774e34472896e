"""Figures over several random seeds: their mean and spread, and gains over runs of the same seed."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from typing import Any


def mean_and_deviation(values: Collection[float]) -> tuple[float, float | None]:
    """The mean, and the standard deviation of a sample, where there are several.

    >>> mean_and_deviation([1.0, 3.0])
    (2.0, 1.4142135623730951)
    """
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def paired_gain(ours: Mapping[Any, float], base: Mapping[Any, float]) -> tuple[float, float | None] | None:
    """The mean difference of figures of the same seed, and its standard error where there are several; None where
    no seed is in both.

    Runs of one seed share images, order and first weights, so that much of what differs between seeds cancels.

    >>> paired_gain({0: 3.0, 1: 6.0, 7: 9.0}, {1: 2.0, 0: 1.0})
    (3.0, 1.0)
    """
    gains = [value - base[seed] for seed, value in ours.items() if seed in base]
    if not gains:
        return None
    mean, deviation = mean_and_deviation(gains)
    return mean, None if deviation is None else deviation / len(gains) ** 0.5


def with_spread(mean: float, spread: float | None, sign: str = "") -> str:
    """
    >>> with_spread(61.52, 0.31), with_spread(2.0, None, "+")
    ('61.5 ± 0.3', '+2.0')
    """
    return f"{mean:{sign}.1f}" + ("" if spread is None else f" ± {spread:.1f}")
