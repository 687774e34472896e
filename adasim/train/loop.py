"""Pretraining, top to bottom: Algorithm 1 of the paper as a loop (`Training.train_epoch`), and one training step.

images -> partners -> views -> student, teacher, loss -> neighbour memory -> next epoch's partners

A step, the same for the loop, for micro-batches and for the few steps that are timed:

    step = forward(state, ddp, batch.views)              # loss and features
    learn(state, step.loss, config, steps_per_epoch)     # backward pass, optimiser, teacher

`ddp` is `ranks.wrap(state.method)`: it calls a forward pass, whose gradients are then averaged over ranks.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from adasim.config import Config
from adasim.data import Batch, ImageSet, PairLoader
from adasim.dist.devices import autocast, image_layout
from adasim.dist.processes import ALONE, Distributed, Runner
from adasim.methods import EncodedView, Step
from adasim.models import BACKBONE_FILE, Backbone, EvalTransform, save_backbone
from adasim.models.io import backbone_bytes, snapshot_file
from adasim.neighbors import PairPolicy
from adasim.runs.checkpoint import CheckpointStore, SaveFailed
from adasim.runs.folder import RunFolder
from adasim.runs.metrics import list_unreadable
from adasim.train.report import KnnDuringTraining, Reporter
from adasim.train.state import TrainState, build_policy
from adasim.util import seeding
from adasim.util.collapse import feature_spread
from adasim.util.errors import UserError
from adasim.util.interrupts import Stopped, StopRequests, requeue

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
        self.steps_per_epoch = loader.steps_per_epoch
        self.policy: PairPolicy = build_policy(config, len(images), state.memory, images.labels)
        self.draws_in_step = state.memory is not None and state.memory.timing == "current"
        self.report = Reporter(config, run, images, state, loader.steps_per_epoch, ranks, knn)
        self.stop = StopRequests(self.report.say if ranks.is_main else None)
        self.unreadable = 0  # how many images all ranks know to be so
        self.ddp = ranks.wrap(state.method)
        self.saved_step = state.step or None  # of the newest checkpoint
        self.saved_at = time.monotonic()
        # Agreed on by all ranks in every step, as all that decides what comes next:
        self.stopping = self.save_due = False

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
        with self.report, self.stop:
            asked = self.ranks.all_any
            while state.epoch < config.epochs and not asked(self.stopping or self.stop.requested):
                self.train_epoch()
            if self.saved_step != state.step:  # stopped in mid-epoch, or the last save failed
                self.save()
            if self.saved_step != state.step:
                newest = f"the newest checkpoint is of step {self.saved_step}"
                raise UserError(
                    f"Step {state.step} could not be saved to {self.path}; "
                    f"{newest if self.saved_step else 'there is no checkpoint yet'}. Make room, then: adasim "
                    f"pretrain --resume {self.path}"
                )
            self.end(self.ranks.gather(self.stop.number or 0))

    def train_epoch(self) -> None:
        """Algorithm 1: the rest of the current epoch, or as much of it as a request to stop allows.

        With the timing `previous`, as released, all partners are drawn at the epoch's start, from the epochs before
        it, so that both views are prepared ahead. With `current`, as printed, each is drawn within its step: see
        `forward_and_draw`.
        """
        state, epoch = self.state, self.state.epoch
        partners = None if self.draws_in_step else self.policy.partners(epoch)  # draw
        for batch in self.batches(partners):  # views
            torch.manual_seed(seeding.key(self.config.seed, "step", state.step))  # for stochastic depth
            if self.draws_in_step:
                step, batch = self.forward_and_draw(batch)
            else:
                step = forward(state, self.ddp, batch.views, self.neighbours(batch))  # forward and loss
            loss, changed = self.agree(step.loss, batch)
            finish = self.observe(batch, step)  # observe: look the features up in the cache, then write them
            learn(state, step.loss, self.config, self.steps_per_epoch)  # step
            finish()
            state.count(loss, changed)
            self.report.step(epoch, step, loss)
            if self.on_step is not None:
                self.on_step(state, batch, loss)
            if self.interrupts_epoch():
                return
        self.report.epoch(epoch, step, self.policy, self.loader.quarantined)
        state.end_epoch()  # end of epoch: its lists join the window
        self.save_after_epoch()

    def batches(self, partners: Tensor | None) -> Iterator[Batch]:
        """What is left of the epoch. Partners that are met in latent space are named and not shown."""
        epoch, start = self.state.epoch, self.state.step_in_epoch
        made = self.loader.epoch(epoch, partners, start, show_partners=not self.policy.latent)
        while (batch := self.wait(lambda: next(made, None))) is not None:
            yield batch

    def wait(self, data: Callable[[], T]) -> T:
        """What `data` returns; the seconds that it takes are counted as waiting."""
        start = time.perf_counter()
        result = data()
        self.report.waited += time.perf_counter() - start
        return result

    def forward_and_draw(self, batch: Batch) -> tuple[Step, Batch]:
        """A step of Algorithm 1 as printed, up to its loss, and the batch with its partners.

        An image is observed first, and its partner drawn right after that, from a window that includes this epoch.
        """
        method, memory, epoch = self.state.method, self.state.memory, self.state.epoch
        assert memory is not None

        def forward_pass() -> tuple[Step, Batch]:
            first = method.encode(in_layout(batch.views[0]))
            memory.observe(batch.ids, first.feature)  # observe
            partners = self.policy.partners(epoch, batch.ids.cpu())  # draw
            shown = batch.ids if self.policy.latent else partners
            pending = self.loader.fetch(epoch, batch.ids, shown)  # view 2, made while the student is busy
            local = [EncodedView(in_layout(view)) for view in batch.views[1:]]
            for view in (first, *local):
                method.predict(view)
            second = method.encode(in_layout(self.wait(pending)))
            method.predict(second)
            drawn = batch._replace(partners=partners.to(batch.ids.device))
            if (neighbours := self.neighbours(drawn)) is not None:
                method.aim_at(neighbours, [first, second])
            return method.loss([first, second, *local], epoch), drawn  # loss

        with autocast(self.state.precision, self.ranks.device):
            return self.ddp(forward_pass)

    def neighbours(self, batch: Batch) -> Tensor | None:
        """The cached features of the partners, if these are met in latent space; zeros where an image is its own."""
        memory = self.state.memory
        if not self.policy.latent or memory is None or memory.epochs == 0:
            return None
        others = (batch.partners != batch.ids)[:, None]
        return memory.features(batch.partners).to(others.device) * others

    def observe(self, batch: Batch, step: Step) -> Callable[[], object]:
        """Send the features to the neighbour memory while the backward pass runs; call the result to finish."""
        memory = self.state.memory
        if memory is None or self.draws_in_step:  # then `forward_and_draw` has observed them
            return lambda: None
        return memory.observe_async(batch.ids, step.observed(self.config.neighbors.view))

    def agree(self, loss: Tensor, batch: Batch) -> tuple[float, int]:
        """What the ranks decide together after a forward pass, before anything learns from it.

        Returns the batch's loss and how many of its pairs join two images. Sets `stopping` and `save_due`.

        Raises:
            NonFiniteLossError: the loss of some rank is not a number; on all ranks.
            UserError: all ranks together have met too many unreadable images; on all ranks.
        """
        mine = float(loss.detach())
        overdue = time.monotonic() - self.saved_at >= 60 * self.config.save.every_minutes
        asked = self.stop.take_save()
        if asked:
            self.report.say("SIGUSR1: saving after this step.")
        mean, stopping, save_due, changed, unread = self.ranks.all_mean(
            mine,
            self.stop.requested,
            asked or (overdue and self.ranks.is_main),
            float((batch.partners != batch.ids).sum()),
            len(self.loader.quarantined) - self.unreadable,
        )
        if not math.isfinite(mean):
            with self.ranks.raise_on_all():
                if not math.isfinite(mine):
                    names = ", ".join(self.images.where(i) for i in batch.ids[:5].tolist())
                    raise NonFiniteLossError(
                        f"The loss is {mine} at step {self.state.step} (epoch {self.state.epoch + 1}); nothing was "
                        f"learnt from it. Its batch begins with {names}. Look at these images, or start again with "
                        f"a lower --optim.lr; the last checkpoint in {self.path} is good."
                    )
        if unread:  # all get to know the images that any could not read: together they may be too many
            everyones = self.ranks.gather(self.loader.quarantined)
            with self.ranks.raise_on_all():
                for unreadable in everyones:
                    self.loader.quarantine(unreadable)
            self.unreadable = len(self.loader.quarantined)
        self.stopping, self.save_due = stopping > 0, save_due > 0
        return mean, round(changed * self.ranks.world)

    def interrupts_epoch(self) -> bool:
        """Whether to stop in mid-epoch; saves there, too, if a save is due. Both can wait for the epoch's end."""
        if self.state.step_in_epoch == self.steps_per_epoch:
            return False
        if self.save_due and not self.stopping:
            self.save()
        return self.stopping

    def save_after_epoch(self) -> None:
        saves, epoch = self.config.save, self.state.epoch
        snapshot, at_epoch = (n > 0 and epoch % n == 0 for n in (saves.encoder_every, saves.every_epochs))
        if self.save_due or self.stopping or epoch == self.config.epochs or snapshot or at_epoch:
            self.save(snapshot)

    def save(self, snapshot: bool = False) -> None:
        """Export and checkpoint. A full disk does not stop training: the next occasion tries again.

        The checkpoint comes last: once it is there, so is everything else up to its step. A `snapshot` of the encoder
        is written now, or lost.

        Raises:
            UserError: the folder is no longer this run's; on all ranks.
        """
        self.saved_at = time.monotonic()
        with self.ranks.raise_on_all():
            if self.ranks.is_main:
                self.run_folder.check_ours()
        if snapshot and self.ranks.is_main:
            self.save_snapshot()
        try:
            with self.store.saving("metrics and encoder"):
                self.report.sync()
                if self.ranks.is_main:
                    list_unreadable(self.path, self.images, self.loader.quarantined)
                    save_backbone(self.path / BACKBONE_FILE, *self.encoder())
            self.state.save(self.store)
            self.saved_step = self.state.step
            if self.ranks.is_main and not self.run_folder.has_saved:
                with suppress(OSError):  # then after the next one
                    self.run_folder.identify(saved=True)
        except SaveFailed as problem:
            self.report.say(f"Step {self.state.step} is not saved yet: {problem}")

    def save_snapshot(self) -> None:
        file = snapshot_file(self.path, self.state.epoch)
        try:
            file.parent.mkdir(exist_ok=True)
            save_backbone(file, *self.encoder())
        except OSError as error:
            self.report.say(f"{file} could not be written and is lost: {error.strerror or error}.")

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

    def encoder(self) -> tuple[Backbone, EvalTransform]:
        """What the run is for, and the view that it expects."""
        return self.state.method.eval_encoder, EvalTransform.for_run(self.config)

    def list_unreadable(self) -> None:
        """Write RUN/unreadable.csv, however the run ends: also when too many images were unreadable."""
        if self.ranks.is_main:
            with suppress(OSError, UserError):  # UserError: the folder is no longer this run's
                self.run_folder.check_ours()
                list_unreadable(self.path, self.images, self.loader.quarantined)

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
        raise Stopped(max(signals), shared=True)


