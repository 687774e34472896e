"""The one error a person may see: a sentence that says what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input. The command line prints the message alone and exits with code 2."""

    exit_code = 2
    shared = False
    """Whether every process of a run raises it, so that the first may speak for all."""


class MissingSplitError(UserError):
    """A source has no such split: not a mistake where the split is not needed."""


def closest(word: object, known: Iterable[object], n: int = 1, cutoff: float = 0.5) -> list[str]:
    """The known names that somebody who wrote `word` may have meant, at most `n`, best first."""
    return difflib.get_close_matches(str(word).lower(), [str(name) for name in known], n, cutoff)


def suggest(word: object, known: Iterable[object], otherwise: Iterable[object] | None = None) -> str:
    """A sentence with what somebody may have meant: the nearest of `known`, else `otherwise` (by default all).

    >>> suggest("kn", ["knn", "linear"]), suggest("x", ["knn", "linear"])
    ('Did you mean knn?', 'The nearest names are knn, linear.')
    """
    known = list(known)
    names = closest(word, known, n=3) or [str(name) for name in (known if otherwise is None else otherwise)]
    return f"The nearest names are {', '.join(names)}." if len(names) > 1 else f"Did you mean {names[0]}?"
