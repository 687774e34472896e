"""`adasim pretrain`: a recipe with changes, or a run to go on with."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table
from rich.text import Text

from adasim.cli.options import Command, check_file, check_images, check_model, check_path, read_arguments
from adasim.config import Config
from adasim.recipes import RECIPES, for_epochs, from_weights, get_recipe
from adasim.registry import METHODS, PAIRS
from adasim.runs.access import began_here, check_out, require_run, restarted
from adasim.util import terminal
from adasim.util.errors import UserError
from adasim.util.interrupts import is_first


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
        from adasim.cli.photos import photos

        return photos(rest)
    if "-h" in rest:
        return show_common_options(recipe, starting_point(recipe, rest))
    parsed = configured(recipe, rest, f"adasim pretrain {recipe}")
    if not is_launched():
        check_paths(parsed.config)
        if not began_here(parsed.out, restarted()):
            with suppress(OSError):  # which is told when the folder is made
                check_out(parsed.out, parsed.overwrite)

    # torch is slow to import: whatever can be refused without it is refused before.
    from adasim.api import pretrain as run

    run(parsed.config, parsed.out, overwrite=parsed.overwrite)
    finish(parsed.out, curves=parsed.curves, compare=parsed.compare)


def configured(recipe: str, options: Sequence[str], program: str) -> Any:
    """The arguments of a run: a recipe with the options that were typed after it."""
    plain = adapted(get_recipe(recipe), options)
    if option_values(options, "--model.init") and "--help" not in options:
        # To read the weights takes torch: what is wrong with the options is said before.
        default = with_settings(PretrainArguments, plain)(out=Path(), config=plain)
        check_paths(parse(default, options, program, None).config)
    about = f"{RECIPES[recipe].__doc__}\n\nA run that was stopped goes on with: adasim pretrain --resume RUN"
    return parse(starting_point(recipe, options), options, program, about)


def is_launched() -> bool:
    """Whether there may be other processes, which all refuse together, once they have met."""
    return "RANK" in os.environ or "SLURM_PROCID" in os.environ


def check_paths(config: Config) -> None:
    """Refuse what is not there."""
    check_images(config.data.source)
    check_file(config.data.exclude, "--exclude")
    check_model(config.model.init)


def starting_point(recipe: str, options: Sequence[str]) -> Any:
    """The recipe's own arguments."""
    config = continued(adapted(get_recipe(recipe), options, announce), options)
    return with_settings(PretrainArguments, config)(out=Path("runs") / recipe, config=config)


def announce(sentence: str) -> None:
    if is_first():
        terminal.console().print(sentence, soft_wrap=True)


def adapted(config: Config, options: Sequence[str], say: Callable[[str], None] | None = None) -> Config:
    """The configuration with those options that decide which others there are: method, pairs, epochs."""
    for method in option_values(options, "--method")[-1:]:
        config = with_method(config, method)
    for pairs in option_values(options, "--pairs")[-1:]:
        if pairs in PAIRS:  # an unknown one is refused when the option is read
            config = replace(config, pairs=pairs, pair_settings=None)
    for epochs in option_values(options, "--epochs")[-1:]:  # last: whose warm-ups they are is known by now
        config = shortened(config, epochs, say)
    return config


def continued(config: Config, options: Sequence[str]) -> Config:
    """The configuration for the weights that --model.init names, if it does; says what they change."""
    for init in option_values(options, "--model.init")[-1:]:
        check_model(init)

        from adasim.models import read_weights

        config = from_weights(config, init, read_weights(init))
        model, views, optim = config.model, config.views, config.optim
        mean, std = (" ".join(f"{value:g}" for value in values) for values in (views.mean, views.std))
        announce(
            f"To go on from {init}, unless you say otherwise: --model.name {model.name} --views.size {views.size} "
            f"--views.mean {mean} --views.std {std} --model.freeze-norm --optim.encoder-lr {optim.encoder_lr:g} "
            f"--optim.head-epochs {optim.head_epochs}."
        )
    return config


