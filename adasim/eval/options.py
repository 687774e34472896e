"""What people may say about any evaluation, on the command line and in Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""A switch without its `--no-` twin."""


@dataclass(kw_only=True)
class Options:
    """What every evaluation asks."""

    random_weights: Flag = False
    """Measure an untrained model of that name."""
    size: int | None = None
    """Side in pixels of what the encoder sees; its own by default."""
    device: str = "auto"
    """Where the encoder runs: auto, cpu, cuda, ..."""
    workers: int = 2
    """Processes that read images from files."""
    no_cache: Flag = False
    """Make features anew and keep none."""
    exclude: Path | None = None
    """Leave out the images that this file rejects: verdicts exported from the page of `adasim explore`."""
    results: Path | None = None
    """Where the result is appended; RUN/results.jsonl by default, nowhere for a model that is no run."""
    seed: int = 0
    """Random seed: of held-out images, order, episodes."""


@dataclass(kw_only=True)
class Sources:
    """Which images: the run's own by default."""

    data: str | None = None
    """A folder, an .npz file, hf:NAME or synthetic[:COUNT]; its train and test split are used. Without a test
    split, a fifth of the images is held out."""
    train: str | None = None
    """Training images, if they are a source of their own."""
    test: str | None = None
    """Test images, if they are a source of their own."""
