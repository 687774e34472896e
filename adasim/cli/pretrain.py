"""`adasim pretrain`: a recipe with changes, or a run to go on with."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, make_dataclass, replace
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.text import Text

from adasim.cli.options import (
    Command,
    check_file,
    check_images,
    check_model,
    check_path,
    read_arguments,
    show_help,
)
from adasim.config import OWN_SETTINGS, Config, DataConfig
from adasim.recipes import RECIPES, for_epochs, from_weights, get_recipe
from adasim.registry import METHODS, PAIRS
from adasim.runs.folder import began_here, check_out, require_run, restarted
from adasim.util import terminal
from adasim.util.errors import UserError
from adasim.util.interrupts import is_first
from adasim.util.units import duration


@dataclass(kw_only=True)
class Training(Command):
    """A run, and what is made of it when it ends."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    curves: bool = True
    """Draw curves.png into the run folder when the run ends (`adasim plot` does so at any time)."""
    compare: bool = True
    """When the run ends, compare its encoder with raw pixels, with an untrained one and with where it began."""


@dataclass(kw_only=True)
class PretrainArguments(Training):
    """Pretrain an encoder on images without labels."""

    out: Path
    """The run folder to make: config, metrics, checkpoints and backbone.safetensors."""
    overwrite: bool = False
    """If OUT holds a run that no process uses, delete it first. Anything else is refused."""


@dataclass(kw_only=True)
class ResumeArguments(Training):
    """Continue a run where it stopped. What shapes the result cannot be changed, except that --epochs may be
    raised: the schedules then follow the larger number from there on. --micro-batch may change where there is no
    batch norm."""

    resume: Path
    """The run folder."""


def main(arguments: Sequence[str]) -> None:
    """`adasim pretrain ...`"""
    if not arguments or arguments[0] in ("-h", "--help"):
        return show_recipes()
    if option_values(arguments, "--resume"):
        return resume(arguments)
    recipe, rest = arguments[0], arguments[1:]
    if recipe.startswith("-"):
        raise UserError(f"Name a recipe before the options: one of photos, {', '.join(RECIPES)}.")
    if recipe == "photos":
        return photos(rest)
    if "-h" in rest:
        return show_common_options(recipe, adapted(get_recipe(recipe), rest, announce))
    parsed = configured(recipe, rest, "pretrain")
    if not {"RANK", "SLURM_PROCID"} & os.environ.keys():  # several processes refuse together, later
        check_paths(parsed.config)
        if not began_here(parsed.out, restarted()):
            with suppress(OSError):  # which is told when the folder is made
                check_out(parsed.out, parsed.overwrite)

    # torch is slow to import: whatever can be refused without it is refused before.
    from adasim.api import pretrain as run

    run(parsed.config, parsed.out, overwrite=parsed.overwrite)
    finish(parsed.out, curves=parsed.curves, compare=parsed.compare)


def resume(arguments: Sequence[str]) -> None:
    """`adasim pretrain --resume RUN`: the run's own configuration, with what may change overridden."""
    if "--overwrite" in arguments:
        raise UserError("A run can be resumed or overwritten, not both. Leave out --resume or --overwrite.")
    named, *more = option_values(arguments, "--resume")
    if not named or named.startswith("--"):
        raise UserError("--resume needs the folder of a run.")
    if more:
        raise UserError(f"--resume names two runs, {named} and {more[0]}. One at a time.")
    out = Path(named)
    check_path(out, "--resume")
    require_run(out)

    from adasim.api import pretrain as run
    from adasim.runs.folder import RunFolder, check_source

    config = RunFolder.open(out, lock=False).config
    parsed = parse(ResumeArguments, {"resume": out}, config, arguments, "pretrain")
    if parsed.config.data.source == config.data.source:
        check_source(out, config.data.source)
    run(parsed.config, out, resume=True)
    finish(out, curves=parsed.curves, compare=parsed.compare)


# From a recipe and what was typed to a configuration


