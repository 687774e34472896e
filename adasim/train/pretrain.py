"""A run from its configuration to its end: meet the other processes, open images and folder, then train."""

from __future__ import annotations

import secrets
import shlex
import socket
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from adasim.config import Config
from adasim.data import (
    FolderImages,
    ImageSet,
    ImagesLike,
    PairLoader,
    as_images,
    check_same_data,
    describe,
    open_images,
    record,
    with_verdicts,
)
from adasim.data.identity import listing_file
from adasim.data.image_folder import Listing
from adasim.data.sources import RESUME_ADVICE, is_folder, is_from_python, source_of
from adasim.dist.devices import deterministic, tf32_products, working_precision
from adasim.dist.processes import Distributed
from adasim.models import BACKBONE_FILE, Backbone, EvalTransform, read_weights, start_from
from adasim.neighbors.pairs import require_all_labels
from adasim.registry import METHODS, PAIRS
from adasim.runs.checkpoint import CheckpointStore
from adasim.runs.folder import RunFolder, began_here, check_same, checksum, decisive, restarted
from adasim.runs.metrics import check_installed
from adasim.train.budget import (
    choose_micro_batches,
    disk_needed,
    free_bytes,
    has_batch_norm,
    out_of_memory_in_words,
)
from adasim.train.loop import OnStep, Training
from adasim.train.report import KnnDuringTraining
from adasim.train.state import TrainState, build_loader, build_state
from adasim.util import terminal
from adasim.util.errors import UserError
from adasim.util.files import write_errors
from adasim.util.interrupts import forgetting_frames


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
    if resume and overwrite:
        raise UserError("A run can be resumed or overwritten, not both. Leave out --resume or --overwrite.")
    out = Path(out)
    with Distributed.start(config.device) as ranks, deterministic(config.deterministic), ExitStack() as stack:
        stack.enter_context(tf32_products(working_precision(config.precision, ranks.device) == "tf32"))
        # What a launcher has started again goes on.
        launchers = {name for names in ranks.gather(restarted()) for name in names}
        resume = resume or ranks.share(began_here(out, launchers))
        check_processes(config, ranks)
        images = open_data(data, config, ranks)
        if data is not None:
            config = replace(config, data=replace(config.data, source=source_of(data)))
        images = check_images(images, config, ranks)
        run = reopen_run(out, config, images, ranks, stack) if resume else None
        saved = resume and any((out / "checkpoints").glob("step-*"))
        state, loader = build(config, images, ranks, stack, start=not saved)
        if not resume:
            run = create_run(out, config, images, state, ranks, stack, overwrite)
        run = join_run(run, out, ranks)
        store = restore(run, config, state, ranks, loader.steps_per_epoch, resume)
        training = Training(config, run, images, loader, state, store, ranks, knn, on_step)
        stack.callback(training.list_unreadable)
        with out_of_memory_in_words(config, state):
            training.run()
    return out


def check_processes(config: Config, ranks: Distributed) -> None:
    """All have the same settings, can share the batch, and have what the run asks for."""
    ranks.require_same(decisive(config))
    with ranks.raise_on_all():
        if ranks.is_main:
            check_installed(config.save.log)
        ranks.check_batch(config.batch_size)


def open_data(data: ImagesLike | None, config: Config, ranks: Distributed) -> ImageSet:
    """The images of a run, the same on all ranks, or a `UserError` on all. One rank lists a folder for all.

    `data` are the images, if they are not to be opened by `config.data.source`.
    """
    given = config.data.source if data is None else data

    def opened(listing: Listing | None = None) -> ImageSet:
        try:
            if not isinstance(given, str):
                return as_images(given)
            images = open_images(given, size=config.views.size, listing=listing)
            if listing is not None and isinstance(images, FolderImages):
                images.check_there()
            return images
        except UserError as error:
            where = f"On {socket.gethostname()}, for process {ranks.rank} of {ranks.world}: "
            raise UserError(f"{'' if ranks.is_main else where}{error}") from None

    waits = not ranks.is_main and isinstance(given, str) and is_folder(given)
    images = ranks.run_with_heartbeat(None if waits else opened)
    listing = ranks.share(images.files if isinstance(images, FolderImages) else None)
    with ranks.raise_on_all():
        if images is None:
            images = opened(listing)
    # Names and sizes of who received them are the first rank's own: only what the files hold can differ.
    mark = images.fingerprint() if listing is None else images.sampled_contents()
    ranks.require_same({"number of images": len(images), "fingerprint of the images": checksum(mark)})
    return images


def check_images(images: ImageSet, config: Config, ranks: Distributed) -> ImageSet:
    """The images as verdicts leave them; refused where they do not fit the configuration."""
    with ranks.raise_on_all():
        images = with_verdicts(images, config.data)
        config.check(len(images), images.labels is not None)
        if PAIRS[config.pairs].needs_labels:
            assert images.labels is not None
            require_all_labels(config.pairs, images.labels)
    _say(ranks, describe(images))
    return images


def reopen_run(
    out: Path, config: Config, images: ImageSet, ranks: Distributed, stack: ExitStack
) -> RunFolder | None:
    """The run that goes on, with the same settings and images; None but on the first rank."""
    run = None
    with ranks.raise_on_all():
        if ranks.is_main:
            run = stack.enter_context(RunFolder.open(out))
            check_same(run.config, config)
            check_micro_batch(run.config.micro_batch, config)

    def compare() -> str:
        if run is None:
            return ""
        advice = _advice(run, config.data.source)
        return check_same_data(run.facts, images, config.data.verify, advice, run.listing())

    _say(ranks, ranks.run_with_heartbeat(compare))
    return run


