"""What people call from Python: the verbs of the command line as functions."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from adasim.config import Config
from adasim.data import ImageSet, ImagesLike, worker_count
from adasim.dist.processes import Distributed
from adasim.eval.evaluation import Report, make_evaluation, open_extractor
from adasim.eval.knn import online_knn
from adasim.models import Backbone, EvalTransform
from adasim.recipes import get_recipe
from adasim.runs.folder import RunFolder
from adasim.train.loop import OnStep
from adasim.train.pretrain import pretrain as run_pretraining
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
            `ImageSet`, a tensor of images, or a map-style torch `Dataset` of them (see `adasim.data.as_images`). To
            resume a run that images were handed over to, hand them over again.
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
    return run_pretraining(
        config,
        out,
        data=data,
        knn=knn_during_training,
        on_step=on_step,
        resume=resume,
        overwrite=overwrite,
    )


def knn_during_training(encoder: Backbone, images: ImageSet, config: Config) -> float:
    """k-NN accuracy in percent, logged every `config.eval.every` epochs."""
    return online_knn(
        encoder,
        images,
        EvalTransform.for_run(config),
        device=encoder.device,
        workers=worker_count(config.data.workers),
        seed=config.seed,
    )


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