def configured(recipe: str, options: Sequence[str], command: str = "pretrain") -> Any:
    """The arguments of a run: a recipe with the options that were typed after it."""
    command, where = f"{command} {recipe}", {"out": Path("runs") / recipe}
    if option_values(options, "--model.init") and "--help" not in options:
        # To read the weights takes torch: what is wrong with the options is said before.
        plain = adapted(get_recipe(recipe), options)
        check_paths(parse(PretrainArguments, where, plain, options, command).config)
    config = continued(adapted(get_recipe(recipe), options, announce), options)
    about = f"{RECIPES[recipe].__doc__}\n\nA run that was stopped goes on with: adasim pretrain --resume RUN"
    return parse(PretrainArguments, where, config, options, command, about)


def check_paths(config: Config) -> None:
    """Refuse what is not there."""
    check_images(config.data.source)
    check_file(config.data.exclude, "--exclude")
    check_file(config.data.labels, "--labels")
    check_model(config.model.init)


def announce(sentence: str) -> None:
    if is_first():
        terminal.say(sentence)


def adapted(config: Config, options: Sequence[str], say: Callable[[str], None] | None = None) -> Config:
    """The configuration with those options that decide which others there are: method, pairs, epochs. Unknown ones
    are refused when all options are read."""
    for method in option_values(options, "--method")[-1:]:
        if method != config.method and method in METHODS:  # its own settings and augmentations
            views = replace(config.views, **METHODS.outline(method).VIEWS)
            config = replace(config, method=method, settings=None, views=views)
    for pairs in option_values(options, "--pairs")[-1:]:
        if pairs in PAIRS:
            config = replace(config, pairs=pairs, pair_settings=None)
    for epochs in option_values(options, "--epochs")[-1:]:  # last: whose warm-ups they are is known by now
        if epochs.isdecimal() and int(epochs) >= 1:
            config = shortened(config, int(epochs), say)
    return config


def shortened(config: Config, epochs: int, say: Callable[[str], None] | None = None) -> Config:
    """A recipe for so many epochs, with warm-ups and window that fit; says what it changes."""
    changed = for_epochs(config, epochs)
    notes = []
    if epochs == 1 and PAIRS[config.pairs].draws_from_memory:
        notes.append("One epoch has no earlier one to draw partners from: all its pairs are standard.")
    if words := changes(replace(config, epochs=epochs), changed):
        notes.append(f"For --epochs {epochs} instead of {config.epochs}, unless you say otherwise: {words}.")
    if notes and say is not None:
        say(" ".join(notes))
    return changed


def continued(config: Config, options: Sequence[str]) -> Config:
    """The configuration for the weights that --model.init names, if it does; says what they change."""
    for init in option_values(options, "--model.init")[-1:]:
        check_model(init)

        from adasim.models import read_weights

        changed = from_weights(config, init, read_weights(init))
        announce(f"Unless you say otherwise: {changes(config, changed)}.")
        config = changed
    return config


def changes(before: Config, after: Config) -> str:
    """The options of sections that lead from one configuration to the other."""
    words, known = [], before.to_dict()
    for section, values in after.to_dict().items():
        for name, value in values.items() if isinstance(values, dict) else ():
            if value != known[section][name]:
                given = () if value is True else value if isinstance(value, tuple) else (value,)
                words += [f"--{section}.{name.replace('_', '-')}", *map(str, given)]
    return " ".join(words)


def option_values(arguments: Sequence[str], option: str) -> list[str]:
    """The words that follow an option, as `--option WORD` or `--option=WORD`; an empty one where none follows."""
    values = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if argument == option:
            values.append(following)
        elif argument.startswith(f"{option}="):
            values.append(argument.removeprefix(f"{option}="))
    return values


def parse(
    kind: type[Any],
    own: dict[str, Any],
    config: Config,
    arguments: Sequence[str],
    command: str,
    about: str | None = None,
) -> Any:
    """The arguments of a run as typed; `own` and `config` are the defaults."""
    sections = {name: value for name in OWN_SETTINGS if (value := getattr(config, name)) is not None}
    default = with_settings(kind, config)(**own, **sections, config=config)
    asked = read_arguments(type(default), arguments, command, default=default, description=about)
    typed = {name: value for name in sections if (value := getattr(asked, name)) is not None}
    asked.config = replace(asked.config, **typed)
    return asked


