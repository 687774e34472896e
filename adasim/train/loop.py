"""Pretraining, top to bottom: Algorithm 1 of the paper as a loop.

images -> partners -> views -> student, teacher, loss -> neighbour memory -> next epoch's partners
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from adasim.config import Config
from adasim.data import Batch, ImageSet, PairLoader
from adasim.dist.devices import autocast
from adasim.dist.processes import ALONE, Distributed
from adasim.methods import EncodedView, Step
from adasim.models import BACKBONE_FILE, Backbone, EvalTransform, save_backbone
from adasim.models.io import backbone_bytes, snapshot_file
from adasim.neighbors import PairPolicy
from adasim.runs.checkpoint import CheckpointStore, SaveFailed
from adasim.runs.folder import RunFolder
from adasim.runs.metrics import UnreadableList
from adasim.train.budget import out_of_memory_in_words
from adasim.train.report import KnnDuringTraining, Reporter
from adasim.train.signals import StopRequests, requeue, stopped
from adasim.train.state import TrainState, build_policy
from adasim.train.step import forward, in_layout, learn
from adasim.util import seeding
from adasim.util.errors import UserError
from adasim.util.files import atomic_write

T = TypeVar("T")
OnStep = Callable[[TrainState, Batch, float], object]
"""Called after each training step with the run's state, the batch (ids, partners, views) and its loss."""


class NonFiniteLossError(UserError):
    """The loss is NaN or infinite: raised before optimiser, teacher and centre move, and nothing is saved."""


