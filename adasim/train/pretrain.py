"""A run from its configuration to its end: meet the other processes, open images and folder, then train."""

from __future__ import annotations

import hashlib
import secrets
import shlex
import socket
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from adasim.config import Config
from adasim.data import (
    FolderImages,
    ImageSet,
    ImagesLike,
    PairLoader,
    as_images,
    check_same_data,
    describe,
    leave_out,
    open_images,
    record,
)
from adasim.data.folder import Listing
from adasim.data.identity import listing_file
from adasim.data.sources import RESUME_ADVICE, is_folder, is_from_python, source_of
from adasim.dist.devices import deterministic, tf32_products, working_precision
from adasim.dist.processes import Distributed
from adasim.models import BACKBONE_FILE, Backbone, EvalTransform, read_weights, start_from
from adasim.neighbors.pairs import require_all_labels
from adasim.registry import METHODS, PAIRS
from adasim.runs.access import began_here, restarted
from adasim.runs.checkpoint import Checkpoint, CheckpointStore
from adasim.runs.folder import RunFolder, check_same, decisive
from adasim.runs.trackers import check_installed
from adasim.train.budget import choose_micro_batches, disk_needed, free_bytes, has_batch_norm
from adasim.train.loop import OnStep, Training
from adasim.train.report import KnnDuringTraining
from adasim.train.signals import forgetting_frames
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
        launchers = {name for names in ranks.gather(restarted()) for name in names}
        resume = resume or ranks.share(began_here(out, launchers))
        ranks.require_same(decisive(config.to_dict()))
        with ranks.raise_on_all():
            if ranks.is_main:
                check_installed(config.save.log)
            ranks.check_batch(config.batch_size)
        images = open_data(data, config, ranks)
        if data is not None:
            config = replace(config, data=replace(config.data, source=source_of(data)))
        images = _checked(images, config, ranks)
        run = _opened(out, config, images, ranks, stack) if resume else None
        has_checkpoint = resume and any((out / "checkpoints").glob("step-*"))
        state, loader = _built(config, images, ranks, stack, from_scratch=not has_checkpoint)
        _say(ranks, loader.how())
        if not resume:
            _say(ranks, disk_needed(state, config, out, ranks))
            run = _created(out, config, images, ranks, stack, overwrite)
        owner = ranks.gather("" if run is None else run.owner())[0]
        with ranks.raise_on_all():
            run = RunFolder.join(out, owner) if run is None else run
        _say(ranks, *run.notes, *run.version_changes(), _precision_note(config, state, ranks))
        store = _restored(run, config, state, ranks, loader.steps_per_epoch, resume)
        training = Training(config, run, images, loader, state, store, ranks, knn, on_step)
        stack.callback(training.list_unreadable)
        training.run()
    return out


def open_data(data: ImagesLike | None, config: Config, ranks: Distributed) -> ImageSet:
    """The images of a run, the same on all ranks, or a `UserError` on all. One rank lists a folder for all.

    Args:
        data: the images, if they are not to be opened by `config.data.source`.
        config: the configuration.
        ranks: all of them call this together.
    """
    given = config.data.source if data is None else data

    def opened(listing: Listing | None = None) -> ImageSet:
        try:
            if isinstance(given, str):
                return open_images(given, size=config.views.size, listing=listing)
            return as_images(given)
        except UserError as error:
            raise (error if ranks.is_main else _elsewhere(error, ranks)) from None

    waits = not ranks.is_main and isinstance(given, str) and is_folder(given)
    images = ranks.run_with_heartbeat(None if waits else opened)
    listing = ranks.share(images.files if isinstance(images, FolderImages) else None)
    with ranks.raise_on_all():
        if images is None:
            images = opened(listing)
            if listing is not None and isinstance(images, FolderImages):
                try:
                    images.check_there()
                except UserError as error:
                    raise _elsewhere(error, ranks) from None
    # Names and sizes of who received them are the first rank's own: only what the files hold can differ.
    mark = images.fingerprint() if listing is None else images.sampled_contents()
    ranks.require_same(
        {
            "number of images": len(images),
            "fingerprint of the images": hashlib.sha256(mark.encode()).hexdigest(),
        }
    )
    return images


def _elsewhere(error: UserError, ranks: Distributed) -> UserError:
    return UserError(f"On {socket.gethostname()}, for process {ranks.rank} of {ranks.world}: {error}")


def _checked(images: ImageSet, config: Config, ranks: Distributed) -> ImageSet:
    """The images without those that are to be left out; refused where they do not fit the configuration."""
    with ranks.raise_on_all():
        images = leave_out(images, config.data.exclude)
        config.check(len(images), images.labels is not None)
        if PAIRS[config.pairs].needs_labels:
            assert images.labels is not None
            require_all_labels(config.pairs, images.labels)
    _say(ranks, describe(images))
    return images


def _opened(
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
            run.facts, images, config.data.verify, advice(run, config.data.source), run.listing()
        )

    _say(ranks, ranks.run_with_heartbeat(compared))
    return run


def _built(
    config: Config, images: ImageSet, ranks: Distributed, stack: ExitStack, *, from_scratch: bool
) -> tuple[TrainState, PairLoader]:
    """Networks, memory and loader, before any checkpoint is read."""
    free = min(ranks.gather(free_bytes(ranks.device)))
    with ranks.raise_on_all():
        count, note = choose_micro_batches(config, ranks, free)
        _say(ranks, note)
        state = build_state(config, len(images), ranks, count)
        if config.model.init and from_scratch:
            _say(ranks, start_from_weights(state.method, config))
        loader = build_loader(config, images, ranks)
        stack.callback(loader.close)
    return state, loader


