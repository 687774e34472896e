"""Large numbers as people read them."""

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
