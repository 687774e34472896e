"""`adasim demo`: pretraining on generated images, and proof that it worked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adasim.cli.reading import read_options
from adasim.errors import UserError


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
    asked = read_options(DemoArguments, arguments, "demo")
    if asked.epochs < 2:
        raise UserError(f"--epochs {asked.epochs} leaves no epoch with partners. Two are the least.")

    from adasim.demo import run_demo

    run_demo(asked.out, asked.seed, asked.epochs)