def with_settings(kind: type[Any], config: Config) -> type[Any]:
    """The arguments with options for the settings of the method and of the pair policy, under their names."""
    fields: list[Any] = [
        (name, Annotated[type(section), tyro.conf.arg(name=getattr(config, owner))], field(default=None))
        for name, (owner, _) in OWN_SETTINGS.items()
        if (section := getattr(config, name)) is not None
    ]
    return make_dataclass(kind.__name__, fields, bases=(kind,), kw_only=True)


# Short help

SOURCES = "a folder of images, an .npz file, hf:NAME (Hugging Face) or synthetic[:COUNT]"
COMMON = {
    "data SOURCE": SOURCES,
    "out RUN": "the run folder to make",
    "pairs": "standard, nearest, adasim, oracle ...",
    "plugin FILE": "methods, pairs or data of your own",
    "epochs": "passes over the data",
    "batch-size": "images per step, over all processes",
    "micro-batch": "images at once; gradients add up",
    "optim.lr": "peak learning rate per 256 images",
    "neighbors.window": "w: epochs of lists that are averaged",
    "neighbors.k": "K: length of a list",
    "neighbors.tau": "temperature; 0 means standard pairs",
    "views.size": "side of the global views in pixels",
    "eval.every": "k-NN accuracy every n epochs; 0: never",
    "log": "metrics also to wandb or mlflow",
    "seed": "random seed",
    "device": "auto, cpu, cuda, cuda:1, mps",
}
"""The options that most people need, and what they mean in few words."""


def show_common_options(recipe: str, config: Config) -> None:
    """`adasim pretrain RECIPE -h`: one screen."""
    rows = []
    for option, meaning in COMMON.items():
        name = option.split()[0]
        value: Any = config
        for part in {"data": "data.source", "log": "save.log"}.get(name, name).replace("-", "_").split("."):
            value = getattr(value, part, f"runs/{recipe}" if part == "out" else "")
        rows.append((f"--{option}", str(value), meaning))
    show_help(
        f"adasim pretrain {recipe} --data SOURCE --out RUN [options]\n"
        "adasim pretrain --resume RUN      go on where a run stopped",
        rows,
        "--help shows every option.",
    )


def show_recipes() -> None:
    """`adasim pretrain`: what there is."""
    own = "For a folder of your own: goes on from trained weights, proposes a run that ends in time."
    rows = [("photos", own)]
    rows += [(name, (recipe.__doc__ or "").splitlines()[0]) for name, recipe in RECIPES.items()]
    show_help(
        "adasim pretrain RECIPE --data SOURCE --out RUN [options]\nadasim pretrain --resume RUN",
        rows,
        f"SOURCE is {SOURCES}.\n"
        "adasim pretrain RECIPE -h shows the options that most people need, --help every one.",
    )


# adasim pretrain photos: a folder of one's own, and a run that ends in time

PHOTOS = {
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
        rows = [(f"--{option}", meaning) for option, meaning in PHOTOS.items()]
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


# When a run has ended


def finish(out: Path, *, curves: bool, compare: bool) -> None:
    """Draw the run's curves, measure what it was good for, and say where everything is and what comes next.

    The run is complete: nothing here makes it fail.
    """
    if not is_first() or not (out / "backbone.safetensors").exists():
        return
    console = terminal.console()

    from adasim.runs.folder import RunFolder
    from adasim.tools.before_after import show
    from adasim.tools.plot import plot

    drawn = curves and attempt("The curves are not drawn", lambda: plot(out, out / "curves.png"))
    if compare:
        attempt("Before and after are not compared", lambda: show(out, console))
    labelled = bool(RunFolder.open(out, lock=False).facts.get("labels"))
    lines = {
        "encoder": out / "backbone.safetensors",
        "curves": out / "curves.png" if drawn else f"adasim plot {out}",
        "explore": f"adasim explore {out}",
        "measure": f"adasim eval {'knn' if labelled else 'views'} {out}",
        "export": f"adasim export {out} --to timm",
    }
    for what, where in lines.items():
        console.print(Text.assemble((f"{what:9}", "bold"), str(where)), soft_wrap=True)


def attempt(failed: str, action: Callable[[], object]) -> bool:
    """Whether it worked; a sentence where it did not."""
    try:
        action()
    except Exception as error:  # of whatever kind: the run is done, and what it learnt is saved
        terminal.say(f"{failed}: {str(error) or type(error).__name__}")
        return False
    return True
