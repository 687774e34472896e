"""The open doors: what people may add under a name of their own, each a dictionary and a decorator.

    from adasim.registry import METHODS

    @METHODS.register("byol")
    class Byol(Method): ...

A file that does so is a plug-in: `adasim pretrain --plugin FILE ...` loads it first, and in Python importing it is
enough. See docs/extending.md.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TypeVar

from adasim import options
from adasim.util.errors import UserError, suggest

T = TypeVar("T")


class Registry:
    """Things of one kind by their names.

    Args:
        kind: what they are called in a sentence.
        home: the package that registers the built-in ones; imported when one of them is looked up.
        built_in: their names, and what `outline` tells of each before that.
    """

    def __init__(self, kind: str, home: str, built_in: dict[str, Any]) -> None:
        self.kind = kind
        self._home = home
        self._built_in = built_in
        self._things: dict[str, Any] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that makes a thing known as `name`; a name is given once."""

        def keep(thing: T) -> T:
            if name in self._built_in and not _source(thing).startswith(f"{self._home}."):
                import_module(self._home)  # whose thing of that name was first
            before = self._things.setdefault(name, thing)
            if before is not thing and _source(before) != _source(thing):
                raise UserError(
                    f"There is a {self.kind} {name!r} already, in {_source(before)}. Choose another name."
                )
            self._things[name] = thing
            return thing

        return keep

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            near = suggest(name, self.names())
            raise UserError(f"Unknown {self.kind} {name!r}. {near} One of your own needs --plugin FILE.")
        if name not in self._things:
            import_module(self._home)
        return self._things[name]

    def __contains__(self, name: object) -> bool:
        return name in self._things or name in self._built_in

    def names(self) -> list[str]:
        """All names, built-in ones first."""
        return list(dict.fromkeys([*self._built_in, *self._things]))

    def outline(self, name: str) -> Any:
        """What has the settings or options of the thing as attributes; of a built-in one without importing torch."""
        return self._built_in[name] if name in self._built_in else self[name]


@dataclass(frozen=True)
class Outline:
    """What the command line asks of a built-in method or pair policy."""

    Settings: type[Any] | None = None
    VIEWS: dict[str, Any] = field(default_factory=dict)


METHODS = Registry(
    "method",
    "adasim.methods",
    {
        "dino": Outline(options.DinoSettings, options.DINO_VIEWS),
        "nnclr": Outline(options.NnclrSettings, options.SIAMESE_VIEWS),
        "simsiam": Outline(options.SimSiamSettings, options.SIAMESE_VIEWS),
    },
)
"""Classes of `adasim.methods.Method`."""
PAIRS = Registry(
    "pair policy",
    "adasim.neighbors",
    {
        **dict.fromkeys(("standard", "adasim", "oracle"), Outline()),
        "nearest": Outline(options.NearestSettings),
    },
)
"""Classes of `adasim.neighbors.PairPolicy`."""
SOURCES = Registry("kind of data", "adasim.data", dict.fromkeys(("synthetic", "python", "hf")))
"""Functions from what stands behind `NAME:` in `--data NAME:...` to an `ImageSet`."""
EVALUATIONS = Registry(
    "evaluation",
    "adasim.eval",
    {
        "knn": options.KnnOptions,
        "linear": options.LinearOptions,
        "fewshot": options.FewshotOptions,
        "segmentation": options.SegmentationOptions,
        "views": options.ViewsOptions,
    },
)
"""Classes of `adasim.eval.Evaluation`."""


def is_path(source: str) -> bool:
    """Whether a source is the path of a folder or of a file, and not `KIND:...`, known or not."""
    kind, colon, _ = source.partition(":")
    if kind in SOURCES:
        return False
    return not colon or os.path.exists(source) or re.fullmatch(r"[A-Za-z][\w-]+", kind) is None


def load_plugin(path: str | Path) -> None:
    """Run a Python file that registers things. What is wrong in it is the file's own error, with its traceback."""
    file = Path(path).expanduser()
    if not os.path.isfile(file):  # also where the name is longer than any file's
        raise UserError(f"No plug-in at {file}. Give the path of a Python file.")
    spec = spec_from_file_location(f"adasim_plugin_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{file} is not a Python file. A plug-in ends in .py.")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look a module up by its name
    spec.loader.exec_module(module)


def _source(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', thing)}"
