"""What `adasim eval ...` asks beside the options of an evaluation, which stand in its own file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from adasim.cli.reading import read_options
from adasim.cli.using import Model
from adasim.eval.evaluations.base import with_options
from adasim.registry import EVALUATIONS


@dataclass(kw_only=True)
class Encoder:
    """Which encoder."""

    model: Model


@dataclass(kw_only=True)
class TableArguments:
    """Compare the newest results of several runs; differences to the first run stand in brackets."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """Run folders (or files of results), the baseline first."""
    format: Literal["terminal", "markdown", "latex"] = "terminal"


def parse_evaluation(name: str, arguments: Sequence[str]) -> Any:
    """The evaluation `name`, filled in; it has the fields of `Options` and of `Encoder` too."""
    kind = with_options(EVALUATIONS[name], Encoder)
    return read_options(kind, arguments, f"eval {name}")
