"""`adasim plot`: the curves of one run, or of several in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from adasim.cli.plugins import load_plugins
from adasim.cli.reading import read_options
from adasim.curves.outputs import outputs
from adasim.curves.panels import PANELS
from adasim.runs.checks import require_run
from adasim.util import terminal

_OUT = (
    "A .png, .svg or .pdf, or a folder for curves.png and curves.svg: by default that of the run, or, for several "
    "runs, the current one. Earlier figures of this command are replaced, other files never."
)


@dataclass(kw_only=True)
class PlotArguments:
    """Draw the curves of runs, finished or not: one figure, a panel for each measure that they have. Runs that differ
    by their random seed alone become one line, their mean, in a band from smallest to largest."""

    runs: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint=""),
    ]
    """Run folders."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE|FOLDER", help=_OUT, help_behavior_hint="")] = None
    curves: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            metavar="NAME [NAME ...]",
            help=f"Which: {', '.join(PANELS)}, or any name in metrics.jsonl.",
            help_behavior_hint="(default: all that there are)",
        ),
    ] = ()
    # Only for the help: `load_plugins` has taken the option out before the others are read.
    plugin: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """The plug-ins that the runs were started with."""


def main(arguments: Sequence[str]) -> None:
    """`adasim plot ...`"""
    asked = read_options(PlotArguments, load_plugins(arguments), "plot")
    console = terminal.console()
    for run in asked.runs:
        require_run(run)
    if asked.out is not None:
        outputs(asked.runs, asked.out)

    from adasim.curves.writing import plot  # matplotlib and torch are slow to import

    written = plot(
        asked.runs,
        asked.out,
        curves=asked.curves,
        say=lambda sentence: console.print(sentence, soft_wrap=True),
    )
    console.print(f"Curves: {', '.join(map(str, written))}", soft_wrap=True)
