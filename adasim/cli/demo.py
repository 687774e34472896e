"""`adasim demo`: pretraining on generated images, and proof that it worked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adasim.cli.reading import read_options
from adasim.runs.checks import check_out
from adasim.util import terminal
from adasim.util.cores import OtherProcesses
from adasim.util.errors import UserError


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

    from adasim.demo import run_demo

    tell_if_busy(others.cores(), os.cpu_count() or 1)
    run_demo(asked.out, asked.seed, asked.epochs)


def tell_if_busy(used: float, cores: int) -> None:
    """Say that the demo will take longer where others use more than a quarter of the machine's cores."""
    if used > cores / 4:
        terminal.console().print(
            f"Other processes use {used:.1f} of this machine's {cores} cores: the demo will take longer than usual.",
            soft_wrap=True,
        )
