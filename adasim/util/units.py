"""Figures as people read them: large numbers, times, and means over several random seeds."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from typing import Any


def scaled(value: float, unit: str) -> str:
    """Three digits and a decimal prefix.

    >>> scaled(1_967_872_512, "B"), scaled(80, "B"), scaled(12345, "B")
    ('1.97 GB', '80 B', '12.3 kB')
    """
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:g} {unit}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds as people write them: 0:07, 12:40, 3:05:00, 2 d 04:10."""
    whole = max(0, round(seconds))
    minutes, s = divmod(whole, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days} d {h:02d}:{m:02d}"
    return f"{h}:{m:02d}:{s:02d}" if h else f"{m}:{s:02d}"


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
