"""How the commands read their options: a dataclass per command, filled in from the command line by tyro."""

from __future__ import annotations

import dataclasses
import difflib
import io
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import tyro

from adasim.util.errors import UserError
from adasim.util.fields import check_fields, in_words
from adasim.util.paths import check_path

_SHOWN = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH", tuple[int, ...]: "INT [INT ...]"}
_CALLED = {"gpu": "device", "gpus": "device", "cuda": "device", "output": "out", "batch": "batch-size"}
"""What other programs call some options."""
Asked = TypeVar("Asked")


def read_options(kind: type[Asked], arguments: Sequence[str], command: str) -> Asked:
    """The options of `adasim COMMAND`; what is wrong with them, and --help, end the program."""
    return read_arguments(plainly_shown(kind), arguments, f"adasim {command}")


def read_arguments(kind: type[Asked], arguments: Sequence[str], program: str, **more: Any) -> Asked:
    """What tyro makes of the arguments; `more` goes to it. What it refuses or does not know gets a sentence."""
    read = _read(kind, arguments, prog=program, **more)
    if read is None:
        raise UserError(_why_refused(kind, arguments, program))
    asked, unknown = read
    for word in unknown:
        if word.startswith("-"):
            option = word.partition("=")[0]
            near = " or ".join(nearest_options(option, list(option_types(kind))))
            guess = f" Did you mean {near}?" if near else ""
            raise UserError(f"There is no option {option}.{guess} `{program} --help` lists all.")
        raise UserError(f"Nothing is known to do with {word!r}. `{program} --help` says what it takes.")
    check_fields(asked, "--")
    for field in dataclasses.fields(asked):
        value = getattr(asked, field.name)
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path):
                check_path(path, f"--{field.name}")
    return cast(Asked, asked)


def _read(kind: Any, arguments: Sequence[str], **more: Any) -> tuple[Any, list[str]] | None:
    """What tyro makes of the arguments, and those that are unknown; None if it refuses them."""
    try:
        with redirect_stderr(io.StringIO()):  # it explains in many lines what `_why_refused` says in one
            return tyro.cli(kind, args=arguments, return_unknown_args=True, **more)
    except SystemExit as end:
        if end.code != 2:  # --help, or a signal
            raise
    return None


def _why_refused(kind: Any, arguments: Sequence[str], program: str) -> str:
    """A sentence about what tyro refuses: the first option whose words it refuses alone, or else what is missing."""
    known = option_types(kind)
    for place, argument in enumerate(arguments):
        option, equals, word = argument.partition("=")
        takes = known.get(option.replace("_", "-"), bool)
        following = takewhile(lambda one: one.partition("=")[0] not in known, arguments[place + 1 :])
        words = [word] if equals else list(following)
        if takes is not bool and _read(takes, words) is None:
            given = f" {' '.join(words) or repr('')}: not" if words else " needs"
            return f"{option}{given} {in_words(takes)}. `{program} --help` says more."
    needed = ", ".join(name for name, _, is_required in _arguments_of(kind) if is_required)
    return f"Something is missing: `{program}` needs {needed}. `{program} --help` says more."


def nearest_options(option: str, known: Sequence[str]) -> list[str]:
    """Those that somebody may have meant: of the same last word, of a similar one, or what it is called here.

    >>> nearest_options("--lr", ["--optim.lr", "--out"]), nearest_options("--gpu", ["--device", "--out"])
    (['--optim.lr'], ['--device'])
    """
    word = option.lstrip("-").replace("_", "-")
    word = _CALLED.get(word, word)
    by_last_word: dict[str, list[str]] = {}
    for name in known:
        by_last_word.setdefault(name.lstrip("-").rpartition(".")[2], []).append(name)
    found = difflib.get_close_matches(f"--{word}", known, n=1, cutoff=0.7)
    if not found:
        near = difflib.get_close_matches(word.rpartition(".")[2], by_last_word, n=1, cutoff=0.7)
        found = by_last_word[near[0]] if near else []
    return found[:3]


def option_types(kind: Any) -> dict[str, Any]:
    """`--data`, `--optim.lr`, ...: the options of a dataclass and of those within it, with their types."""
    return {name: bare for name, bare, _ in _arguments_of(kind) if name.startswith("-")}


def _arguments_of(kind: Any, prefix: str = "--") -> Iterator[tuple[str, Any, bool]]:
    """Name, type and whether it must be given, of options and of what stands without one (`MODEL`)."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        notes = getattr(hints[field.name], "__metadata__", ())
        if tyro.conf.Suppress in notes:
            continue
        bare = get_args(hints[field.name])[0] if notes else hints[field.name]
        required = field.default is field.default_factory is dataclasses.MISSING
        names = [note.name for note in notes if getattr(note, "name", None) is not None]
        name = (names[-1] if names else field.name).replace("_", "-")
        if tyro.conf.Positional in notes:
            yield next(note.metavar for note in notes if getattr(note, "metavar", None)), bare, required
        elif dataclasses.is_dataclass(bare):
            yield from _arguments_of(bare, f"{prefix}{name}." if name else prefix)
        else:
            yield f"{prefix}{name}", bare, required
            for note in notes:
                yield from ((alias, bare, False) for alias in getattr(note, "aliases", None) or ())


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
