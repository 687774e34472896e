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


def closest(word: object, known: Iterable[object], cutoff: float = 0.5) -> list[str]:
    """The known name that somebody who wrote `word` surely meant, or up to three that they may have."""
    word, names = str(word).lower(), [str(name) for name in known]
    return difflib.get_close_matches(word, names, 1, 0.8) or difflib.get_close_matches(word, names, 3, cutoff)


def suggest(word: object, known: Iterable[object], otherwise: Iterable[object] | None = None) -> str:
    """A sentence with what somebody may have meant: the nearest of `known`, else `otherwise` (by default all).

    >>> suggest("kn", ["knn", "linear"]), suggest("x", ["knn", "linear"])
    ('Did you mean knn?', 'Choose one of knn, linear.')
    """
    known = list(known)
    if near := closest(word, known):
        return f"Did you mean {' or '.join(near)}?"
    return f"Choose one of {', '.join(map(str, known if otherwise is None else otherwise))}."
