"""Everything that a training run changes, how it is built, and how it becomes a checkpoint and back.

What is not here has no state: schedules, order of images, partners, augmentations and stochastic depth are
pure functions of the counters below.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from adasim.config import Config
from adasim.data import ImageSet, PairLoader, worker_count
from adasim.dist.collectives import Part
from adasim.dist.devices import image_layout, working_precision
from adasim.dist.processes import ALONE, Distributed
from adasim.methods import Method, build_method
from adasim.models import Backbone
from adasim.models.io import hash_tensors
from adasim.neighbors import NeighborMemory, PairContext, PairPolicy, ShardedMemory
from adasim.registry import PAIRS
from adasim.runs.checkpoint import Checkpoint, CheckpointStore, load_optimizer, optimizer_tensors
from adasim.runs.folder import changed_settings, decisive
from adasim.util.errors import UserError

_WATCHED = 2048  # images whose features the collapse watch looks at
_COUNTERS = ("step", "epoch", "step_in_epoch", "loss_sum", "partners_changed")  # of `TrainState`


@dataclass
class TrainState:
    """The method, its optimiser, the neighbour memory and where the run stands."""

    method: Method
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    memory: ShardedMemory | None
    """None for the policies that need no neighbours, unless they are to be watched."""
    settings: dict[str, Any]
    """What shapes the run (see `decisive`); every checkpoint says with which it was reached."""
    recent: deque[Tensor]
    """Features of this process's last images, a batch each (B, D), for the collapse watch."""
    precision: str = "fp32"
    """Of the forward pass: what was asked for where the device has it, else fp32."""
    part: Part = field(default_factory=lambda: ALONE.part(1))
    """Which micro-batch of the batch the networks see; the loop counts it up."""
    step: int = 0
    """Optimiser steps done."""
    epoch: int = 0
    """Epochs finished."""
    step_in_epoch: int = 0
    """Steps done of the epoch in progress."""
    loss_sum: float = 0.0
    """Sum of this epoch's losses."""
    partners_changed: int = 0
    """How many of this epoch's pairs joined two different images."""
    history: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    """Epoch -> (first image, file name) of its immutable files of top-K lists, one per rank that saved it."""

    def save(self, store: CheckpointStore) -> None:
        """Write a checkpoint: rank 0 what all share, each rank its rows of the memory.

        A finished epoch's lists are written once, then only named, unless their file was damaged meanwhile.
        """
        if self.memory is not None:
            window = range(max(0, self.epoch - self.memory.window), self.epoch)
            damaged = store.damaged(name for parts in self.history.values() for _, name in parts)
            for e in {*self.history} - {*window}:
                del self.history[e]
            for e in window:
                if e not in self.history or damaged & {name for _, name in self.history[e]}:
                    name = store.write_history(e, self.memory.epoch_lists(e))
                    self.history[e] = store.ranks.gather((self.memory.rows.start, name))
        tensors: dict[str, dict[str, Tensor]] = {}
        if store.ranks.is_main:
            watched = {f"{i:04d}": features for i, features in enumerate(self.recent)}
            tensors = {**self._shared_tensors(), "recent": watched}
        info = {
            "settings": self.settings,
            **{name: getattr(self, name) for name in _COUNTERS},
            "scaler": self.scaler.state_dict(),
            "history": [[epoch, parts] for epoch, parts in self.history.items()],
        }
        if self.part.count > store.ranks.world:
            info["micro_batch"] = self.part.images
        if self.memory is not None:
            group = f"memory-{store.ranks.rank:05d}"
            state = self.memory.state_dict().items()
            tensors[group] = {k: v for k, v in state if not k.startswith("history")}
            info["memory"] = store.ranks.gather((self.memory.rows.start, group))
        store.save(self.step, tensors, info, [name for parts in self.history.values() for _, name in parts])

    def _shared_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Those that are the same on all ranks."""
        return {"method": self.method.state_dict(), "optimizer": optimizer_tensors(self.optimizer)}

    def load(self, checkpoint: Checkpoint, world: int = 1) -> None:
        """Take over a checkpoint of a run with the same settings, saved by any number of ranks, on `world` ranks.

        Raises:
            UserError: it was reached with other settings, or batch norms would see other numbers of images at once.
        """
        info = checkpoint.info
        if changed := changed_settings(info["settings"], self.settings):
            raise UserError(
                f"Cannot go on from {checkpoint.path} with other settings: {changed}. Has config.json been edited? "
                f"Put the old values back, or start a new run with another --out."
            )
        self.method.load_state_dict(checkpoint.tensors("method"))
        load_optimizer(self.optimizer, checkpoint.tensors("optimizer"))
        if info["scaler"]:  # empty where nothing was scaled, as on a CPU: then it starts with torch's default
            self.scaler.load_state_dict(info["scaler"])
        for name in _COUNTERS:
            setattr(self, name, info[name])
        self.history = {epoch: [(first, name) for first, name in parts] for epoch, parts in info["history"]}
        device = next(self.method.parameters()).device
        recent = sorted(checkpoint.tensors("recent").items())
        self.recent.extend(features.to(device) for _, features in recent)
        # Micro-batches that were chosen by memory stay as large as they were, so as to reach the same bits.
        share = len(self.recent[-1]) if self.recent else 0  # of the ranks that saved
        size = info.get("micro_batch", share)
        if self.settings["micro_batch"] != "auto":
            self._check_batch_norm(size, share, world)
        elif size < share:
            self.part.cut(self.part.images // size)
        if self.memory is not None:
            load_memory(self.memory, checkpoint)

    def _check_batch_norm(self, size: int, share: int, world: int) -> None:
        """Refuse to go on from micro-batches of `size` of ranks with `share` images each, if batch norm would notice.

        Over ranks it takes its statistics from one micro-batch of each of them.
        """
        if not share or not batch_norms(self.method):
            return
        before = self.settings["batch_size"] // share
        if size * before != self.part.images * world:
            raise UserError(
                f"Cannot go on with {world} {'process' if world == 1 else 'processes'}: with --micro-batch "
                f"{self.part.images} the batch norms of this network would take their statistics from "
                f"{self.part.images * world} images, and took them from {size * before}. Use {before}, as before, or "
                f"start a new run with another --out."
            )

    def bytes_on_disk(self, ranks: Distributed, keep: int) -> tuple[int, int]:
        """Of one checkpoint, and of the history files that `keep` of them need: the tensors of all ranks."""
        weights = weight_bytes(self.method, moments=2 if isinstance(self.optimizer, torch.optim.AdamW) else 1)
        if self.memory is None:
            return bytes_on_disk(weights, self.method.feature_dim)
        state = {name: tensor.nbytes for name, tensor in self.memory.state_dict().items()}
        history = sum(size for name, size in state.items() if name.startswith("history"))
        history_and_rest = ranks.all_mean(history, sum(state.values()) - history)
        history, rest = (round(size * ranks.world) for size in history_and_rest)
        window = self.memory.window
        return bytes_on_disk(weights, self.method.feature_dim, rest, history // window, window, keep)

    def count(self, loss: float, partners_changed: int) -> None:
        """One more step done."""
        self.step += 1
        self.step_in_epoch += 1
        self.loss_sum += loss
        self.partners_changed += partners_changed

    def end_epoch(self) -> None:
        """Move on to the next epoch; this epoch's lists join the window."""
        if self.memory is not None:
            self.memory.end_epoch()
        self.epoch += 1
        self.step_in_epoch, self.loss_sum, self.partners_changed = 0, 0.0, 0

    def digest(self) -> str:
        """SHA-256 over the whole state: two runs with equal digests are at the same point, bit for bit."""
        groups = self._shared_tensors()
        if self.memory is not None:
            groups["memory"] = self.memory.state_dict()
        position = tuple(getattr(self, name) for name in _COUNTERS)
        named = {f"{group}.{name}": t for group, tensors in groups.items() for name, t in tensors.items()}
        return hash_tensors(named, repr(position))


