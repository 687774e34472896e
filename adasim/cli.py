"""The command line.

    adasim demo                                       two minutes: embedded images, AdaSim pairs, k-NN accuracy
    adasim pretrain RECIPE --data FOLDER --out RUN    pretrain an encoder; `adasim pretrain` lists the recipes
    adasim pretrain --resume RUN                      go on where RUN stopped, to the same bits (GPU: --deterministic)
    adasim eval knn RUN                               measure it; `adasim eval` lists the evaluations
    adasim plan --images 14000000 --ranks 8           what a run of that size needs, before you start it

Bad input gets one sentence and exit code 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from adasim.config import Config
from adasim.errors import UserError
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
    # `--data PATH` is what people type; the field is data.source.
    short = {"--data": "--data.source", "--verify-data": "--data.verify"}
    arguments = [short.get(a, a) for a in arguments]
    arguments = [a.replace("--data=", "--data.source=", 1) for a in arguments]
    if any(a == "--resume" or a.startswith("--resume=") for a in arguments):
        return resume(arguments)
    recipe, rest = arguments[0], arguments[1:]
    if recipe.startswith("-"):
        raise UserError(f"Name a recipe before the options: one of {', '.join(RECIPES)}.")
    default = PretrainArguments(out=Path("runs") / recipe, config=get_recipe(recipe))
    parsed = tyro.cli(PretrainArguments, default=default, args=rest, prog=f"adasim pretrain {recipe}")

    from adasim.train import pretrain as run  # torch is slow to import, and help must not wait for it

    run(parsed.config, parsed.out, overwrite=parsed.overwrite)
    say_where(parsed.out)


def resume(arguments: Sequence[str]) -> None:
    """`adasim pretrain --resume RUN`: the run's own configuration, with what may change overridden."""
    from adasim.train import pretrain as run
    from adasim.train.run import RunFolder

    if "--overwrite" in arguments:
        raise UserError("A run can be resumed or overwritten, not both. Leave out --resume or --overwrite.")
    place = next(i for i, a in enumerate(arguments) if a.startswith("--resume"))
    if "=" in arguments[place]:
        out = Path(arguments[place].split("=", 1)[1])
    elif place + 1 < len(arguments):
        out = Path(arguments[place + 1])
    else:
        raise UserError("--resume needs the folder of a run.")
    saved = RunFolder.open(out, lock=False).config
    default = ResumeArguments(resume=out, config=saved)
    parsed = tyro.cli(ResumeArguments, default=default, args=arguments, prog="adasim pretrain")
    run(parsed.config, out, resume=True)
    say_where(out)


def show_recipes() -> None:
    console = Console()
    console.print("[bold]adasim pretrain[/bold] RECIPE --data SOURCE --out RUN \\[options]")
    console.print("[bold]adasim pretrain[/bold] --resume RUN\n")
    table = Table(box=None, padding=(0, 2), show_header=False)
    for name, recipe in RECIPES.items():
        table.add_row(f"[bold]{name}[/bold]", (recipe.__doc__ or "").splitlines()[0])
    console.print(table)
    console.print(
        "\nSOURCE is a folder of images, an .npz file, hf:NAME (Hugging Face) or embedded[:COUNT].\n"
        "[bold]adasim pretrain RECIPE --help[/bold] shows every option with the recipe's value.",
        highlight=False,
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
    from adasim.eval.commands import main as run

    run(arguments)


def plan(arguments: Sequence[str]) -> None:
    """`adasim plan`"""
    from adasim.plan import main as show_plan

    show_plan(arguments)


def is_first() -> bool:
    """Whether this process speaks for all that a launcher started (torchrun's variable, or Slurm's)."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def say_where(out: Path) -> None:
    if is_first() and (out / "backbone.safetensors").exists():
        Console(highlight=False).print(
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
    console = Console()
    console.print(
        "[bold]adasim[/bold]: self-distillation on positive pairs from a learned neighbour distribution\n"
    )
    table = Table(box=None, padding=(0, 2), show_header=False)
    for name, (_, text) in COMMANDS.items():
        table.add_row(f"[bold]adasim {name}[/bold]", text)
    console.print(table)
    console.print("\n[bold]adasim COMMAND --help[/bold] explains each.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; bad input ends with a sentence on standard error and exit code 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            return show_commands()
        if arguments[0] == "--version":
            from adasim import __version__

            return print(f"adasim {__version__}")
        if arguments[0] not in COMMANDS:
            raise UserError(f"Unknown command {arguments[0]!r}. The commands are {', '.join(COMMANDS)}.")
        COMMANDS[arguments[0]][0](arguments[1:])
    except UserError as error:
        if is_first():
            print(f"adasim: {error}", file=sys.stderr)
        sys.exit(2)
