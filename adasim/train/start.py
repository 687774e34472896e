"""What a run says and settles before its first step: its images, how long it is now, how much disk it will take."""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
import shutil
import socket
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn

from adasim.config import Config
from adasim.data import FolderImages, ImageSet, ImagesLike, as_images, open_images
from adasim.data.sources.handed import AGAIN, was_handed_over
from adasim.data.sources.listing import Listing
from adasim.data.sources.opening import is_folder
from adasim.data.sources.scan import refresh
from adasim.dist.processes import Distributed
from adasim.models import BACKBONE_FILE, Backbone, EvalTransform, read_weights, start_from
from adasim.registry import METHODS, PAIRS
from adasim.runs.checkpoint import Checkpoint
from adasim.runs.folder import RunFolder
from adasim.schedules import learning_rate
from adasim.train.state import TrainState
from adasim.util.errors import UserError
from adasim.util.units import scaled


def open_data(
    data: ImagesLike | None,
    config: Config,
    ranks: Distributed,
    known: Callable[[str], Listing | None] | None = None,
) -> ImageSet:
    """The images of a run, the same on all ranks, or a `UserError` on all. One rank lists a folder for all.

    Args:
        data: the images, if they are not to be opened by `config.data.source`.
        config: the configuration.
        ranks: all of them call this together.
        known: for the first rank, what is known of a folder from before; see `open_images`.
    """
    given = config.data.source if data is None else data

    def opened(known: Callable[[str], Listing | None] | None) -> ImageSet:
        try:
            if isinstance(given, str):
                return open_images(given, size=config.views.size, known=known)
            return as_images(given)
        except UserError as error:
            raise (error if ranks.is_main else _elsewhere(error, ranks)) from None

    waits = not ranks.is_main and isinstance(given, str) and is_folder(given)
    images = ranks.run_with_heartbeat(None if waits else lambda: opened(known))
    listing = ranks.share(images.files if isinstance(images, FolderImages) else None)
    with ranks.raise_on_all():
        if images is None:
            images = opened(None if listing is None else lambda folder: listing)
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


def known_listing(out: Path, folder: str) -> Listing | None:
    """What is in a folder, by what the run in `out` has kept of it; None where that cannot be trusted any more."""
    try:
        before = RunFolder.open(out, lock=False).listing()
    except UserError:  # to be said when the run is opened
        return None
    return None if before is None else refresh(before, os.fsencode(folder))


def follow(run: RunFolder, config: Config, checkpoint: Checkpoint | None, steps_per_epoch: int) -> list[str]:
    """Let the run folder follow what the resumed run goes on with; sentences about it. For the first rank."""
    notes: list[str] = []
    try:
        if run.id is None:  # run.json was lost
            run.identify(id=checkpoint.run if checkpoint and checkpoint.run else secrets.token_hex(8))
        if (run.config.epochs, run.config.data.source) != (config.epochs, config.data.source):
            run.follow(config)
    except OSError as error:
        raise UserError(f"Cannot write to {run.path}: {error.strerror}. Make room, then resume.") from error
    if checkpoint is None and run.resumed:
        notes.append(f"{run.path} has no checkpoint yet: the run begins at step 0.")
    if checkpoint is not None and checkpoint.info["settings"]["epochs"] < config.epochs:
        before = replace(config, epochs=checkpoint.info["settings"]["epochs"])
        notes.append(longer(before, config, checkpoint.step, steps_per_epoch))
    return notes


def remedy(run: RunFolder, source: str) -> str:
    """What to do when the images in `source` are not those that the run began with."""
    if was_handed_over(run.config.data.source):
        return AGAIN
    words = "Restore the data set as it was"
    if (run.path / BACKBONE_FILE).is_file():
        recipe = "RECIPE" if run.config.recipe == "custom" else run.config.recipe
        words += (
            f", or start a new run from the weights of this one (adasim pretrain {recipe} --data "
            f"{shlex.quote(source)} --model.init {shlex.quote(str(run.path))} --out NEW-RUN)"
        )
    return words


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


def longer(before: Config, now: Config, step: int, steps_per_epoch: int) -> str:
    """What becomes of the schedules when a run is given more epochs in the middle."""
    moved = ["learning rate"]
    if now.optim.weight_decay != now.optim.weight_decay_end:
        moved.append("weight decay")
    moved += [*METHODS[now.method].follows_total, *PAIRS[now.pairs].follows_total]
    names = " and ".join([", ".join(moved[:-1]), moved[-1]] if moved[1:] else moved)
    follow = "follow" if moved[1:] else "follows"
    rates = [learning_rate(config, step, steps_per_epoch) for config in (now, before)]
    return (
        f"This run had {before.epochs} epochs and now has {now.epochs}: from step {step} on, {names} {follow} the "
        f"schedule of {now.epochs} epochs (the learning rate goes on at {rates[0]:.3g} instead of {rates[1]:.3g}). "
        f"The result is not that of a run which had {now.epochs} epochs from its start."
    )


def disk_needed(state: TrainState, keep: int, path: Path, ranks: Distributed) -> str:
    """How much disk the run will take, in a sentence. All ranks ask together.

    Raises:
        UserError: not even one checkpoint fits; on all ranks.
    """
    one, history = state.bytes_on_disk(ranks, keep)
    total = keep * one + history
    lists = f", plus neighbour lists of {scaled(history, 'B')}" if history else ""
    sentence = (
        f"Checkpoints: {scaled(one, 'B')} each, {keep} kept{lists}: about {scaled(total, 'B')} in {path}."
    )
    there = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
    size, _, free = shutil.disk_usage(there)
    told = size > 0  # some network and FUSE mounts do not say
    # What an earlier process of the run has written does not count twice; nor does a run that is to be overwritten.
    written = sum(map(_size, path.rglob("*")))
    with ranks.raise_on_all():
        # This run's own checkpoints make no room: they are deleted after the next one is written.
        if ranks.is_main and told and one > free + (0 if state.step else written):
            otherwise = ", then resume" if state.step else ", or choose another --out"
            raise UserError(
                f"Only {scaled(free, 'B')} are free in {there}, and one checkpoint takes {scaled(one, 'B')}: nothing "
                f"could be saved. Make room there{otherwise}."
            )
    # One more checkpoint while a save is under way.
    needed = total + one - written
    return sentence if needed <= free or not told else f"{sentence} Only {scaled(free, 'B')} are free there."


def _size(file: Path) -> int:
    """Bytes of a regular file; 0 for what is none, or is gone by now."""
    try:
        status = file.lstat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
