"""`adasim.load_run`: what a run folder holds, for a look at it in Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from adasim.config import Config
from adasim.data import ImageSet, leave_out, open_images
from adasim.eval.results import RESULTS_FILE, Result, read_results
from adasim.models import Backbone, load_backbone
from adasim.neighbors import NeighborMemory
from adasim.runs.checkpoint import Checkpoint, read_newest
from adasim.runs.folder import RunFolder, check_source
from adasim.runs.metrics import read_metrics
from adasim.train.state import load_memory, memory_options


class Run:
    """A run, finished or not, on the CPU. Everything is read when first asked for, and nothing is written.

    Attributes:
        path: the run folder.
        config: its configuration.
    """

    path: Path
    config: Config

    def __init__(self, path: str | Path, say: Callable[[str], None] | None = None) -> None:
        self._say = say or _warn
        self._folder = RunFolder.open(Path(path), lock=False)
        self.path, self.config = self._folder.path, self._folder.config

    def __repr__(self) -> str:
        config = self.config
        return (
            f"Run({str(self.path)!r}: {config.method}, {config.model.name}, pairs={config.pairs}, "
            f"{config.epochs} epochs of {config.data.source}, seed {config.seed})"
        )

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """What was logged, oldest first: `step`, and at some steps `loss`, `bootstrap_ratio`, ..."""
        return read_metrics(self.path, self._say)

    def curve(self, name: str) -> dict[int, Any]:
        """{step: value} of one metric, at the steps that have it: `plt.plot(*zip(*run.curve("loss").items()))`."""
        return {line["step"]: line[name] for line in self.metrics if name in line}

    @property
    def results(self) -> list[Result]:
        """What `adasim eval` has measured so far, oldest first."""
        return read_results(self.path, self._say) if (self.path / RESULTS_FILE).is_file() else []

    @cached_property
    def encoder(self) -> Backbone:
        """The encoder as of the newest save, in evaluation mode."""
        return load_backbone(self.path)

    @cached_property
    def memory(self) -> NeighborMemory | None:
        """The neighbour memory of the newest checkpoint, whole even if several processes saved it.

        `run.memory.distribution([3], tau=0.2)` gives image 3's neighbours and their probabilities. None, with a
        warning that says why, if the run keeps no neighbours or has not saved any yet.
        """
        return self.read_memory(self._say)

    def read_memory(self, say: Callable[[str], None]) -> NeighborMemory | None:
        """`memory`, with what there is to say of it (why there is none, which lists are lost) given to `say`."""
        return read_newest(self.path, lambda checkpoint: self._memory_of(checkpoint, say), say)

    def _memory_of(self, checkpoint: Checkpoint | None, say: Callable[[str], None]) -> NeighborMemory | None:
        if checkpoint is None:
            say(f"{self.path} has no checkpoint yet, and so no neighbour memory.")
            return None
        parts = checkpoint.info.get("memory")
        if not parts:
            say(
                f"{self.path} has no neighbour memory: its pairs are {self.config.pairs}. A run with --pairs adasim "
                f"or nearest, or with --neighbors.watch, keeps one."
            )
            return None
        first, group = parts[-1]
        rows, dim = checkpoint.tensors(group)["cache"].shape
        options = memory_options(self.config)
        assert options is not None  # it saved one
        memory = NeighborMemory(first + rows, dim, **options)
        load_memory(memory, checkpoint)
        return memory

    @property
    def keeps_neighbours(self) -> bool:
        """Whether it has a neighbour memory."""
        return memory_options(self.config) is not None

    @property
    def data_fingerprint(self) -> str | None:
        """`ImageSet.fingerprint` of the images that the run began with, if it is on record."""
        return self._folder.facts.get("fingerprint")

    def images(self, split: str = "train", source: str | None = None) -> ImageSet:
        """The run's images, opened as it opens them; "test" for the test images of the same source.

        Args:
            source: where they are now, if they moved.
        """
        if source is None:
            check_source(self.path, self.config.data.source)
        source, size = source or self.config.data.source, self.config.views.size
        images = open_images(source, size=size, split=split, known=self._folder.listing_now)
        return leave_out(images, self.config.data.exclude)


def load_run(path: str | Path, say: Callable[[str], None] | None = None) -> Run:
    """Open a run folder to look at it. Needs no GPU, takes no lock, changes nothing.

    Args:
        path: the run folder.
        say: takes a sentence about each thing in it that is damaged; by default they are Python's warnings.

    >>> run = load_run("runs/demo")                                      # doctest: +SKIP
    >>> neighbours, p = run.memory.distribution([3], run.config.neighbors.tau)   # doctest: +SKIP
    """
    return Run(path, say)


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=3)