def _created(
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


def _restored(
    run: RunFolder,
    config: Config,
    state: TrainState,
    ranks: Distributed,
    steps_per_epoch: int,
    resume: bool,
) -> CheckpointStore:
    """Where the run's checkpoints are, the newest of them loaded into `state`, if there is one."""
    store = CheckpointStore(run.path, config.save.keep, partial(_say, ranks), ranks, run.id)
    checkpoint = store.load_latest()
    with ranks.raise_on_all():
        if checkpoint is not None:
            state.load(checkpoint, ranks.world)
        elif run.has_saved:
            raise UserError(
                f"The checkpoints of {run.path} are gone, and it had saved some. Restore them from a copy, "
                f"or begin again with --overwrite or another --out."
            )
    if resume and state.epoch < config.epochs:  # before config.json may say that the run is longer now
        _say(ranks, disk_needed(state, config, run.path, ranks))
    with ranks.raise_on_all():
        if ranks.is_main:
            _update(run, config, checkpoint)
            store.run = run.id
            if checkpoint is None and run.resumed:
                _say(ranks, f"{run.path} has no checkpoint yet: the run begins at step 0.")
            if checkpoint is not None and checkpoint.info["settings"]["epochs"] < config.epochs:
                before = replace(config, epochs=checkpoint.info["settings"]["epochs"])
                _say(ranks, more_epochs(before, config, checkpoint.step, steps_per_epoch))
    return store


def _update(run: RunFolder, config: Config, checkpoint: Checkpoint | None) -> None:
    """Let the run folder say what the run goes on with: more epochs, or images that are elsewhere now."""
    try:
        if run.id is None:  # run.json was lost
            run.identify(id=checkpoint.run if checkpoint and checkpoint.run else secrets.token_hex(8))
        if (run.config.epochs, run.config.data.source) != (config.epochs, config.data.source):
            run.follow(config)
    except OSError as error:
        raise UserError(f"Cannot write to {run.path}: {error.strerror}. Make room, then resume.") from error


def _precision_note(config: Config, state: TrainState, ranks: Distributed) -> str | None:
    if state.precision == config.precision or ranks.device.type == "cpu":
        return None
    why = "has no TF32"
    if config.precision != "tf32":
        why = f"cannot scale losses, without which {config.precision} loses small gradients"
    return f"{ranks.device} {why}: this run uses {state.precision}."


def advice(run: RunFolder, source: str) -> str:
    """What to do when the images in `source` are not those that the run began with."""
    if is_from_python(run.config.data.source):
        return RESUME_ADVICE
    words = "Restore the data set as it was"
    if (run.path / BACKBONE_FILE).is_file():
        recipe = "RECIPE" if run.config.recipe == "custom" else run.config.recipe
        words += (
            f", or start a new run from the weights of this one (adasim pretrain {recipe} --data "
            f"{shlex.quote(source)} --model.init {shlex.quote(str(run.path))} --out NEW-RUN)"
        )
    return words


def check_micro_batch(before: int | str, config: Config) -> None:
    """Refuse to go on with other micro-batches where they change what is learnt."""
    if before != config.micro_batch and has_batch_norm(config):
        raise UserError(
            f"Cannot resume with other settings: micro_batch was {before} and is now {config.micro_batch}, and this "
            f"network's batch norms take their statistics from one micro-batch at a time. Resume without this "
            f"option, or start a new run with another --out."
        )


def start_from_weights(method: nn.Module, config: Config) -> str:
    """Load `config.model.init` into the method's encoders, student's and teacher's alike; a sentence about it."""
    source = config.model.init
    weights = read_weights(source)
    start_from([part for part in method.modules() if isinstance(part, Backbone)], weights, source)
    sentence = f"The encoder starts from the weights of {source}; its head is new."
    here = EvalTransform.for_run(config).to_timm()
    there = here if weights.transform is None else weights.transform.to_timm()
    if (here["mean"], here["std"]) != (there["mean"], there["std"]):
        mean, std = (" ".join(f"{x:g}" for x in values) for values in (there["mean"], there["std"]))
        same = f"--views.mean {mean} --views.std {std}"
        sentence += f" Their images were normalised otherwise; {same} would do the same here."
    return sentence


def more_epochs(before: Config, now: Config, step: int, steps_per_epoch: int) -> str:
    """What becomes of the schedules when a run is given more epochs in the middle."""
    moved = ["learning rate"]
    if now.optim.weight_decay != now.optim.weight_decay_end:
        moved.append("weight decay")
    moved += [*METHODS[now.method].follows_total, *PAIRS[now.pairs].follows_total]
    names = " and ".join([", ".join(moved[:-1]), moved[-1]] if moved[1:] else moved)
    follow = "follow" if moved[1:] else "follows"
    rates = [config.learning_rate(step, steps_per_epoch) for config in (now, before)]
    return (
        f"This run had {before.epochs} epochs and now has {now.epochs}: from step {step} on, {names} {follow} the "
        f"schedule of {now.epochs} epochs (the learning rate goes on at {rates[0]:.3g} instead of {rates[1]:.3g}). "
        f"The result is not that of a run which had {now.epochs} epochs from its start."
    )


def _say(ranks: Distributed, *sentences: str | None) -> None:
    """Let the first rank print them, before there is a progress bar."""
    for sentence in sentences:
        if sentence and ranks.is_main:
            terminal.say(sentence)