def bytes_on_disk(
    weights: int, width: int, memory: int = 0, epoch_lists: int = 0, window: int = 1, keep: int = 1
) -> tuple[int, int]:
    """Of one checkpoint, and of the history files that `keep` of them need.

    Args:
        weights: bytes of the networks and of the optimiser's moments.
        width: of a feature; those of the last images are saved, too.
        memory: bytes of the neighbour memory without its history.
        epoch_lists: bytes of one finished epoch's lists.
        window: epochs of lists that a checkpoint needs.
        keep: checkpoints.
    """
    epochs = window + keep - 1  # the windows of checkpoints that are an epoch apart
    return weights + 4 * _WATCHED * width + memory, epoch_lists * epochs


def weight_bytes(method: nn.Module, moments: int) -> int:
    """Of the networks and of an optimiser that keeps so many numbers beside each learned one."""
    learned = sum(p.nbytes for p in method.parameters() if p.requires_grad)
    return sum(tensor.nbytes for tensor in method.state_dict().values()) + moments * learned


def batch_norms(method: nn.Module) -> list[nn.Module]:
    """The layers that look at several images at once."""
    return [layer for layer in method.modules() if isinstance(layer, _BatchNorm) and layer.training]


def overlapping(parts: Sequence[tuple[int, str]], rows: range) -> list[tuple[int, str]]:
    """Those of the (first image, name) that hold some of these rows; each part ends where the next begins."""
    stops = [first for first, _ in parts[1:]] + [rows.stop]
    pairs = zip(parts, stops, strict=True)
    return [part for part, stop in pairs if part[0] < rows.stop and stop > rows.start]


