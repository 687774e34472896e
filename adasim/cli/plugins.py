"""`--plugin FILE`, the same for every command: loaded before anything else is read."""

from __future__ import annotations

from collections.abc import Sequence

from adasim.registry import load_plugin
from adasim.util.errors import UserError


def load_plugins(arguments: Sequence[str]) -> list[str]:
    """Load the file of each `--plugin FILE`; returns the other arguments."""
    rest: list[str] = []
    left = iter(arguments)
    for argument in left:
        if argument == "--plugin":
            file = next(left, None)
            if file is None:
                raise UserError("--plugin needs the path of a Python file.")
            load_plugin(file)
        elif argument.startswith("--plugin="):
            load_plugin(argument.partition("=")[2])
        else:
            rest.append(argument)
    return rest