def shortened(config: Config, epochs: str, say: Callable[[str], None] | None = None) -> Config:
    """A recipe for so many epochs, if that is a number, with warm-ups and window that fit; says what it changes."""
    if not epochs.isdecimal() or int(epochs) < 1:
        return config  # refused when the option is read
    changed = for_epochs(config, int(epochs))
    words = []
    if changed.optim.warmup_epochs != config.optim.warmup_epochs:
        words.append(f"--optim.warmup-epochs {changed.optim.warmup_epochs}")
    if changed.settings != config.settings:
        words.append(
            f"--{changed.method}.teacher-temp-warmup-epochs {changed.settings.teacher_temp_warmup_epochs}"
        )
    if changed.neighbors.window != config.neighbors.window and changed.epochs > 1:
        words.append(f"--neighbors.window {changed.neighbors.window}")
    notes = []
    if words:
        notes.append(
            f"For --epochs {epochs} instead of {config.epochs}, unless you say otherwise: {', '.join(words)}."
        )
    if changed.epochs == 1 and PAIRS[config.pairs].draws_from_memory:
        notes.append("One epoch has no earlier one to draw partners from: all its pairs are standard.")
    if notes and say is not None:
        say(" ".join(notes))
    return changed


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

    found = RunFolder.open(out, lock=False)
    default = with_settings(ResumeArguments, found.config)(resume=out, config=found.config)
    parsed = parse(default, arguments, "adasim pretrain", None)
    if parsed.config.data.source == found.config.data.source:
        check_source(out, found.config.data.source)
    run(parsed.config, out, resume=True)
    finish(out, curves=parsed.curves, compare=parsed.compare)


def option_values(arguments: Sequence[str], option: str) -> list[str]:
    """The words that follow an option, as `--option WORD` or `--option=WORD`; an empty one where none follows."""
    values = []
    for place, argument in enumerate(arguments):
        if argument == option:
            values.append(arguments[place + 1] if place + 1 < len(arguments) else "")
        elif argument.startswith(f"{option}="):
            values.append(argument.removeprefix(f"{option}="))
    return values


def with_method(config: Config, method: str) -> Config:
    """A recipe for another method: that one's own settings and augmentations, the rest as it was."""
    if method == config.method or method not in METHODS:
        return config  # an unknown one is refused when the option is read
    views = replace(config.views, **METHODS.outline(method).VIEWS)
    return replace(config, method=method, settings=None, views=views)


def with_settings(arguments: type[Any], config: Config) -> type[Any]:
    """The arguments with options for the settings of the method and of the pair policy, under their names."""
    fields = [("settings", _named(config.settings, config.method), field(default=None))]
    if config.pair_settings is not None:
        fields.append(("pair_settings", _named(config.pair_settings, config.pairs), field(default=None)))
    return make_dataclass(arguments.__name__, fields, bases=(arguments,), kw_only=True)


def _named(settings: Any, name: str) -> Any:
    return Annotated[type(settings), tyro.conf.arg(name=name)]


def parse(default: Any, arguments: Sequence[str], program: str, about: str | None) -> Any:
    """Read the options; the configuration that results is checked as a whole."""
    own = [name for name in ("settings", "pair_settings") if hasattr(default, name)]
    for name in own:
        setattr(default, name, getattr(default.config, name))
    asked = read_arguments(type(default), arguments, program, default=default, description=about)
    changed = {name: value for name in own if (value := getattr(asked, name)) is not None}
    asked.config = replace(asked.config, **changed)
    return asked


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


def show_common_options(recipe: str, default: PretrainArguments) -> None:
    """`adasim pretrain RECIPE -h`: one screen."""
    console = terminal.console()
    usage = Text.assemble((f"adasim pretrain {recipe}", "bold"), " --data SOURCE --out RUN [options]\n")
    usage.append("adasim pretrain", "bold").append(" --resume RUN      go on where a run stopped\n")
    console.print(usage, soft_wrap=True)
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="cyan")
    table.add_column()
    for option, meaning in COMMON.items():
        table.add_row(f"--{option}", _value(default, option.split()[0]), meaning)
    console.print(table)
    console.print(Text.assemble(("\n--help", "bold"), " shows every option."))


def _value(arguments: PretrainArguments, option: str) -> str:
    if option == "out":
        return str(arguments.out)
    if option == "plugin":
        return ""
    value: object = arguments.config
    for name in {"data": "data.source", "log": "save.log"}.get(option, option).replace("-", "_").split("."):
        value = getattr(value, name)
    return str(value)


def show_recipes() -> None:
    console = terminal.console()
    console.print(Text.assemble(("adasim pretrain", "bold"), " RECIPE --data SOURCE --out RUN [options]"))
    console.print(Text.assemble(("adasim pretrain", "bold"), " --resume RUN\n"))
    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_row(
        Text("photos", "bold"),
        "For a folder of your own: goes on from trained weights, proposes a run that ends in time.",
    )
    for name, recipe in RECIPES.items():
        table.add_row(Text(name, "bold"), (recipe.__doc__ or "").splitlines()[0])
    console.print(table)
    console.print(f"\nSOURCE is {SOURCES}.")
    console.print(
        Text.assemble(
            ("adasim pretrain RECIPE -h", "bold"),
            " shows the options that most people need, ",
            ("--help", "bold"),
            " every one.",
        )
    )


def finish(out: Path, *, curves: bool, compare: bool) -> None:
    """After a run: draw its curves, measure what it was good for, and say where everything is and what comes next.

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
        terminal.console().print(f"{failed}: {str(error) or type(error).__name__}", soft_wrap=True)
        return False
    return True
