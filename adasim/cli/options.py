"""How commands read what was typed: a dataclass per command, filled in by tyro; refusals are one sentence.

Nothing here imports torch: help and refusals are quick.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, make_dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import tyro
from rich.table import Table
from rich.text import Text

from adasim.options import EncoderOptions, ExploreOptions
from adasim.registry import is_path, load_plugin
from adasim.runs.folder import require_run
from adasim.util import terminal
from adasim.util.errors import UserError, closest
from adasim.util.fields import check_fields, in_words

if TYPE_CHECKING:
    from adasim.explore.open import Opened

MODEL = (
    "A run folder, a timm model name, NAME:FILE (a model's name and a file of its weights), a folder with "
    "config.json (of adasim export, timm or transformers), hf-hub:OWNER/NAME, backbone.safetensors, or pixels (raw)."
)
"""What every command takes; docs/use.md has it as a table."""
Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL", help=MODEL)]

_SHOWN = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH", tuple[int, ...]: "INT [INT ...]"}
_SHOWN[tuple[float, ...]] = "FLOAT [FLOAT ...]"
_CALLED = {"gpu": "device", "gpus": "device", "cuda": "device", "output": "out", "batch": "batch-size"}
"""What other programs call some options."""
Asked = TypeVar("Asked")


@dataclass(kw_only=True)
class Command:
    """What every command takes."""

    # Only for the help: `load_plugins` has taken the option out before the others are read.
    plugin: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """Python files that register methods, pairs, data or evaluations of your own (docs/extending.md)."""


@dataclass(kw_only=True)
class Reading(EncoderOptions, Command):
    """Which images of a folder, for `embed` and `similar`."""

    split: Literal["train", "test"] = "train"
    """Which part of a folder that is divided into train/ and test/ (or val/)."""
    exclude: Path | None = None
    """Leave out the images that this file rejects: verdicts exported from the page of `adasim explore`."""

    def check(self, model: str, source: str, option: str) -> None:
        """The encoder, the verdicts and the images are there."""
        check_model(model)
        check_file(self.exclude, "--exclude")
        check_images(source, option)

    def named(self) -> dict[str, Any]:
        """What `embed` and `similar` take by these names in Python."""
        same = ("split", "size", "device", "workers", "exclude")
        return {name: getattr(self, name) for name in same} | {"cache": not self.no_cache}


@dataclass(kw_only=True)
class Neighbours(ExploreOptions, Command):
    """Whose neighbours `explore` and `gallery` show: a run's, an encoder's, or those of given features."""

    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None
    """A run folder: its own images, and the neighbours that it has learned, which AdaSim pairs are drawn from."""
    backbone: Annotated[
        str | None, tyro.conf.arg(metavar="MODEL", help=f"Instead of RUN, for the images of --data. {MODEL}")
    ] = None
    features: Path | None = None
    """Instead of a run: an .npz file with an array `features` (images, width) for the images of --data, as `adasim
    embed` writes it; a row for each, or an array `files` of names."""
    data: str | None = None
    """Which images: a folder, an .npz file, hf:NAME or synthetic[:COUNT]; `explore` takes its test split, too, if it
    has one. With RUN: where its images are now."""

    def check(self, question: str) -> None:
        """Exactly one of the three is named, with images for the latter two, and all of them are there."""
        given = [name for name in ("run", "backbone", "features") if getattr(self, name) is not None]
        if len(given) != 1:
            raise UserError(
                f"{question} Name a run folder, or --backbone NAME --data FOLDER, or --features FILE.npz --data "
                f"FOLDER" + (", one of them alone." if given else ".")
            )
        if self.run is not None:
            require_run(self.run)
        elif self.data is None:
            raise UserError(f"--{given[0]} needs --data: which images?")
        check_model(self.backbone or "")
        check_file(self.features, "--features")
        check_images(self.data)

    def open(self, say: Callable[[str], None]) -> Opened:
        """Images, their supports and features."""
        from adasim.explore.open import open_backbone, open_features, open_run

        if self.run is not None:
            return open_run(self.run, self, say, data=self.data)
        assert self.data is not None
        if self.backbone is not None:
            return open_backbone(self.backbone, self.data, self, say)
        assert self.features is not None
        return open_features(self.features, self.data, self, say)


def load_plugins(arguments: Sequence[str]) -> list[str]:
    """Load the file of each `--plugin FILE`; returns the other arguments."""
    rest: list[str] = []
    left = iter(arguments)
    for argument in left:
        if argument == "--plugin":
            load_plugin(next(left, "--plugin"))
        elif argument.startswith("--plugin="):
            load_plugin(argument.partition("=")[2])
        else:
            rest.append(argument)
    return rest


def check_path(path: str | Path, option: str) -> None:
    """Refuse a name that no file can have, and what is neither file nor folder: a pipe or /dev/zero may never end."""
    if any(len(os.fsencode(name)) > 255 for name in Path(path).parts):
        raise UserError(
            f"No file has a name as long as {str(path)[:40]}... ({len(str(path)):,}). Check {option}."
        )
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise UserError(f"{path} is a pipe or a device. Name a file, or a folder. Check {option}.")


def check_file(file: str | Path | None, option: str, kind: str = "file") -> None:
    """Refuse a file after `option` that is not there."""
    if file:
        check_path(file, option)
        if not os.path.exists(file):
            raise UserError(f"No such {kind}: {file}. Check {option}.")


def check_images(source: str | None, option: str = "--data") -> None:
    """Refuse a folder or a file of images that is not there; of other sources nothing is known yet."""
    if source and is_path(source):
        check_file(source, option, "file" if source.endswith(".npz") else "folder")


def check_model(model: str) -> None:
    """Refuse a MODEL that is written like a path and is not there; whether NAME:FILE is, is left to who opens it."""
    check_path(model if os.path.exists(model) else model.partition(":")[2] or model, "its spelling")
    like_a_path = os.sep in model or Path(model).suffix in (".safetensors", ".pth", ".pt", ".bin")
    if like_a_path and ":" not in model and not os.path.exists(model):
        raise UserError(f"No backbone at {model}: there is no such file or folder. Check its spelling.")


def read_options(kind: type[Asked], arguments: Sequence[str], command: str) -> Asked:
    """The options of `adasim COMMAND`, switches without a `--no-` twin. --help ends the program."""
    return read_arguments(plainly_shown(kind), arguments, command, config=(tyro.conf.FlagCreatePairsOff,))


def read_arguments(kind: type[Asked], arguments: Sequence[str], command: str, **more: Any) -> Asked:
    """What tyro makes of the arguments; `more` goes to it. What it refuses or does not know gets a sentence."""
    help_ = f"`adasim {command} --help`"
    if "--help" in arguments or "-h" in arguments:
        put_help_in_fields(kind)
    read = _read(kind, arguments, prog=f"adasim {command}", **more)
    if read is None:
        raise UserError(f"{_why_refused(kind, arguments, command)} {help_} says more.")
    asked, unknown = read
    for word in unknown:
        option = word.partition("=")[0]
        if not word.startswith("-"):
            raise UserError(f"Nothing is known to do with {word!r}. {help_} says what it takes.")
        near = " or ".join(nearest_options(option, list(option_types(kind))))
        raise UserError(
            f"There is no option {option}.{f' Did you mean {near}?' * bool(near)} {help_} lists all."
        )
    check_fields(asked, "--")
    for name, value in vars(asked).items():
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path):
                check_path(path, f"--{name}")
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


def _why_refused(kind: Any, arguments: Sequence[str], command: str) -> str:
    """A sentence about what tyro refuses: the first option whose words it refuses alone, or else what is missing."""
    known = option_types(kind)
    for place, argument in enumerate(arguments):
        option, equals, word = argument.partition("=")
        takes = known.get(option.replace("_", "-"), bool)
        following = takewhile(lambda one: one.partition("=")[0] not in known, arguments[place + 1 :])
        words = [word] if equals else list(following)
        if takes is not bool and _read(takes, words) is None:
            given = f" {' '.join(words) or repr('')}: not" if words else " needs"
            return f"{option}{given} {in_words(takes)}."
    needed = ", ".join(name for name, _, is_required in _arguments_of(kind) if is_required)
    return f"Something is missing: `adasim {command}` needs {needed}."


def nearest_options(option: str, known: Sequence[str]) -> list[str]:
    """Those that somebody may have meant: a similar one, those whose last word is, or what it is called here.

    >>> nearest_options("--lr", ["--optim.lr", "--out"]), nearest_options("--gpu", ["--device", "--out"])
    (['--optim.lr'], ['--device'])
    """
    word = option.lstrip("-").replace("_", "-")
    word = _CALLED.get(word, word)
    if near := closest(f"--{word}", known, cutoff=0.7):
        return near[:1]
    last = [name.lstrip("-").rpartition(".")[2] for name in known]
    near = closest(word.rpartition(".")[2], last, cutoff=0.7)[:1]
    return [name for name, end in zip(known, last, strict=True) if end in near][:3]


def option_types(kind: Any) -> dict[str, Any]:
    """`--data`, `--optim.lr`, ...: the options of a dataclass and of those within it, with their types."""
    return {name: bare for name, bare, _ in _arguments_of(kind) if name.startswith("-")}


def _arguments_of(kind: Any, prefix: str = "--") -> Iterator[tuple[str, Any, bool]]:
    """Name, type and whether it must be given, of options and of what stands without one (`MODEL`)."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        bare, notes = _divided(hints[field.name])
        if tyro.conf.Suppress in notes:
            continue
        required = field.default is field.default_factory is dataclasses.MISSING
        own = {key: value for note in notes for key, value in vars(note).items() if value is not None}
        name = own.get("name", field.name).replace("_", "-")
        if tyro.conf.Positional in notes:
            yield own["metavar"], bare, required
        elif dataclasses.is_dataclass(bare):
            yield from _arguments_of(bare, f"{prefix}{name}." if name else prefix)
        else:
            yield f"{'--' if own.get('prefix_name') is False else prefix}{name}", bare, required
            yield from ((alias, bare, False) for alias in own.get("aliases", ()))


