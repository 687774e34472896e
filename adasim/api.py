"""What people call from Python: `adasim.pretrain`, `adasim.evaluate`, `adasim.load_run`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from adasim.config import Config
from adasim.data import ImageSet, ImagesLike, open_images, with_verdicts, worker_count
from adasim.dist.processes import Distributed
from adasim.eval.evaluation import Report, make_evaluation, open_extractor
from adasim.eval.knn import online_knn
from adasim.eval.results import RESULTS_FILE, Result, read_results
from adasim.models import Backbone, EvalTransform, load_backbone
from adasim.neighbors import NeighborMemory
from adasim.recipes import get_recipe
from adasim.runs.checkpoint import Checkpoint, read_newest
from adasim.runs.folder import RunFolder, check_source
from adasim.runs.metrics import read_metrics
from adasim.train.loop import OnStep
from adasim.train.pretrain import pretrain as run_pretraining
from adasim.train.state import load_memory, memory_options
from adasim.util.errors import UserError


def pretrain(
    config: Config | str,
    out: str | Path,
    *,
    data: ImagesLike | None = None,
    on_step: OnStep | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Path:
    """Pretrain an encoder; returns the run folder, which holds `backbone.safetensors` at the end.

    Args:
        config: a recipe's name or a whole configuration.
        out: the run folder to make.
        data: the images, if `config` does not say where they are: a source string (see `DataConfig.source`), an
            `ImageSet`, a tensor of images, or a map-style torch `Dataset` of them (see `adasim.data.as_images`). A
            run that was given images in Python needs them again to resume.
        on_step: called as `on_step(state, batch, loss)` after each training step, on every rank: `state.step` counts
            them, `batch` has `ids`, `partners` and `views`. It may look at everything and should change nothing.
        resume: continue the run in `out`, to the very bits that an uninterrupted run would have reached (on a GPU
            with `config.deterministic` only). Only `epochs` may have grown; a run that has no checkpoint yet begins
            at step 0.
        overwrite: if `out` holds a run that no process uses, delete it first.

    Raises:
        Stopped: Ctrl-C or another signal asked to stop, and everything is saved. It is a SystemExit.

    >>> import adasim
    >>> run = adasim.pretrain("demo", "runs/demo")         # doctest: +SKIP
    >>> encoder = adasim.load_backbone(run)                # doctest: +SKIP
    """
    config = get_recipe(config) if isinstance(config, str) else config
    if resume and data is None and not config.data.source:
        data = RunFolder.open(Path(out), lock=False).config.data.source
    how: dict[str, Any] = {"on_step": on_step, "resume": resume, "overwrite": overwrite}
    return run_pretraining(config, out, data=data, knn=knn_during_training, **how)


def knn_during_training(encoder: Backbone, images: ImageSet, config: Config) -> float:
    """k-NN accuracy in percent, logged every `config.eval.every` epochs."""
    transform, workers = EvalTransform.for_run(config), worker_count(config.data.workers)
    return online_knn(encoder, images, transform, device=encoder.device, workers=workers, seed=config.seed)


def evaluate(
    model: str | Path | Backbone,
    evaluation: str,
    *,
    data: Any = None,
    save: bool = True,
    ranks: Distributed | None = None,
    **options: Any,
) -> Report:
    """Measure an encoder: what `adasim eval` does, with the figures as values.

    Args:
        model: what the command line calls MODEL (docs/use.md), or an encoder that is loaded.
        evaluation: `knn`, `linear`, `fewshot`, `segmentation`, `views`, or one of your own (docs/extending.md).
        data: the images, as after `--data` or for `pretrain`; the run's own by default.
        save: append the results to the run's results.jsonl, or to the file `results=...`.
        ranks: the processes that measure together (`adasim.dist.processes.Distributed.start()`): each of them makes
            this call. By default this one is alone.
        options: those of `adasim eval NAME --help`, with `_` for `-`: `k=(5, 20)`, `no_cache=True`.

    >>> import adasim
    >>> report = adasim.evaluate("runs/demo", "knn", k=20)  # doctest: +SKIP
    >>> report.value, report.metrics["top5_k20"]            # doctest: +SKIP
    >>> print(report)                                       # doctest: +SKIP
    """
    chosen = make_evaluation(evaluation, options if data is None else options | {"data": data})
    said: list[str] = []
    extractor = open_extractor(model, chosen, named_size=chosen.named_size, say=said.append, ranks=ranks)
    report: Report = chosen.run(extractor)
    if save:
        try:
            extractor.keep(report.results, chosen.results)
        except UserError as error:  # hours of work are in the report
            warnings.warn(str(error), stacklevel=2)
    return replace(report, said=tuple(said))


def load_run(path: str | Path, say: Callable[[str], None] | None = None) -> Run:
    """Open a run folder to look at it. Needs no GPU, takes no lock, changes nothing.

    Args:
        path: the run folder.
        say: takes a sentence about each thing in it that is damaged; by default they are Python's warnings.

    >>> run = load_run("runs/demo")                                      # doctest: +SKIP
    >>> neighbours, p = run.memory.distribution([3], run.config.neighbors.tau)   # doctest: +SKIP
    """
    return Run(path, say or (lambda sentence: warnings.warn(sentence, stacklevel=3)))


class Run:
    """A run, finished or not, on the CPU. Everything is read when first asked for, and nothing is written.

    Attributes:
        path: the run folder.
        config: its configuration.
        data_fingerprint: `ImageSet.fingerprint` of the images that the run began with, if it is on record.
    """

    def __init__(self, path: str | Path, say: Callable[[str], None]) -> None:
        self._say = say
        self._folder = RunFolder.open(Path(path), lock=False)
        self.path: Path = self._folder.path
        self.config: Config = self._folder.config
        self.data_fingerprint: str | None = self._folder.facts.get("fingerprint")

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
        """`memory`, with what there is to say of it given to `say`."""

        def read(checkpoint: Checkpoint | None) -> NeighborMemory | None:
            if checkpoint is None:
                say(f"{self.path} has no checkpoint yet, and so no neighbour memory.")
                return None
            parts, options = checkpoint.info.get("memory"), memory_options(self.config)
            if not parts or options is None:
                say(
                    f"{self.path} has no neighbour memory: its pairs are {self.config.pairs}. A run with --pairs "
                    f"adasim or nearest, or with --neighbors.watch, keeps one."
                )
                return None
            first, group = parts[-1]
            rows, dim = checkpoint.tensors(group)["cache"].shape
            memory = NeighborMemory(first + rows, dim, **options)
            load_memory(memory, checkpoint)
            return memory

        return read_newest(self.path, read, say)

    @property
    def keeps_neighbours(self) -> bool:
        """Whether it has a neighbour memory."""
        return memory_options(self.config) is not None

    def images(self, split: str = "train", source: str | None = None) -> ImageSet:
        """The run's images, opened as it opens them; "test" for the test images of the same source.

        Args:
            source: where they are now, if they moved.
        """
        if source is None:
            check_source(self.path, self.config.data.source)
        source, size = source or self.config.data.source, self.config.views.size
        return with_verdicts(open_images(source, size=size, split=split), self.config.data)
