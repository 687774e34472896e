"""`adasim pretrain photos`: a folder of one's own, and a run that ends in time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import getdoc
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from adasim.cli.pretrain import (
    SOURCES,
    PretrainArguments,
    adapted,
    announce,
    check_paths,
    finish,
    parse,
    resume,
    with_settings,
)
from adasim.config import Config, DataConfig
from adasim.recipes import get_recipe
from adasim.runs.access import began_here, check_out, restarted
from adasim.util import terminal
from adasim.util.errors import UserError
from adasim.util.machine import OtherProcesses
from adasim.util.units import duration


@dataclass(kw_only=True)
class PhotosArguments(PretrainArguments):
    """Look at a folder of images and at this machine, time a few steps, and propose a run that ends in time: from
    weights that somebody has trained, where there are any. The defaults below are those of the smallest run; what is
    proposed here depends on the images, and any option changes it."""

    hours: float = 1.0
    """How long the run may take."""
    from_scratch: bool = False
    """Start from random weights. Small folders hardly ever gain by it."""
    yes: bool = False
    """Start without asking."""


def photos(arguments: Sequence[str]) -> None:
    """`adasim pretrain photos`: a plan for these images and this machine, and after a yes the run."""

    def read(config: Config) -> Any:
        default = with_settings(PhotosArguments, config)(out=Path("runs/photos"), config=config)
        return parse(default, arguments, "adasim pretrain photos", getdoc(PhotosArguments))

    if "-h" in arguments:
        return show_options()
    any_recipe = replace(get_recipe("desk-resnet"), recipe="photos", data=DataConfig())
    asked = read(adapted(any_recipe, arguments, announce))  # before anything is timed
    source = asked.config.data.source
    if not source:
        raise UserError("Which images? Name their folder: adasim pretrain photos --data ~/photos")
    if asked.from_scratch and asked.config.model.init:
        raise UserError("--from-scratch and --model.init exclude each other. Leave one of them out.")
    check_paths(asked.config)
    if began_here(asked.out, restarted()):
        off = [f"--no-{name}" for name in ("curves", "compare") if not getattr(asked, name)]
        return resume(["--resume", str(asked.out), *off])
    check_out(asked.out, overwrite=asked.overwrite)
    if not asked.yes and not (sys.stdin and sys.stdin.isatty()):  # None where it was closed
        raise UserError("`photos` asks before it starts, and nobody can answer here. Add --yes.")

    from adasim.api import pretrain as run
    from adasim.tools.photos import propose
    from adasim.tools.plan import show, warning

    proposal = propose(
        source,
        asked.hours,
        device=asked.config.device,
        init="" if asked.from_scratch else asked.config.model.init or None,
        exclude=asked.config.data.exclude,
        change=lambda config: read(adapted(config, arguments)).config,
        say=announce,
    )
    console = terminal.console()
    console.print()
    show(proposal.reasons, console)
    if told := warning(proposal.config, proposal.images):
        console.print(told, soft_wrap=True)
    if not asked.yes and not agreed(console.input):
        return console.print("Nothing was started.")
    others, began = OtherProcesses(), time.monotonic()
    run(proposal.config, asked.out, overwrite=asked.overwrite)
    if told := overrun(time.monotonic() - began, proposal.seconds, others.cores()):
        console.print(told, soft_wrap=True)
    finish(asked.out, curves=asked.curves, compare=asked.compare)


def overrun(took: float, planned: float, used: float) -> str | None:
    """A sentence on a run that took over a quarter longer than planned (seconds), while others used so many cores.

    >>> overrun(5400, 3600, 1.26)
    "The run took 1:30:00 instead of 1:00:00; other processes used 1.3 of the machine's cores meanwhile."
    """
    if took <= 1.25 * planned:
        return None
    others = f"; other processes used {used:.1f} of the machine's cores meanwhile" if used > 0.25 else ""
    return f"The run took {duration(took)} instead of {duration(planned)}{others}."


def agreed(ask: Callable[[str], str]) -> bool:
    """Whether the answer is yes, or just Enter; Ctrl-D is a no."""
    try:
        return ask("\nStart? [Y/n] ").strip().lower() in ("", "y", "yes")
    except EOFError:
        return False


def show_options() -> None:
    """`adasim pretrain photos -h`: one screen."""
    console = terminal.console()
    console.print(Text.assemble(("adasim pretrain photos", "bold"), " --data FOLDER --out RUN [options]\n"))
    table = Table(box=None, padding=(0, 1), show_header=False)
    for option, meaning in {
        "data FOLDER": SOURCES,
        "out RUN": "the run folder to make; runs/photos",
        "hours H": "how long the run may take; 1",
        "model.init MODEL": "weights to go on from; small ones of timm's where it can get them",
        "from-scratch": "start from random weights: small folders hardly gain by it",
        "exclude FILE": "leave out what you rejected on the page of adasim explore",
        "yes": "start without asking",
        "epochs, --views.size, ...": "any option of a recipe changes the proposal",
    }.items():
        table.add_row(Text(f"--{option}", "bold"), meaning)
    console.print(table)
    console.print(Text.assemble(("\n--help", "bold"), " shows every option."))
