"""The command line.

    adasim demo                                       two minutes: generated images, AdaSim pairs, k-NN accuracy
    adasim pretrain RECIPE --data FOLDER --out RUN    pretrain an encoder; `adasim pretrain` lists the recipes
    adasim pretrain --resume RUN                      go on where RUN stopped, to the same bits (GPU: --deterministic)
    adasim eval knn RUN                               measure it; `adasim eval` lists the evaluations
    adasim plan --images 14000000 --ranks 8           what a run of that size needs, before you start it

Bad input gets one sentence and exit code 2. What a signal stopped ends with 128 + its number: 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table
from rich.text import Text

from adasim import terminal
from adasim.config import Config
from adasim.errors import UserError
from adasim.interrupts import Stopped, is_first
from adasim.recipes import RECIPES, get_recipe


@dataclass
class PretrainArguments:
    """Pretrain an encoder on images without labels."""

    out: Path
    """The run folder to make: config, metrics, checkpoints and backbone.safetensors."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    overwrite: bool = False
    """If OUT holds a run that no process uses, delete it first. Anything else is refused."""


@dataclass
class ResumeArguments:
    """Continue a run where it stopped. What shapes the result cannot be changed, except that --epochs may be
    raised: the schedules then follow the larger number from there on."""

    resume: Path
    """The run folder."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def pretrain(arguments: Sequence[str]) -> None:
    """`adasim pretrain ...`"""
    if not arguments or arguments[0] in ("-h", "--help"):
        return show_recipes()
    if any(a == "--resume" or a.startswith("--resume=") for a in arguments):
        return resume(arguments)
    recipe, rest = arguments[0], arguments[1:]
    if recipe.startswith("-"):
        raise UserError(f"Name a recipe before the options: one of {', '.join(RECIPES)}.")
    default = PretrainArguments(out=Path("runs") / recipe, config=get_recipe(recipe))
    if "-h" in rest:
        return show_common_options(recipe, default)
    parsed = tyro.cli(
        PretrainArguments,
        default=default,
        args=rest,
        prog=f"adasim pretrain {recipe}",
        description=f"{RECIPES[recipe].__doc__}\n\nA run that was stopped goes on with: adasim pretrain --resume RUN",
    )

    from adasim.api import pretrain as run  # torch is slow to import, and help must not wait for it

    run(parsed.config, parsed.out, overwrite=parsed.overwrite)
    say_where(parsed.out)


def resume(arguments: Sequence[str]) -> None:
    """`adasim pretrain --resume RUN`: the run's own configuration, with what may change overridden."""
    from adasim.api import pretrain as run
    from adasim.runs.folder import RunFolder

    if "--overwrite" in arguments:
        raise UserError("A run can be resumed or overwritten, not both. Leave out --resume or --overwrite.")
    place = next(i for i, a in enumerate(arguments) if a.startswith("--resume"))
    if "=" in arguments[place]:
        out = Path(arguments[place].split("=", 1)[1])
    elif place + 1 < len(arguments):
        out = Path(arguments[place + 1])
    else:
        raise UserError("--resume needs the folder of a run.")
    found = RunFolder.open(out, lock=False)
    saved = found.config
    default = ResumeArguments(resume=out, config=saved)
    parsed = tyro.cli(ResumeArguments, default=default, args=arguments, prog="adasim pretrain")
    if parsed.config.data.source == saved.data.source:
        found.check_source()
    run(parsed.config, out, resume=True)
    say_where(out)


SOURCES = "a folder of images, an .npz file, hf:NAME (Hugging Face) or synthetic[:COUNT]"
COMMON = {
    "data SOURCE": SOURCES,
    "out RUN": "the run folder to make",
    "pairs": "standard, nearest, adasim or oracle",
    "epochs": "passes over the data",
    "batch-size": "images per step, over all processes",
    "optim.lr": "peak learning rate per 256 images",
    "neighbors.window": "w: epochs of lists that are averaged",
    "neighbors.k": "K: length of a list, size of the support",
    "neighbors.tau": "temperature; 0 means standard pairs",
    "views.size": "side of the global views in pixels",
    "data.workers": "loader processes",
    "eval.every": "k-NN accuracy every n epochs; 0: never",
    "seed": "random seed",
    "device": "auto, cpu, cuda, cuda:1, mps",
}
"""The options that most people need, and what they mean in few words."""