def _divided(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its annotations, and those."""
    return (get_args(hint)[0], hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())


def put_help_in_fields(kind: Any) -> None:
    """Give tyro every option's docstring as one paragraph: it would break the lines where the source does."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        with suppress(OSError):  # a class that is written nowhere
            source: Any = ast.parse(textwrap.dedent(inspect.getsource(base)))
            for field, text in pairwise(source.body[0].body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    texts[ast.unparse(field.target)] = ast.literal_eval(text.value)
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name in texts:
            field.metadata = MappingProxyType({"help": " ".join(texts[field.name].split())})
        if dataclasses.is_dataclass(hints[field.name]):
            put_help_in_fields(hints[field.name])


def plainly_shown(kind: type[Asked]) -> type[Asked]:
    """The same dataclass, whose help shows `--size INT` and `--overwrite`.

    tyro would show `--size {None}|INT ... (default: None)`, and `(default: False)` behind every switch. What happens
    without an option is said in its own words.
    """
    hints, plain = get_type_hints(kind, include_extras=True), get_type_hints(kind)
    shown: list[Any] = []
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        metavar = None
        if field.default is None:
            own = [note.metavar for note in _divided(hints[field.name])[1] if getattr(note, "metavar", None)]
            metavar = own[0] if own else _SHOWN.get(get_args(plain[field.name])[0], "VALUE")
        if field.default is None or field.default is False:
            note = tyro.conf.arg(metavar=metavar, help_behavior_hint="")
            default = dataclasses.field(default=field.default)
            shown.append((field.name, Annotated[hints[field.name], note], default))
    more = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return make_dataclass(kind.__name__, shown, bases=(kind,), kw_only=True, namespace=more)


def show_help(usage: str, rows: Sequence[tuple[str, ...]], ending: str) -> None:
    """Usage, a table whose first column is bold, and what comes last."""
    console = terminal.console()
    console.print(Text(f"{usage}\n", "bold"), soft_wrap=True)
    table = Table(box=None, padding=(0, 1), show_header=False)
    for style in ("bold", "cyan")[: len(rows[0]) - 1]:
        table.add_column(no_wrap=True, style=style)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"\n{ending}", soft_wrap=True)
