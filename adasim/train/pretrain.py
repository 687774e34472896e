"""A run from its configuration to its end: meet the other processes, open images and folder, then train."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from adasim import terminal
from adasim.config import Config
from adasim.data import (
    ImageSet,
    ImagesLike,
    PairLoader,
    check_same_data,
    describe,
    leave_out,
    record,
    worker_count,
)
from adasim.data.sources.handed import source_of
from adasim.data.sources.record import listing_file
from adasim.errors import UserError
from adasim.ranks.devices import deterministic, tf32_products, working_precision
from adasim.ranks.processes import Distributed
from adasim.registry import PAIRS
from adasim.runs.folder import RunFolder
from adasim.runs.settings import check_same, decisive
from adasim.runs.trackers import check_installed
from adasim.train.loop import Training
from adasim.train.micro import choose_micro_batches, free_bytes
from adasim.train.report import KnnDuringTraining
from adasim.train.signals import forgetting_frames
from adasim.train.start import known_listing, open_data, remedy, start_from_weights
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
        stack.enter_context(tf32_products(working_precision(config.precision, ranks.device) == "tf32"))
        resume = resume or (ranks.all_any(restarted()) and (out / "config.json").is_file())
        ranks.require_same(decisive(config.to_dict()))
        with ranks.together():
            if ranks.is_main:
                check_installed(config.save.log)
            ranks.check_batch(config.batch_size)
        images = open_data(data, config, ranks, partial(known_listing, out) if resume else None)
        if data is not None:
            config = replace(config, data=replace(config.data, source=source_of(data)))
        with ranks.together():
            images = leave_out(images, config.data.exclude)
            config.check(len(images), images.labels is not None)
            if PAIRS[config.pairs].needs_labels:
                require_all_labels(config.pairs, images)
        if ranks.is_main:
            say(describe(images))
        with ranks.together():
            if resume and ranks.is_main:
                run = stack.enter_context(RunFolder.open(out))
                check_same(run.description(), {"config": config.to_dict()})
        checked = ranks.patiently(
            lambda: (
                check_same_data(run.facts, images, config.data.verify, remedy(run), run.listing())
                if resume and ranks.is_main
                else ""
            )
        )
        if checked:
            say(checked)
        free = min(ranks.gather(free_bytes(ranks.device)))
        with ranks.together():
            count, note = choose_micro_batches(config, ranks, free)
            if note and ranks.is_main:
                say(note)
            state = build_state(config, len(images), ranks, count)
            if config.model.init and not (resume and any((out / "checkpoints").glob("step-*"))):
                note = start_from_weights(state.method, config)
                if ranks.is_main:
                    say(note)
            loader = PairLoader(
                images,
                config.views,
                batch_size=config.batch_size,
                seed=config.seed,
                workers=worker_count(config.data.workers),
                device=ranks.device,
                max_unreadable=config.data.max_unreadable,
                rank=ranks.rank,
                world=ranks.world,
            )
            stack.callback(loader.close)
        if ranks.is_main:
            say(loader.how())
        facts = ranks.patiently(
            lambda: record(images, config.data.verify) if ranks.is_main and not resume else {}
        )
        with ranks.together():
            if facts:
                facts["device"] = str(ranks.device)
                listing = listing_file(images)
                run = stack.enter_context(
                    RunFolder.create(out, config, facts, listing=listing, overwrite=overwrite)
                )
        owner = ranks.gather(run.owner() if ranks.is_main else "")[0]
        with ranks.together():
            if not ranks.is_main:
                run = RunFolder.join(out, owner)
        training = Training(config, run, images, loader, state, ranks, knn)
        stack.callback(training.list_unreadable)
        training.run()
    return out


def require_all_labels(pairs: str, images: ImageSet) -> None:
    """Refuse images of which some have no label, before a folder is made."""
    assert images.labels is not None
    if missing := int((images.labels < 0).sum()):
        raise UserError(f"pairs={pairs} needs a label for each image, and {missing:,} have none.")


def say(text: str) -> None:
    """Print a line before there is a progress bar."""
    terminal.console().print(text, soft_wrap=True)


def restarted() -> bool:
    """Whether torchrun (`--max-restarts`) or Slurm (a requeue) has started this process again.

    Not every node of torchrun counts every restart.
    """
    counts = (os.environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count.isdecimal() and int(count) > 0 for count in counts)