class Training:
    """One run, seen from one of its processes: the state, what feeds it, and what watches it."""

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        images: ImageSet,
        loader: PairLoader,
        state: TrainState,
        store: CheckpointStore,
        ranks: Distributed = ALONE,
        knn: KnnDuringTraining | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self.config, self.path, self.images, self.loader, self.state = config, run.path, images, loader, state
        self.run_folder, self.store, self.ranks, self.on_step = run, store, ranks, on_step
        self.stopping = False  # agreed on by all ranks, as everything is that decides what comes next
        self.steps_per_epoch = loader.steps_per_epoch
        self.policy: PairPolicy = build_policy(config, len(images), state.memory, images.labels)
        self.report = Reporter(config, run, images, state, loader.steps_per_epoch, ranks, knn)
        self.unreadable = 0  # images that all ranks know to be so
        self.unreadable_list = UnreadableList(run.path, images)
        self.ddp = ranks.wrap(state.method)
        self.waited = 0.0  # seconds that this step has waited for data
        self.saved_step = state.step or None  # of the newest checkpoint
        self.saved_at = time.monotonic()
        self.snapshots: dict[int, bytes] = {}  # epoch -> its encoder's file, until that is written

    def run(self) -> None:
        """Train to the last epoch, or to a request to stop.

        Raises:
            Stopped: a signal or a closed standard output asked to stop; everything is saved. On all ranks.
        """
        config, state = self.config, self.state
        if state.epoch >= config.epochs and self.saved_step == state.step:
            self.mend_encoder()
            self.report.say(f"{self.path} is complete: nothing is left of its {config.epochs} epochs.")
            return
        with self.report, StopRequests(self.report.say if self.ranks.is_main else None) as stop:
            while state.epoch < config.epochs and not self.ranks.all_any(self.stopping or stop.requested):
                with out_of_memory_in_words(config, state):
                    self.train_epoch(stop)
            if self.saved_step != state.step:  # stopped in mid-epoch, or the last save failed
                self.save()
            if self.saved_step != state.step:
                newest = f"the newest checkpoint is of step {self.saved_step}"
                if self.saved_step is None:
                    newest = "there is no checkpoint yet"
                raise UserError(
                    f"Step {state.step} could not be saved to {self.path}; {newest}. Make room, then: adasim "
                    f"pretrain --resume {self.path}"
                )
            self.end(self.ranks.gather(stop.number or 0))

    def end(self, signals: list[int]) -> None:
        """Say why the run ends before its last epoch, if it does; `signals`: each rank's reason to stop, or 0."""
        complete = self.state.epoch >= self.config.epochs
        if not any(signals) or (complete and max(signals) == signal.SIGUSR1):
            return
        more = "the run is complete." if complete else f"Continue with: adasim pretrain --resume {self.path}"
        self.report.say(f"Stopped after step {self.state.step}. {more}")
        if signal.SIGUSR1 in signals and not complete:
            if self.ranks.is_main:
                self.report.say(requeue())
            self.ranks.barrier()  # a launcher may kill the first rank once another has ended
        raise stopped(max(signals))

    def train_epoch(self, stop: StopRequests) -> None:
        """Algorithm 1: the rest of the current epoch, or as much of it as a request to stop allows.

        With the timing `previous`, as released, all partners are drawn at the epoch's start, from the epochs before
        it, so that both views are prepared ahead. With `current`, as printed, each is drawn within its step: see
        `forward_and_draw`.
        """
        state, memory, epoch = self.state, self.state.memory, self.state.epoch
        current = memory is not None and memory.timing == "current"
        partners = None if current else self.policy.partners(epoch)  # draw
        latent = self.policy.latent and not current
        shown = torch.arange(len(self.images)) if latent else partners
        batches = self.loader.epoch(epoch, shown, state.step_in_epoch)  # views
        while (batch := self.wait(lambda: next(batches, None))) is not None:
            if latent and partners is not None:
                batch = batch._replace(partners=partners[batch.ids.cpu()].to(batch.ids.device))
            torch.manual_seed(seeding.key(self.config.seed, "step", state.step))  # for stochastic depth
            if current:
                with autocast(state.precision, self.ranks.device):
                    step, batch = self.ddp(partial(self.forward_and_draw, batch, epoch))
            else:
                step = forward(state, self.ddp, batch.views, self.neighbours(batch))  # forward and loss
            loss, changed, save_due = self.agree(step.loss, batch, stop)
            observing = None
            if memory is not None and not current:
                # observe: the features travel during the backward pass, ...
                observing = memory.observe_async(batch.ids, step.observed(self.config.neighbors.view))
            learn(state, step.loss, self.config, self.steps_per_epoch)  # step
            if observing is not None:
                observing()  # ... are looked up in the cache, and then written into it
            state.count(loss, changed)
            self.report.step(epoch, step, loss, self.waited)
            self.waited = 0.0
            if self.on_step is not None:
                self.on_step(state, batch, loss)
            if state.step_in_epoch < self.steps_per_epoch:
                if self.stopping:
                    return
                if save_due:
                    self.save()
        self.report.epoch(epoch, step, self.policy, self.loader.quarantined)
        state.end_epoch()  # end of epoch: its lists join the window
        saves = self.config.save
        last = state.epoch == self.config.epochs
        snapshot = saves.encoder_every and state.epoch % saves.encoder_every == 0
        if snapshot and self.ranks.is_main:
            self.snapshots[state.epoch] = backbone_bytes(*self.encoder())
        at_epoch = saves.every_epochs and state.epoch % saves.every_epochs == 0
        if save_due or self.stopping or last or snapshot or at_epoch:
            self.save()

    def forward_and_draw(self, batch: Batch, epoch: int) -> tuple[Step, Batch]:
        """A step of Algorithm 1 as printed, up to its loss, and the batch with its partners.

        An image is observed first, and its partner drawn right after that, from a window that includes this epoch.
        """
        method, memory = self.state.method, self.state.memory
        assert memory is not None
        first = method.encode(in_layout(batch.views[0]))
        memory.observe(batch.ids, first.feature)  # observe
        partners = self.policy.partners(epoch, batch.ids.cpu())  # draw
        shown = batch.ids if self.policy.latent else partners
        batch = batch._replace(partners=partners.to(batch.ids.device))
        pending = self.loader.fetch(epoch, batch.ids, shown)  # view 2, made while the student is busy
        local = [EncodedView(in_layout(view)) for view in batch.views[1:]]
        for view in (first, *local):
            method.predict(view)
        second = method.encode(in_layout(self.wait(pending)))
        method.predict(second)
        if (neighbours := self.neighbours(batch)) is not None:
            method.aim_at(neighbours, [first, second])
        return method.loss([first, second, *local], epoch), batch  # loss

    def neighbours(self, batch: Batch) -> Tensor | None:
        """The cached features of the partners, if these are met in latent space; zeros where an image is its own."""
        memory = self.state.memory
        if not self.policy.latent or memory is None or memory.epochs == 0:
            return None
        others = (batch.partners != batch.ids)[:, None]
        return memory.features(batch.partners).to(others.device) * others

    def wait(self, data: Callable[[], T]) -> T:
        """What `data` returns; the seconds that it takes are counted as waiting."""
        start = time.perf_counter()
        result = data()
        self.waited += time.perf_counter() - start
        return result

    def agree(self, loss: Tensor, batch: Batch, stop: StopRequests) -> tuple[float, int, bool]:
        """What the ranks decide together after a forward pass, before anything learns from it.

        Returns the batch's loss, how many of its pairs joined two images, and whether to save. Sets `stopping`.

        Raises:
            NonFiniteLossError: the loss of some rank is not a number; on all ranks.
            UserError: all ranks together have met too many unreadable images; on all ranks.
        """
        mine = float(loss.detach())
        overdue = time.monotonic() - self.saved_at >= 60 * self.config.save.every_minutes
        asked = stop.take_save()
        if asked:
            self.report.say("SIGUSR1: saving after this step.")
        mean, stopping, save_due, changed, unread = self.ranks.all_mean(
            mine,
            stop.requested,
            asked or (overdue and self.ranks.is_main),
            float((batch.partners != batch.ids).sum()),
            len(self.loader.quarantined) - self.unreadable,
        )
        if not math.isfinite(mean):
            with self.ranks.raise_on_all():
                if not math.isfinite(mine):
                    self.refuse(mine, batch)
        if unread:
            self.share_unreadable()
        self.stopping = stopping > 0
        return mean, round(changed * self.ranks.world), save_due > 0

    def share_unreadable(self) -> None:
        """Let every rank know of the images that any could not read; together they may be too many."""
        everyones = self.ranks.gather(self.loader.quarantined)
        with self.ranks.raise_on_all():
            for unreadable in everyones:
                self.loader.quarantine(unreadable)
        self.unreadable = len(self.loader.quarantined)

    def list_unreadable(self) -> None:
        """Write RUN/unreadable.csv, however the run ends: also when too many images were unreadable."""
        if self.ranks.is_main:
            # UserError: the folder is no longer this run's.
            with suppress(OSError, UserError):
                self.run_folder.check_ours()
                self.unreadable_list.update(self.loader.quarantined)

    def refuse(self, loss: float, batch: Batch) -> None:
        names = [self.images.where(i) for i in batch.ids[:5].tolist()]
        raise NonFiniteLossError(
            f"The loss is {loss} at step {self.state.step} (epoch {self.state.epoch + 1}); nothing "
            f"was learnt from it. Its batch begins with {', '.join(names)}. Look at these images, or start "
            f"again with a lower --optim.lr; the last checkpoint in {self.path} is good."
        )

    def save(self) -> None:
        """Export and checkpoint. A full disk does not stop training: the next occasion tries again.

        The checkpoint comes last: once it is there, so is everything else up to its step.

        Raises:
            UserError: the folder is no longer this run's; on all ranks.
        """
        self.saved_at = time.monotonic()
        with self.ranks.raise_on_all():
            if self.ranks.is_main:
                self.run_folder.check_ours()
        try:
            with self.store.saving("metrics and encoder"):
                self.report.sync()
                if self.ranks.is_main:
                    self.unreadable_list.update(self.loader.quarantined)
                    save_backbone(self.path / BACKBONE_FILE, *self.encoder())
                    self.write_snapshots()
            self.state.save(self.store)
            self.saved_step = self.state.step
            if self.ranks.is_main and not self.run_folder.has_saved:
                with suppress(OSError):  # then after the next one
                    self.run_folder.identify(saved=True)
        except SaveFailed as problem:
            self.report.say(f"Step {self.state.step} is not saved yet: {problem}")

    def write_snapshots(self) -> None:
        for epoch in list(self.snapshots):
            file = snapshot_file(self.path, epoch)
            file.parent.mkdir(exist_ok=True)
            atomic_write(file, self.snapshots[epoch])
            del self.snapshots[epoch]

    def encoder(self) -> tuple[Backbone, EvalTransform]:
        """What the run is for, and the view that it expects."""
        return self.state.method.eval_encoder, EvalTransform.for_run(self.config)

    def mend_encoder(self) -> None:
        """Write a complete run's encoder again where its file is not what the run would write.

        Raises:
            SaveFailed: it cannot be written; on all ranks.
        """
        file = self.path / BACKBONE_FILE
        with self.store.saving("the encoder"):
            whole = file.is_file() and file.read_bytes() == backbone_bytes(*self.encoder())
            if self.ranks.is_main and not whole:
                problem = "damaged, or of an earlier version" if file.exists() else "missing"
                save_backbone(file, *self.encoder())
                self.report.say(
                    f"{file} was {problem}: it is written again, from the checkpoint of step {self.state.step}."
                )
