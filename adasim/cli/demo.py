"""`adasim demo`: pretraining on generated images, and proof that it worked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from adasim.cli.options import read_options
from adasim.runs.access import check_out
from adasim.util import terminal
from adasim.util.errors import UserError
from adasim.util.machine import OtherProcesses


@dataclass(kw_only=True)
class DemoArguments:
    """Pretrain a small ResNet on generated images with AdaSim pairs (about three minutes on two cores), then
    compare its k-NN accuracy with that of raw pixels and of the untrained encoder."""

    out: Path | None = None
    """The run folder to make; by default the first free one of runs/demo, runs/demo-2, ..."""
    seed: int = 0
    """The random seed."""
    epochs: int = 60
    """Fewer are sooner done and learn less; two are the least."""


def main(arguments: Sequence[str]) -> None:
    """`adasim demo ...`"""
    others = OtherProcesses()  # while torch is imported
    asked = read_options(DemoArguments, arguments, "demo")
    if asked.epochs < 2:
        raise UserError(f"--epochs {asked.epochs} leaves no epoch with partners. Two are the least.")
    if asked.out is not None:
        check_out(asked.out, overwrite=False)

    import torch  # noqa: F401  the seconds that this takes show who else uses the cores

    tell_if_busy(others.cores(), os.cpu_count() or 1)
    run_demo(asked.out, asked.seed, asked.epochs)


def tell_if_busy(used: float, cores: int) -> None:
    """Say that the demo will take longer where others use more than a quarter of the machine's cores."""
    if used > cores / 4:
        terminal.console().print(
            f"Other processes use {used:.1f} of this machine's {cores} cores: the demo will take longer than usual.",
            soft_wrap=True,
        )


def run_demo(out: Path | None = None, seed: int = 0, epochs: int = 60) -> None:
    """Pretrain a small ResNet on generated images with AdaSim pairs, then compare its k-NN accuracy with that of raw
    pixels and of the untrained encoder. `adasim demo --help` explains the arguments."""
    from adasim.api import load_run, pretrain
    from adasim.data import open_images
    from adasim.explore.collection import collect
    from adasim.explore.gallery import pick, render, rows_of, supports_of_memory
    from adasim.explore.open import open_run
    from adasim.explore.page import explore, write_page
    from adasim.options import ExploreOptions
    from adasim.recipes import for_epochs, get_recipe
    from adasim.tools.before_after import show as show_gain
    from adasim.tools.plot import plot
    from adasim.util.files import atomic_write

    out = out or _free_folder(Path("runs"), "demo")
    console = terminal.console()
    config = get_recipe("demo")
    if epochs != config.epochs:
        config = for_epochs(config, epochs)
    config.seed = seed
    config.eval.every = max(1, epochs // 12)  # for the curves: about five seconds in all
    train = open_images(config.data.source)
    console.print(
        f"Pretraining a small ResNet on {len(train):,} generated images of {len(train.classes)} patterns, "
        f"with AdaSim pairs and without labels, for {config.epochs} epochs."
    )
    pretrain(config, out)

    show_gain(out, console)
    run = load_run(out)
    last = run.metrics[-1]
    console.print(
        f"Bootstrapping ratio: {last['bootstrap_ratio']:.0%} of the last epoch's pairs joined two different images."
    )
    assert run.memory is not None
    supports = supports_of_memory(run.memory, collect([train]), config.neighbors.tau, out.name)
    picked = pick(supports, "random", 6, seed)
    picture = render(supports, rows_of(supports, picked.ids), picked, show=10, format="png")
    atomic_write(out / "neighbours.png", picture)
    plot(out, out / "curves.png")
    explored = explore(open_run(out, ExploreOptions(workers=0, no_cache=True), lambda sentence: None))
    write_page(out / "explore.html", explored)
    for file, what in (
        ("backbone.safetensors", "the encoder: adasim.load_backbone(...), a timm model in .net"),
        ("curves.png", "how it went: loss, k-NN accuracy, neighbours of the same class, ..."),
        ("neighbours.png", "some images and those that resemble them most; more: adasim gallery"),
        ("explore.html", "open it in a browser: neighbours, duplicates, suspicious labels, outliers"),
        ("metrics.jsonl", f"the numbers behind the curves; or: tensorboard --logdir {out}"),
    ):
        console.print(Text.assemble(f"  {out / file}  ", (what, "dim")), soft_wrap=True)


def _free_folder(parent: Path, name: str) -> Path:
    """parent/name, or the first of parent/name-2, parent/name-3, ... that does not exist."""
    number = 1
    while (path := parent / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path
