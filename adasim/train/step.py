"""One training step, the same for the training loop, for micro-batches, and for the few steps that are timed.

    step = forward(state, ddp, batch.views)              # loss and features
    learn(state, step.loss, config, steps_per_epoch)     # backward pass, optimiser, teacher

`ddp` is `ranks.wrap(state.method)`: it calls a forward pass, whose gradients are then averaged over ranks.

**Micro-batches** let a recipe's batch fit on any device: their gradients add up. For a network without batch norm
the loss, its gradients and the features are those of the whole batch, up to the order of sums: stochastic depth is
drawn for the batch, DINO's centre is the mean over all of it. Batch norm takes its statistics from one micro-batch at
a time, so there a split changes what is learnt.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from adasim.config import Config
from adasim.dist.devices import autocast, image_layout
from adasim.dist.processes import Runner
from adasim.methods import Step
from adasim.train.state import TrainState
from adasim.util.collapse import feature_spread


def forward(state: TrainState, ddp: Runner, views: list[Tensor], neighbours: Tensor | None = None) -> Step:
    """Forward pass and loss of a batch, in one piece or in micro-batches; torch's generators are seeded for the step.

    Of several micro-batches, all but the last have their backward passes here, too. `neighbours` is for
    `Method.aim_at`.
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


def in_layout(view: Tensor) -> Tensor:
    """The same pixels, laid out as convolutions like them."""
    return view.contiguous(memory_format=image_layout(view.device))


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
    if max_norm <= 0 or not grads:
        return
    factors = [(max_norm / (norm + 1e-6)).clamp(max=1.0) for norm in torch._foreach_norm(grads)]
    torch._foreach_mul_(grads, factors)


def _joined(steps: list[Step]) -> Step:
    """The step of all micro-batches; of their mean loss, the last one's share has yet to be learnt from."""
    feature = torch.cat([step.feature for step in steps])
    diagnostics = {
        name: torch.stack([step.diagnostics[name] for step in steps]).mean() for name in steps[0].diagnostics
    }
    if "feature_spread" in diagnostics:
        diagnostics["feature_spread"] = feature_spread(feature)
    seconds = [step.second for step in steps if step.second is not None]
    second = torch.cat(seconds) if seconds else None
    return Step(torch.stack([step.loss for step in steps]).mean(), feature, diagnostics, second)