def forward(state: TrainState, ddp: Runner, views: list[Tensor], neighbours: Tensor | None = None) -> Step:
    """Forward pass and loss of a batch, in one piece or in micro-batches; torch's generators are seeded for the step.

    Micro-batches let a recipe's batch fit on any device: their gradients add up. All but the last have their backward
    passes here, too. Without batch norm, loss, gradients and features are those of the whole batch, up to the order
    of sums: stochastic depth is drawn for the batch, DINO's centre is the mean over all of it. Batch norm takes its
    statistics from one micro-batch at a time, so there a split changes what is learnt.

    `neighbours` is for `Method.aim_at`.
    """
    method, part, seed = state.method, state.part, torch.initial_seed()
    count = len(views[0]) // part.images  # of micro-batches
    first = part.index // count * count  # of this process's, among all processes'
    steps: list[Step] = []
    for number in range(count):
        last = number == count - 1
        part.index, method.continues_step = first + number, number > 0
        rows = slice(number * part.images, (number + 1) * part.images)
        if number:
            torch.manual_seed(seed)  # each micro-batch draws stochastic depth for all, and takes its own
        with nullcontext() if last else ddp.no_sync():
            pixels = [in_layout(view[rows]) for view in views]
            more = {} if neighbours is None else {"neighbours": neighbours[rows]}
            with autocast(state.precision, pixels[0].device):
                step = ddp(partial(method, pixels, state.epoch, **more))
            if not last:
                state.scaler.scale(step.loss / count).backward()
                step.loss = step.loss.detach()
        steps.append(step)
    method.continues_step = False
    return step if count == 1 else _joined(steps)


