"""What people call from Python: `adasim.pretrain` and, with it, what the command line does."""

from __future__ import annotations

from pathlib import Path

from adasim.config import Config
from adasim.data import ImageSet, ImagesLike
from adasim.eval.online import online_knn
from adasim.models import Backbone, EvalTransform
from adasim.recipes import get_recipe
from adasim.runs.folder import RunFolder
from adasim.train import loop


def pretrain(
    config: Config | str,
    out: str | Path,
    *,
    data: ImagesLike | None = None,
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
    return loop.pretrain(config, out, data=data, knn=knn_during_training, resume=resume, overwrite=overwrite)


def knn_during_training(encoder: Backbone, images: ImageSet, config: Config) -> float:
    """k-NN accuracy in percent, logged every `config.eval.every` epochs."""
    return online_knn(
        encoder,
        images,
        EvalTransform.for_run(config),
        device=next(encoder.parameters()).device,
        workers=config.data.workers,
        seed=config.seed,
    )
