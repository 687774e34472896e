"""Does a value fit the annotation of its field? Asked of every field of the configuration, wherever it comes from."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import types
import typing
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from adasim.util.errors import UserError, closest


def check_fields(section: Any, prefix: str = "") -> None:
    """Refuse a field of the dataclass `section` whose value its annotation does not allow.

    Numbers of another library, lists and paths become int or float, tuple and str, as JSON will have them.

    Args:
        prefix: what stands before the field's name on the command line, such as `optim.`.
    """
    for name, annotation in _annotations(type(section)).items():
        setattr(section, name, fit(f"{prefix}{name}", getattr(section, name), annotation))


def at_least(name: str, value: float, low: float) -> None:
    """Refuse a number below `low`."""
    if not value >= low:
        raise UserError(f"{name}={value} must be at least {low}.")


def between(name: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside of [low, high]."""
    if not low <= value <= high:
        raise UserError(f"{name}={value} must be between {low} and {high}.")


def check_temperature(name: str, value: float) -> None:
    """Refuse a temperature that is not above 0, or so small that a similarity divided by it is no number any more."""
    if not value >= 1e-6:
        raise UserError(f"{name}={value} must be above 0, and no less than 1e-6.")


def check_width(name: str, value: int) -> None:
    """Refuse the width of a layer below 2, or beyond what any network has: torch counts some in 32 bits."""
    between(name, value, 2, 2**20)


def fit(name: str, value: Any, annotation: Any) -> Any:
    """The value as its annotation has it, or a sentence that calls it `name`."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        check_name(name, value, inner)
        return value
    if origin is typing.Annotated:
        return fit(name, value, inner[0])
    if origin in (typing.Union, types.UnionType):
        return _fit_one_of(name, value, inner)
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
    """Refuse a name that does not exist, with the nearest one that does."""
    known = list(known)
    if any(type(value) is type(one) and value == one for one in known):
        return
    names = [str(one) for one in known]
    guess = "".join(f" Did you mean {near}?" for near in closest(value, names))
    raise UserError(f"{name}={value!r} is unknown.{guess} Choose one of {', '.join(names)}.")


def _fit_one_of(name: str, value: Any, annotations: tuple[Any, ...]) -> Any:
    if value is None and type(None) in annotations:
        return None
    rest = [annotation for annotation in annotations if annotation is not type(None)]
    for annotation in rest[:-1]:
        with suppress(UserError):
            return fit(name, value, annotation)
    return fit(name, value, rest[-1])


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
    if origin is Literal:
        return f"{'one of ' * (len(inner) > 1)}{', '.join(map(str, inner))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(in_words(one) for one in inner if one is not type(None))
    if origin is tuple:
        if typing.get_origin(inner[0]) is Literal:
            return f"some {in_words(inner[0]).removeprefix('one ')}"
        one = {int: "whole numbers", float: "numbers"}.get(inner[0], "values")
        return f"a list of {one}" if inner[-1] is Ellipsis else f"{len(inner)} {one}"
    words = {int: "a whole number", float: "a number", str: "text", Path: "a path", bool: "True or False"}
    return words.get(annotation, f"a {annotation.__name__}")


def _annotations(cls: type) -> dict[str, Any]:
    """Each field's annotation, resolved."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}