def _joined(steps: list[Step]) -> Step:
    """The step of all micro-batches; of their mean loss, the last one's share has yet to be learnt from."""
    feature = torch.cat([step.feature for step in steps])
    names = steps[0].diagnostics
    diagnostics = {name: torch.stack([step.diagnostics[name] for step in steps]).mean() for name in names}
    if "feature_spread" in diagnostics:
        diagnostics["feature_spread"] = feature_spread(feature)
    seconds = [step.second for step in steps if step.second is not None]
    second = torch.cat(seconds) if seconds else None
    return Step(torch.stack([step.loss for step in steps]).mean(), feature, diagnostics, second)


def learn(state: TrainState, loss: Tensor, config: Config, steps_per_epoch: int) -> None:
    """Backward pass, one step of the optimiser, and of what moves without a gradient."""
    set_schedules(state.optimizer, config, state.step, steps_per_epoch)
    state.scaler.scale(loss).backward()
    state.method.before_optimizer(state.epoch)
    if config.optim.clip_grad:
        state.scaler.unscale_(state.optimizer)
        clip_per_tensor(state.method.parameters(), config.optim.clip_grad)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    state.method.after_step(state.step, config.epochs * steps_per_epoch)


def set_schedules(optimizer: torch.optim.Optimizer, config: Config, step: int, steps_per_epoch: int) -> None:
    """Write this step's learning rate and weight decay into the groups.

    A group with `fixed_lr` keeps the peak rate (SimSiam's predictor); one without `decay` is not decayed. The
    encoder's may have a rate of its own, and none at all in the first epochs.
    """
    optim = config.optim
    share = optim.encoder_lr if step >= optim.head_epochs * steps_per_epoch else 0.0
    lr = config.learning_rate(step, steps_per_epoch)
    decay = config.weight_decay(step, steps_per_epoch)
    for group in optimizer.param_groups:
        group["lr"] = config.peak_learning_rate if group["fixed_lr"] else lr
        if group.get("encoder"):
            group["lr"] *= share
        group["weight_decay"] = decay if group["decay"] else 0.0


@torch.no_grad()
def clip_per_tensor(params: Iterable[Tensor], max_norm: float) -> None:
    """Scale each gradient by max_norm / (norm + 1e-6) where that is below 1: per tensor, never globally."""
    grads = [p.grad for p in params if p.grad is not None]
    factors = [(max_norm / (norm + 1e-6)).clamp(max=1.0) for norm in torch._foreach_norm(grads)]
    torch._foreach_mul_(grads, factors)


def in_layout(view: Tensor) -> Tensor:
    """The same pixels, laid out as convolutions like them."""
    return view.contiguous(memory_format=image_layout(view.device))
