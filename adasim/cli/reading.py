"""How the commands read their options: a dataclass per command, filled in from the command line by tyro."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

_SHOWN = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH", tuple[int, ...]: "INT [INT ...]"}
Asked = TypeVar("Asked")


def read_options(kind: type[Asked], arguments: Sequence[str], command: str) -> Asked:
    """The options of `adasim COMMAND`; what is wrong with them, and --help, end the program."""
    return tyro.cli(plainly_shown(kind), args=list(arguments), prog=f"adasim {command}")


def plainly_shown(kind: type[Asked]) -> type[Asked]:
    """The same dataclass, whose help shows `--size INT` and `--overwrite`.

    tyro would show `--size {None}|INT ... (default: None)`, and `(default: False)` behind every switch. What happens
    without an option is said in its own words.
    """
    hints = get_type_hints(kind, include_extras=True)
    shown: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint = hints[field.name]
        bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        taken = [part for part in get_args(bare) if part is not NoneType]
        if field.default is False and tyro.conf.FlagCreatePairsOff in getattr(hint, "__metadata__", ()):
            shown[field.name] = Annotated[hint, tyro.conf.arg(help_behavior_hint="")]
        if field.default is None and len(taken) == 1 and NoneType in get_args(bare):
            shown[field.name] = Annotated[hint, _plain(hint, _SHOWN.get(taken[0], "VALUE"))]
    namespace = {"__annotations__": shown, "__doc__": kind.__doc__, "__module__": kind.__module__}
    return dataclasses.dataclass(kw_only=True)(type(kind.__name__, (kind,), namespace))


def _plain(hint: Any, metavar: str) -> Any:
    """No default is told, and `metavar` shown unless the annotation has one of its own."""
    own = [note.metavar for note in getattr(hint, "__metadata__", ()) if getattr(note, "metavar", None)]
    return tyro.conf.arg(metavar=own[0] if own else metavar, help_behavior_hint="")
