"""A run from its configuration to its end: meet the other processes, open images and folder, then train."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from adasim import terminal
from adasim.config import Config
from adasim.data import (
    ImagesLike,
    PairLoader,
    as_images,
    check_same_data,
    describe,
    leave_out,
    open_images,
    record,
)
from adasim.data.sources.handed import source_of
from adasim.errors import UserError
from adasim.ranks.devices import deterministic
from adasim.ranks.processes import Distributed
from adasim.runs.folder import RunFolder
from adasim.runs.settings import check_same, decisive
from adasim.train.loop import Training
from adasim.train.report import KnnDuringTraining
from adasim.train.signals import forgetting_frames
from adasim.train.start import remedy
from adasim.train.state import build_state


@forgetting_frames
def pretrain(
    config: Config,
    out: str | Path,
    *,
    data: ImagesLike | None = None,
    knn: KnnDuringTraining | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Path:
    """Pretrain an encoder; returns the run folder, which holds `backbone.safetensors` at the end.

    Args:
        config: the whole configuration.
        out: the run folder to make.
        data: the images, if they are not to be opened by `config.data.source`.
        knn: measures the encoder every `config.eval.every` epochs.
        resume: continue the run in `out`, to the very bits that an uninterrupted run would have reached (on a GPU
            with `config.deterministic` only). Only `epochs` may have grown; a run that has no checkpoint yet begins
            at step 0.
        overwrite: if `out` holds a run that no process uses, delete it first.

    Raises:
        Stopped: Ctrl-C or another signal asked to stop, and everything is saved. It is a SystemExit.
    """
    config.check_values()
    if config.eval.every and knn is None:
        raise ValueError("config.eval.every needs `knn`; adasim.pretrain brings one")
    out = Path(out)
    if resume and overwrite:
        raise UserError("A run can be resumed or overwritten, not both. Leave out --resume or --overwrite.")
    with Distributed.start(config.device) as ranks, deterministic(config.deterministic), ExitStack() as stack:
        resume = resume or (ranks.all_any(restarted()) and (out / "config.json").is_file())
        ranks.require_same(decisive(config.to_dict()))
        with ranks.together():
            ranks.check_batch(config.batch_size)
            if data is None:
                images = open_images(config.data.source, size=config.views.size)
            else:
                images = as_images(data, size=config.views.size)
                config = replace(config, data=replace(config.data, source=source_of(data)))
            images = leave_out(images, config.data.exclude)
            config.check(len(images), images.labels is not None)
        if ranks.is_main:
            say(describe(images))
        ranks.require_same(
            {"number of images": len(images), "fingerprint of the images": images.fingerprint()}
        )
        with ranks.together():
            if resume and ranks.is_main:
                run = stack.enter_context(RunFolder.open(out))
                check_same(run.description(), {"config": config.to_dict()})
                say(check_same_data(run.facts, images, config.data.verify, remedy(run)))
        with ranks.together():
            state = build_state(config, len(images), ranks)
            loader = PairLoader(
                images,
                config.views,
                batch_size=config.batch_size,
                seed=config.seed,
                workers=config.data.workers,
                device=ranks.device,
                max_unreadable=config.data.max_unreadable,
                rank=ranks.rank,
                world=ranks.world,
            )
            stack.callback(loader.close)
        with ranks.together():
            if not resume and ranks.is_main:
                facts = {**record(images, config.data.verify), "device": str(ranks.device)}
                run = stack.enter_context(RunFolder.create(out, config, facts, overwrite=overwrite))
        owner = ranks.gather(run.owner() if ranks.is_main else "")[0]
        with ranks.together():
            if not ranks.is_main:
                run = RunFolder.join(out, owner)
        training = Training(config, run, images, loader, state, ranks, knn)
        stack.callback(training.list_unreadable)
        training.run()
    return out


def say(text: str) -> None:
    """Print a line before there is a progress bar."""
    terminal.console().print(text, soft_wrap=True)


def restarted() -> bool:
    """Whether torchrun (`--max-restarts`) or Slurm (a requeue) has started this process again.

    Not every node of torchrun counts every restart.
    """
    counts = (os.environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count.isdecimal() and int(count) > 0 for count in counts)
