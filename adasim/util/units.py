"""Large numbers and times as people read them."""

from __future__ import annotations


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
