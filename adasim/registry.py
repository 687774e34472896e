"""The open doors: what people may add under a name of their own, each a dictionary and a decorator.

    from adasim.registry import METHODS

    @METHODS.register("byol")
    class Byol(Method): ...

A file that does so is a plug-in: `adasim pretrain --plugin FILE ...` loads it first, and in Python importing it is
enough. See docs/extending.md.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Generic, TypeVar

from adasim.errors import UserError

T = TypeVar("T")


class Registry(Generic[T]):
    """Things of one kind by their names.

    Args:
        kind: what they are called in a sentence.
        home: the package that registers the built-in ones; imported when a name is first looked up.
    """

    def __init__(self, kind: str, home: str) -> None:
        self.kind = kind
        self._home = home
        self._things: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that makes a thing known as `name`; a name is given once."""

        def keep(thing: T) -> T:
            before = self._things.setdefault(name, thing)
            if before is not thing and _source(before) != _source(thing):
                raise UserError(
                    f"There is a {self.kind} {name!r} already, in {_source(before)}. Choose another name."
                )
            self._things[name] = thing
            return thing

        return keep

    def __getitem__(self, name: str) -> T:
        import_module(self._home)
        if name not in self._things:
            raise UserError(
                f"Unknown {self.kind} {name!r}. {nearest(name, self._things)} One from a file of your own needs "
                f"--plugin FILE."
            )
        return self._things[name]

    def __contains__(self, name: object) -> bool:
        import_module(self._home)
        return name in self._things

    def names(self) -> list[str]:
        """All names, built-in ones first."""
        import_module(self._home)
        return list(self._things)


METHODS: Registry[Any] = Registry("method", "adasim.methods")
"""Classes of `adasim.methods.Method`."""
PAIRS: Registry[Any] = Registry("pair policy", "adasim.neighbors")
"""Classes of `adasim.neighbors.PairPolicy`."""
SOURCES: Registry[Any] = Registry("kind of data", "adasim.data")
"""Functions from what stands behind `NAME:` in `--data NAME:...` to an `ImageSet`."""
EVALUATIONS: Registry[Any] = Registry("evaluation", "adasim.eval")
"""Classes of `adasim.eval.Evaluation`."""


def nearest(name: str, known: Any) -> str:
    """A sentence that names what somebody may have meant."""
    found = difflib.get_close_matches(str(name), [str(k) for k in known], n=3, cutoff=0.4) or list(known)
    return f"The nearest names are {', '.join(found)}." if len(found) > 1 else f"Did you mean {found[0]!r}?"


def load_plugin(path: str | Path) -> None:
    """Run a Python file that registers things. What is wrong in it is the file's own error, with its traceback."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"No plug-in at {file}. Give the path of a Python file.")
    spec = spec_from_file_location(f"adasim_plugin_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{file} is not a Python file. A plug-in ends in .py.")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look a module up by its name
    spec.loader.exec_module(module)


def _source(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', thing)}"
