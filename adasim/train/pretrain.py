"""A run from its configuration to its end: meet the other processes, open images and folder, then train."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from adasim.config import Config
from adasim.data import (
    ImageSet,
    ImagesLike,
    PairLoader,
    check_same_data,
    describe,
    leave_out,
    record,
)
from adasim.data.sources.handed import source_of
from adasim.data.sources.record import listing_file
from adasim.dist.devices import deterministic, tf32_products, working_precision
from adasim.dist.processes import Distributed
from adasim.neighbors.pairs import require_all_labels
from adasim.registry import PAIRS
from adasim.runs.access import began_here, restarted
from adasim.runs.folder import RunFolder, check_same, decisive
from adasim.runs.trackers import check_installed
from adasim.train.loop import OnStep, Training
from adasim.train.micro import choose_micro_batches, free_bytes, has_batch_norm
from adasim.train.report import KnnDuringTraining
from adasim.train.signals import forgetting_frames
from adasim.train.start import disk_needed, known_listing, open_data, remedy, start_from_weights
from adasim.train.state import TrainState, build_loader, build_state
from adasim.util import terminal
from adasim.util.errors import UserError


@forgetting_frames
def pretrain(
    config: Config,
    out: str | Path,
    *,
    data: ImagesLike | None = None,
    knn: KnnDuringTraining | None = None,
    on_step: OnStep | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Path:
    """Pretrain an encoder; returns the run folder, which holds `backbone.safetensors` at the end.

    Arguments as of `adasim.pretrain`, but for `knn`, which measures the encoder every `config.eval.every` epochs.
    """
    config.check_values()
    if config.eval.every and knn is None:
        raise ValueError("config.eval.every needs `knn`; adasim.pretrain brings one")
    out = Path(out)
    if resume and overwrite:
        raise UserError("A run can be resumed or overwritten, not both. Leave out --resume or --overwrite.")
    with Distributed.start(config.device) as ranks, deterministic(config.deterministic), ExitStack() as stack:
        stack.enter_context(tf32_products(working_precision(config.precision, ranks.device) == "tf32"))
        launchers = {name for found in ranks.gather(restarted()) for name in found}
        resume = resume or ranks.share(began_here(out, launchers))
        ranks.require_same(decisive(config.to_dict()))
        with ranks.raise_on_all():
            if ranks.is_main:
                check_installed(config.save.log)
            ranks.check_batch(config.batch_size)
        images = open_data(data, config, ranks, partial(known_listing, out) if resume else None)
        if data is not None:
            config = replace(config, data=replace(config.data, source=source_of(data)))
        images = _checked(images, config, ranks)
        run = _reopened(out, config, images, ranks, stack) if resume else None
        has_checkpoint = resume and any((out / "checkpoints").glob("step-*"))
        state, loader = _built(config, images, ranks, stack, from_scratch=not has_checkpoint)
        _say(loader.how(), ranks)
        if not resume:
            _say(disk_needed(state, config.save.keep, out, ranks), ranks)
            run = _made(out, config, images, ranks, stack, overwrite)
        owner = ranks.gather("" if run is None else run.owner())[0]
        with ranks.raise_on_all():
            run = RunFolder.join(out, owner) if run is None else run
        training = Training(config, run, images, loader, state, ranks, knn, on_step)
        stack.callback(training.list_unreadable)
        if resume and state.epoch < config.epochs:
            training.notes.append(disk_needed(state, config.save.keep, out, ranks))
        training.run()
    return out


def _checked(images: ImageSet, config: Config, ranks: Distributed) -> ImageSet:
    """The images without those that are to be left out; refused where they do not fit the configuration."""
    with ranks.raise_on_all():
        images = leave_out(images, config.data.exclude)
        config.check(len(images), images.labels is not None)
        if PAIRS[config.pairs].needs_labels:
            assert images.labels is not None
            require_all_labels(config.pairs, images.labels)
    _say(describe(images), ranks)
    return images


def _reopened(
    out: Path, config: Config, images: ImageSet, ranks: Distributed, stack: ExitStack
) -> RunFolder | None:
    """The run that goes on, with the same settings and images; None but on the first rank."""
    run = None
    with ranks.raise_on_all():
        if ranks.is_main:
            run = stack.enter_context(RunFolder.open(out))
            check_same(run.config, config)
            check_micro_batch(run.config.micro_batch, config)

    def compared() -> str:
        if run is None:
            return ""
        return check_same_data(
            run.facts, images, config.data.verify, remedy(run, config.data.source), run.listing()
        )

    _say(ranks.run_with_heartbeat(compared), ranks)
    return run


def _built(
    config: Config, images: ImageSet, ranks: Distributed, stack: ExitStack, *, from_scratch: bool
) -> tuple[TrainState, PairLoader]:
    """Networks, memory and loader, before any checkpoint is read."""
    free = min(ranks.gather(free_bytes(ranks.device)))
    with ranks.raise_on_all():
        count, note = choose_micro_batches(config, ranks, free)
        _say(note, ranks)
        state = build_state(config, len(images), ranks, count)
        if config.model.init and from_scratch:
            _say(start_from_weights(state.method, config), ranks)
        loader = build_loader(config, images, ranks)
        stack.callback(loader.close)
    return state, loader


def _made(
    out: Path, config: Config, images: ImageSet, ranks: Distributed, stack: ExitStack, overwrite: bool
) -> RunFolder | None:
    """A new run's folder; None but on the first rank."""
    facts = ranks.run_with_heartbeat(lambda: record(images, config.data.verify) if ranks.is_main else {})
    with ranks.raise_on_all():
        if not facts:
            return None
        facts["device"] = str(ranks.device)
        listing = listing_file(images)
        return stack.enter_context(RunFolder.create(out, config, facts, listing=listing, overwrite=overwrite))


def check_micro_batch(before: int | str, config: Config) -> None:
    """Refuse to go on with other micro-batches where they change what is learnt."""
    if before != config.micro_batch and has_batch_norm(config):
        raise UserError(
            f"Cannot resume with other settings: micro_batch was {before} and is now {config.micro_batch}, and this "
            f"network's batch norms take their statistics from one micro-batch at a time. Resume without this "
            f"option, or start a new run with another --out."
        )


def _say(text: str | None, ranks: Distributed) -> None:
    """Let the first rank print a line, before there is a progress bar."""
    if text and ranks.is_main:
        terminal.console().print(text, soft_wrap=True)