def build(
    config: Config, images: ImageSet, ranks: Distributed, stack: ExitStack, *, start: bool
) -> tuple[TrainState, PairLoader]:
    """Networks, memory and loader; at the `start` of a run, with the weights of `--model.init`."""
    free = min(ranks.gather(free_bytes(ranks.device)))
    with ranks.raise_on_all():
        count, note = choose_micro_batches(config, ranks, free)
        _say(ranks, note)
        state = build_state(config, len(images), ranks, count)
        if config.model.init and start:
            _say(ranks, _start_from_weights(state, config))
        loader = build_loader(config, images, ranks)
        stack.callback(loader.close)
    _say(ranks, loader.how(), _precision_note(config, state, ranks))
    return state, loader


def create_run(
    out: Path,
    config: Config,
    images: ImageSet,
    state: TrainState,
    ranks: Distributed,
    stack: ExitStack,
    overwrite: bool,
) -> RunFolder | None:
    """A new run's folder; None but on the first rank."""
    _say(ranks, disk_needed(state, config, out, ranks))
    facts = ranks.run_with_heartbeat(lambda: record(images, config.data.verify) if ranks.is_main else {})
    with ranks.raise_on_all():
        if not facts:
            return None
        facts["device"] = str(ranks.device)
        listing = listing_file(images)
        return stack.enter_context(RunFolder.create(out, config, facts, listing=listing, overwrite=overwrite))


def join_run(run: RunFolder | None, out: Path, ranks: Distributed) -> RunFolder:
    """The folder that the first rank holds, on all of them."""
    owner = ranks.share("" if run is None else run.owner())
    with ranks.raise_on_all():
        run = RunFolder.join(out, owner) if run is None else run
    _say(ranks, *run.notes, *run.version_changes())
    return run


def restore(
    run: RunFolder, config: Config, state: TrainState, ranks: Distributed, steps_per_epoch: int, resume: bool
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
        if ranks.is_main and resume:
            with write_errors(f"to {run.path}", "then resume"):
                if run.id is None:  # run.json was lost
                    run.identify(id=checkpoint.run if checkpoint and checkpoint.run else secrets.token_hex(8))
                    store.run = run.id
                if (run.config.epochs, run.config.data.source) != (config.epochs, config.data.source):
                    run.follow(config)
            if checkpoint is None:
                _say(ranks, f"{run.path} has no checkpoint yet: the run begins at step 0.")
            elif checkpoint.info["settings"]["epochs"] < config.epochs:
                before = replace(config, epochs=checkpoint.info["settings"]["epochs"])
                _say(ranks, _more_epochs(before, config, checkpoint.step, steps_per_epoch))
    return store


def check_micro_batch(before: int | str, config: Config) -> None:
    """Refuse to go on with other micro-batches where they change what is learnt."""
    if before != config.micro_batch and has_batch_norm(config):
        raise UserError(
            f"Cannot resume with other settings: micro_batch was {before} and is now {config.micro_batch}, and this "
            f"network's batch norms take their statistics from one micro-batch at a time. Resume without this "
            f"option, or start a new run with another --out."
        )


def _precision_note(config: Config, state: TrainState, ranks: Distributed) -> str | None:
    if state.precision == config.precision or ranks.device.type == "cpu":
        return None
    why = "has no TF32"
    if config.precision != "tf32":
        why = f"cannot scale losses, without which {config.precision} loses small gradients"
    return f"{ranks.device} {why}: this run uses {state.precision}."


def _advice(run: RunFolder, source: str) -> str:
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


def _start_from_weights(state: TrainState, config: Config) -> str:
    """Load `config.model.init` into the method's encoders, student's and teacher's alike; a sentence about it."""
    source, weights = config.model.init, read_weights(config.model.init)
    start_from([part for part in state.method.modules() if isinstance(part, Backbone)], weights, source)
    sentence = f"The encoder starts from the weights of {source}; its head is new."
    here = EvalTransform.for_run(config).to_timm()
    there = here if weights.transform is None else weights.transform.to_timm()
    if (here["mean"], here["std"]) != (there["mean"], there["std"]):
        mean, std = (" ".join(f"{x:g}" for x in values) for values in (there["mean"], there["std"]))
        same = f"--views.mean {mean} --views.std {std}"
        sentence += f" Their images were normalised otherwise; {same} would do the same here."
    return sentence


def _more_epochs(before: Config, now: Config, step: int, steps_per_epoch: int) -> str:
    """What becomes of the schedules when a run is given more epochs in the middle."""
    moved = ["learning rate"]
    if now.optim.weight_decay != now.optim.weight_decay_end:
        moved.append("weight decay")
    moved += [*METHODS[now.method].follows_total, *PAIRS[now.pairs].follows_total]
    rates = [config.learning_rate(step, steps_per_epoch) for config in (now, before)]
    return (
        f"This run had {before.epochs} epochs and now has {now.epochs}: from step {step} on, the schedule of "
        f"{now.epochs} epochs holds for {', '.join(moved)} (the learning rate goes on at {rates[0]:.3g} instead of "
        f"{rates[1]:.3g}). The result is not that of a run which had {now.epochs} epochs from its start."
    )


def _say(ranks: Distributed, *sentences: str | None) -> None:
    """Let the first rank print them, before there is a progress bar."""
    for sentence in sentences:
        if sentence and ranks.is_main:
            terminal.say(sentence)
