"""The one check of settings: does a value fit the annotation of its field, range included?"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import types
import typing
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from adasim.util.errors import UserError, suggest


@dataclasses.dataclass(frozen=True)
class Range:
    """In an annotation: a number from `low` to `high`, both included."""

    low: float
    high: float = math.inf

    def check(self, name: str, value: float) -> None:
        """Refuse a number outside of the range, calling it `name`."""
        if not self.low <= value <= self.high:
            limits = f"between {self.low} and {self.high}" if self.high < math.inf else f"at least {self.low}"
            raise UserError(f"{name}={value} must be {limits}.")


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
NonNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
Temperature = Annotated[float, Range(1e-6)]  # a similarity divided by less is no number any more
Width = Annotated[int, Range(2, 2**20)]  # of a layer; torch counts some in 32 bits
Pixels = Annotated[int, Range(8, 2**14)]


def check_fields(section: Any, prefix: str = "", skip: Collection[str] = ()) -> None:
    """Refuse a field of the dataclass `section` whose value its annotation does not allow.

    Numbers of another library, lists and paths become int or float, tuple and str, as JSON will have them.

    Args:
        prefix: what stands before the field's name on the command line, such as `optim.`.
        skip: fields that are not checked.
    """
    hints = typing.get_type_hints(type(section), include_extras=True)
    for field in dataclasses.fields(section):
        if field.name not in skip:
            value = fit(f"{prefix}{field.name}", getattr(section, field.name), hints[field.name])
            setattr(section, field.name, value)


def fit(name: str, value: Any, annotation: Any) -> Any:
    """The value as its annotation has it, or a sentence that calls it `name`."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        check_name(name, value, inner)
        return value
    if origin is Annotated:
        value = fit(name, value, inner[0])
        for note in inner[1:]:
            if isinstance(note, Range):
                note.check(name, value)
        return value
    if origin in (typing.Union, types.UnionType):
        return _fit_one_of(name, value, annotation)
    if origin is tuple:
        return _fit_tuple(name, value, annotation)
    if annotation is Any:
        return value
    if annotation is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if annotation is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if annotation is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        if not isinstance(value, int) and not math.isfinite(value):
            raise UserError(f"{name}={value} is not finite. Give a number.")
        return value if isinstance(value, int) else float(value)  # 1 stays 1 in the saved configuration
    if annotation not in (int, float) and (not isinstance(annotation, type) or isinstance(value, annotation)):
        return value
    raise UserError(f"{name}={value!r} must be {in_words(annotation)}.")


def check_name(name: str, value: Any, known: Iterable[Any]) -> None:
    """Refuse a name that does not exist."""
    known = list(known)
    if not any(type(value) is type(one) and value == one for one in known):
        raise UserError(f"{name}={value!r} is unknown. {suggest(value, known)}")


def _fit_one_of(name: str, value: Any, annotation: Any) -> Any:
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    if value is None and len(kinds) < len(typing.get_args(annotation)):
        return None
    if len(kinds) == 1 or isinstance(value, numbers.Number):
        return fit(name, value, kinds[0])
    for kind in kinds:
        with suppress(UserError):
            return fit(name, value, kind)
    raise UserError(f"{name}={value!r} must be {in_words(annotation)}.")


def _fit_tuple(name: str, value: Any, annotation: Any) -> tuple[Any, ...]:
    inner = typing.get_args(annotation)
    if not isinstance(value, (tuple, list)):
        raise UserError(f"{name}={value!r} must be several values: {in_words(annotation)}.")
    if inner[-1] is Ellipsis:
        return tuple(fit(name, one, inner[0]) for one in value)
    if len(value) != len(inner):
        raise UserError(f"{name}={tuple(value)!r} has {len(value)} values; give {in_words(annotation)}.")
    return tuple(fit(name, one, wanted) for one, wanted in zip(value, inner, strict=True))


def in_words(annotation: Any) -> str:
    """What a value has to be, to fit.

    >>> in_words(int | Literal["auto"] | None), in_words(tuple[float, float])
    ('a whole number or auto', '2 numbers')
    """
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return in_words(inner[0])
    if origin is Literal:
        return f"{'one of ' * (len(inner) > 1)}{', '.join(map(str, inner))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(in_words(one) for one in inner if one is not type(None))
    if origin is tuple:
        one = in_words(inner[0]).removeprefix("a ").removeprefix("one ")
        if typing.get_origin(inner[0]) is Literal:
            return f"some {one}"
        return f"a list of {one}s" if inner[-1] is Ellipsis else f"{len(inner)} {one}s"
    words = {int: "a whole number", float: "a number", str: "text", Path: "a path", bool: "True or False"}
    return words.get(annotation, f"a {annotation.__name__}")
