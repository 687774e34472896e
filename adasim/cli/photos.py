"""`adasim pretrain photos`: a folder of one's own, and a run that ends in time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import getdoc
from pathlib import Path
from typing import Any

from adasim.cli.options import show_help
from adasim.cli.pretrain import (
    SOURCES,
    PretrainArguments,
    adapted,
    announce,
    check_paths,
    finish,
    parse,
    resume,
)
from adasim.config import Config, DataConfig
from adasim.recipes import get_recipe
from adasim.runs.folder import began_here, check_out, restarted
from adasim.util import terminal
from adasim.util.errors import UserError
from adasim.util.units import duration

HELP = {
    "data FOLDER": SOURCES,
    "out RUN": "the run folder to make; runs/photos",
    "hours H": "how long the run may take; 1",
    "model.init MODEL": "weights to go on from; small ones of timm's where it can get them",
    "from-scratch": "start from random weights: small folders hardly gain by it",
    "exclude FILE": "leave out what you rejected on the page of adasim explore",
    "yes": "start without asking",
    "epochs, --views.size, ...": "any option of a recipe changes the proposal",
}


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
        own, about = {"out": Path("runs/photos")}, getdoc(PhotosArguments)
        return parse(PhotosArguments, own, config, arguments, "pretrain photos", about)

    if "-h" in arguments:
        rows = [(f"--{option}", meaning) for option, meaning in HELP.items()]
        return show_help(
            "adasim pretrain photos --data FOLDER --out RUN [options]", rows, "--help shows every option."
        )
    any_recipe = replace(get_recipe("desk-resnet"), recipe="photos", data=DataConfig())
    asked = read(adapted(any_recipe, arguments, announce))  # before anything is timed
    config = asked.config
    if not config.data.source:
        raise UserError("Which images? Name their folder: adasim pretrain photos --data ~/photos")
    if asked.from_scratch and config.model.init:
        raise UserError("--from-scratch and --model.init exclude each other. Leave one of them out.")
    check_paths(config)
    if began_here(asked.out, restarted()):
        off = [f"--no-{name}" for name in ("curves", "compare") if not getattr(asked, name)]
        return resume(["--resume", str(asked.out), *off])
    check_out(asked.out, overwrite=asked.overwrite)
    if not asked.yes and not (sys.stdin and sys.stdin.isatty()):  # None where it was closed
        raise UserError("`photos` asks before it starts, and nobody can answer here. Add --yes.")

    from adasim.api import pretrain as run
    from adasim.tools.plan import propose, show, warning

    proposal = propose(
        config.data.source,
        asked.hours,
        device=config.device,
        init="" if asked.from_scratch else config.model.init or None,
        exclude=config.data.exclude,
        change=lambda config: read(adapted(config, arguments)).config,
        say=announce,
    )
    console = terminal.console()
    console.print()
    show(proposal.lines, console)
    if doubt := warning(proposal.config, proposal.images):
        terminal.say(doubt)
    if not asked.yes and not agreed(console.input):
        return terminal.say("Nothing was started.")
    began = time.monotonic()
    run(proposal.config, asked.out, overwrite=asked.overwrite)
    took = time.monotonic() - began
    if took > 1.25 * proposal.seconds:
        planned = duration(proposal.seconds)
        terminal.say(f"The run took {duration(took)} instead of {planned}. Did others use the machine?")
    finish(asked.out, curves=asked.curves, compare=asked.compare)


def agreed(ask: Callable[[str], str]) -> bool:
    """Whether the answer is yes, or just Enter; Ctrl-D is a no."""
    try:
        return ask("\nStart? [Y/n] ").strip().lower() in ("", "y", "yes")
    except EOFError:
        return False
