"""`adasim plot`: the curves of one run, or of several in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from adasim.cli.options import Command, read_options
from adasim.runs.folder import require_run
from adasim.tools.outputs import check_figure
from adasim.tools.plot import PANELS, plot
from adasim.util.terminal import say

_OUT = (
    "A .png, .svg or .pdf, or a folder for curves.png and curves.svg: by default that of the run, or, for several "
    "runs, the current one. Earlier figures of this command are replaced, other files never."
)


@dataclass(kw_only=True)
class PlotArguments(Command):
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


def main(arguments: Sequence[str]) -> None:
    """`adasim plot ...`"""
    asked = read_options(PlotArguments, arguments, "plot")
    for run in asked.runs:
        require_run(run)
    if asked.out is not None:
        check_figure(asked.runs, asked.out)

    written = plot(asked.runs, asked.out, curves=asked.curves, say=say)
    say(f"Curves: {', '.join(map(str, written))}")