def show_common_options(recipe: str, default: PretrainArguments) -> None:
    """`adasim pretrain RECIPE -h`: one screen."""
    console = terminal.console()
    console.print(
        Text.assemble((f"adasim pretrain {recipe}", "bold"), " --data SOURCE --out RUN [options]"),
        soft_wrap=True,
    )
    console.print(
        Text.assemble(("adasim pretrain", "bold"), " --resume RUN      go on where a run stopped\n")
    )
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
    value: object = arguments.config
    for name in {"data": "data.source"}.get(option, option).replace("-", "_").split("."):
        value = getattr(value, name)
    return str(value)


def show_recipes() -> None:
    console = terminal.console()
    console.print(Text.assemble(("adasim pretrain", "bold"), " RECIPE --data SOURCE --out RUN [options]"))
    console.print(Text.assemble(("adasim pretrain", "bold"), " --resume RUN\n"))
    table = Table(box=None, padding=(0, 2), show_header=False)
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


def demo(arguments: Sequence[str]) -> None:
    """`adasim demo`"""
    from adasim.demo import run_demo

    tyro.cli(run_demo, args=arguments, prog="adasim demo")


def evaluate(arguments: Sequence[str]) -> None:
    """`adasim eval ...`"""
    # Heads take thousands of small steps; threads that spin while they wait are many times slower on a CPU
    # that others use too. Read when torch is loaded, hence before the import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from adasim.cli.evaluate import main as run

    run(arguments)


def plan(arguments: Sequence[str]) -> None:
    """`adasim plan`"""
    from adasim.plan import main as show_plan

    show_plan(arguments)


def say_where(out: Path) -> None:
    if is_first() and (out / "backbone.safetensors").exists():
        terminal.console().print(
            f"Encoder: {out / 'backbone.safetensors'}   metrics: {out / 'metrics.jsonl'}   "
            f"curves: tensorboard --logdir {out}",
            soft_wrap=True,
        )


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "demo": (demo, "two minutes on generated images: pretrain, then k-NN accuracy"),
    "pretrain": (pretrain, "pretrain an encoder on your images, or resume a run"),
    "eval": (evaluate, "measure an encoder: k-NN, linear, few-shot, segmentation; compare runs"),
    "plan": (plan, "memory, traffic and arithmetic of a run before you start it"),
}


def show_commands() -> None:
    console = terminal.console()
    console.print(
        Text.assemble(
            ("adasim", "bold"),
            ": self-distillation on positive pairs from a learned neighbour distribution\n",
        )
    )
    table = Table(box=None, padding=(0, 2), show_header=False)
    for name, (_, text) in COMMANDS.items():
        table.add_row(Text(f"adasim {name}", "bold"), text)
    console.print(table)
    console.print(Text.assemble(("\nadasim COMMAND --help", "bold"), " explains each."))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; bad input ends with a sentence on standard error and exit code 2."""
    try:
        try:
            run(sys.argv[1:] if arguments is None else arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, not when Python ends: a pipe or a disk may refuse
    except UserError as error:
        if is_first():
            terminal.complain(error)
        sys.exit(2)
    except BrokenPipeError:
        terminal.discard_output()
        raise Stopped(signal.SIGPIPE) from None
    if terminal.is_unread():
        raise Stopped(signal.SIGPIPE)
    if (problem := terminal.output_error()) is not None:
        terminal.complain(f"Not everything could be written to standard output: {problem.strerror}.")
        sys.exit(1)


def run(arguments: Sequence[str]) -> None:
    arguments = [expand_home(argument) for argument in arguments]
    if not arguments or arguments[0] in ("-h", "--help"):
        return show_commands()
    if arguments[0] == "--version":
        from adasim import __version__

        return print(f"adasim {__version__}")
    if arguments[0] not in COMMANDS:
        raise UserError(f"Unknown command {arguments[0]!r}. The commands are {', '.join(COMMANDS)}.")
    COMMANDS[arguments[0]][0](arguments[1:])


def expand_home(argument: str) -> str:
    """`--data=~/x` as people mean it: the shell expands the tilde of a word, but not within one."""
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    kind, colon, path = value.partition(":") if value.startswith("hf:") else ("", "", value)
    return option + equals + kind + colon + os.path.expanduser(path)
