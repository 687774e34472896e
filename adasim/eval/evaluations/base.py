"""What an evaluation is, built in or your own (docs/extending.md)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from adasim.data import ImageSet, as_images
from adasim.eval.extractor import Extractor
from adasim.eval.report import Report
from adasim.models.transforms import SMALL
from adasim.options import with_options
from adasim.registry import EVALUATIONS, nearest
from adasim.util.errors import UserError


@dataclass(kw_only=True)
class Evaluation:
    """A measurement of a frozen encoder; its fields are its options.

    The docstring is the help of `adasim eval NAME --help`, and those under the fields explain the options.
    """

    summary: ClassVar[str] = ""
    """What `adasim eval` says about it in a line; the first line of the docstring by default."""
    named_size: ClassVar[int | None] = None
    """Side in pixels of what an encoder sees that is known by a model's name; its own by default."""

    def run(self, extractor: Extractor) -> Report:
        """Measure `extractor.encoder`. Print nothing: what a person should know goes to `extractor.say`."""
        raise NotImplementedError


def make_evaluation(name: str, options: dict[str, Any]) -> Any:
    """The evaluation `name` with options by their names; it has the fields of `Options` too.

    A single value stands for a tuple of one, and a path for its text. Where the command line takes the name of a data
    set, images of any make may stand (see `as_images`).
    """
    kind = with_options(EVALUATIONS[name])
    known = [field.name for field in fields(kind)]
    for option in options:
        if option not in known:
            raise UserError(f"The evaluation {name} has no option {option!r}. {nearest(option, known)}")
    hints = get_type_hints(kind)
    fitting = {option: _fitting(value, hints[option]) for option, value in options.items()}
    for option in ("data", "train", "test"):
        value = fitting.get(option)
        if value is not None:
            fitting[option] = tuple(map(_images, value)) if isinstance(value, tuple) else _images(value)
    return kind(**fitting)


def pick_mode(quick: bool, augmented: bool, small: bool) -> bool:
    """Whether to be quick: as asked, or up to `SMALL` pixels."""
    if quick and augmented:
        raise UserError(
            f"--quick and --augmented exclude each other; quick is the default up to {SMALL} pixels."
        )
    return quick or (small and not augmented)


def with_changes(setting: str, **values: tuple[Any, Any]) -> str:
    """A result's setting with what is not as usual, each as (chosen, usual): `dino, quick, epochs=1`."""
    changes = [f"{name}={_words(chosen)}" for name, (chosen, usual) in values.items() if chosen != usual]
    return ", ".join([setting, *changes])


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _fitting(value: Any, hint: Any) -> Any:
    allowed = {get_origin(kind) or kind for kind in (hint, *get_args(hint))}
    if isinstance(value, Path) and Path not in allowed:
        value = str(value)
    if tuple in allowed and value is not None:
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    return Path(value) if Path in allowed and isinstance(value, str) else value


def _images(source: Any) -> str | ImageSet:
    return source if isinstance(source, str) else as_images(source)
