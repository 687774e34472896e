"""What `adasim eval ...` asks beside the options of an evaluation, which stand in its own file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from adasim.cli.reading import read_options
from adasim.cli.using import Model
from adasim.options import with_options
from adasim.registry import EVALUATIONS
from adasim.util.paths import check_file, check_images, check_model


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
    asked = read_options(with_options(EVALUATIONS.outline(name), Encoder), arguments, f"eval {name}")
    check_model(asked.model)
    check_file(asked.exclude, "--exclude")
    for option in ("data", "train", "test"):
        value = getattr(asked, option, None)
        for source in value if isinstance(value, tuple) else (value,):
            check_images(source, f"--{option}")
    return with_options(EVALUATIONS[name], Encoder)(**vars(asked))