def load_memory(memory: NeighborMemory, checkpoint: Checkpoint) -> None:
    """Take over a checkpoint's rows of cache and history, as far as `memory` holds them."""
    for epoch, parts in checkpoint.info["history"]:
        for first, name in overlapping(parts, memory.rows):
            if name not in checkpoint.lost:  # else as if these images had not been visited
                memory.load_epoch_lists(epoch, checkpoint.history_tensors(name), first)
    parts = overlapping(checkpoint.info["memory"], memory.rows)
    memory.load_parts((first, checkpoint.tensors(group)) for first, group in parts)


def build_state(
    config: Config, num_images: int, ranks: Distributed = ALONE, micro_batches: int = 1
) -> TrainState:
    """The state before the first step, a pure function of the configuration; of the memory, this rank's share."""
    device = ranks.device
    method = build_method(config, config.views.size).to(device)
    part = ranks.part(config.batch_size, micro_batches)
    ranks.synchronize(method, part)
    if config.compile:
        compile_encoders(method)
    if any(p.ndim == 4 for p in method.parameters()):
        method = method.to(memory_format=image_layout(device))
    method.train()
    memory = None
    if (options := memory_options(config)) is not None:
        memory = ShardedMemory(num_images, method.feature_dim, device=device, **options)
    precision = working_precision(config.precision, device)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")  # else small gradients vanish
    recent: deque[Tensor] = deque(maxlen=max(1, _WATCHED * ranks.world // config.batch_size))
    optimizer, settings = build_optimizer(method, config), decisive(config)
    return TrainState(method, optimizer, scaler, memory, settings, recent, precision, part)


def build_optimizer(method: Method, config: Config) -> torch.optim.Optimizer:
    """AdamW (betas 0.9, 0.999; eps 1e-8), or SGD with momentum 0.9, over the method's parameter groups."""
    optim, lr = config.optim, config.peak_learning_rate
    groups = method.param_groups(optim)
    if optim.encoder_lr < 1 or optim.head_epochs:
        groups = _encoder_apart(groups, method)
    # On a CPU one pass over the weights instead of ten; elsewhere torch knows what is fastest.
    fused = all(p.device.type == "cpu" for group in groups for p in group["params"]) or None
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, fused=fused)
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, fused=fused)
    if fused:
        optimizer.register_step_pre_hook(_begin_momentum)
    return optimizer


def _encoder_apart(groups: list[dict[str, Any]], method: Method) -> list[dict[str, Any]]:
    """The same groups, the encoder's weights in groups of their own."""
    encoder = {id(p) for part in method.modules() if isinstance(part, Backbone) for p in part.parameters()}
    split = [
        {**group, "params": [p for p in group["params"] if (id(p) in encoder) is own], "encoder": own}
        for group in groups
        for own in (True, False)
    ]
    return [group for group in split if group["params"]]


def _begin_momentum(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Give weights that learn for the first time, as DINO's last layer after its frozen epochs, a momentum of zero.

    torch's fused SGD takes it for granted that all weights have begun together.
    """
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None and optimizer.state[weight].get("momentum_buffer") is None:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)


def build_loader(config: Config, images: ImageSet, ranks: Distributed = ALONE) -> PairLoader:
    """What feeds the run: this rank's part of every batch."""
    return PairLoader(
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


def memory_options(config: Config) -> dict[str, Any] | None:
    """How the run's neighbour memory is made, as keywords; None where the run needs none."""
    neighbors, policy = config.neighbors, PAIRS[config.pairs]
    if not (policy.draws_from_memory or neighbors.watch):
        return None
    return {
        "window": policy.window(neighbors),
        "k": neighbors.k,
        "support": neighbors.support,
        "timing": neighbors.timing if policy.draws_from_memory else "previous",  # watching changes nothing
        "dtype": None if neighbors.cache == "auto" else getattr(torch, neighbors.cache),
    }


def compile_encoders(method: Method) -> None:
    """Let torch.compile rewrite the encoders' forward passes in place; parameters and their names stay."""
    on_cpu = all(p.device.type == "cpu" for p in method.parameters())
    if on_cpu and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        raise UserError("--compile needs a C++ compiler on a CPU. Install g++, or leave it out.")
    for module in method.modules():
        if isinstance(module, Backbone):
            module.compile()


def build_policy(
    config: Config, num_images: int, memory: NeighborMemory | None, labels: Tensor | None
) -> PairPolicy:
    """The pair policy that `config.pairs` names."""
    epochs, seed, options, own = config.epochs, config.seed, config.neighbors, config.pair_settings
    return PAIRS[config.pairs].build(PairContext(num_images, epochs, seed, options, memory, labels, own))
