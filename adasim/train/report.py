"""How a run goes, told to people (progress bar, warnings) and to programs (metrics)."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from rich.console import Console
from torch import Tensor

from adasim.config import Config
from adasim.data import ImageSet
from adasim.eval.online import online_knn
from adasim.methods import Step
from adasim.models.transforms import EvalTransform
from adasim.train.distributed import Distributed
from adasim.train.metrics import MetricsLog
from adasim.train.monitor import CollapseWatch
from adasim.train.progress import Progress
from adasim.train.state import TrainState
from adasim.train.unreadable import UNREADABLE_FILE


class Reporter:
    """Speaks and writes for all ranks on the first of them; on the others it only counts what they hold.

    Features that are watched for collapse, and the methods' diagnostics, are those of rank 0's part of the batch.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        images: ImageSet,
        state: TrainState,
        steps_per_epoch: int,
        ranks: Distributed,
    ) -> None:
        self.config, self.path, self.images, self.state, self.ranks = config, path, images, state, ranks
        self.steps_per_epoch = steps_per_epoch
        self.watch = CollapseWatch(config.dino.out_dim if config.method == "dino" else None)
        self.told_unreadable = 0

    def __enter__(self) -> Reporter:
        self._stack = ExitStack()
        first = self.ranks.is_main
        self.metrics = self._stack.enter_context(MetricsLog(self.path, self.state.step)) if first else None
        console = Console(highlight=False) if first else Console(quiet=True, force_terminal=False)
        total = self.config.epochs * self.steps_per_epoch
        bar = Progress(total, self.config.epochs, self.state.step, console)
        self.bar = self._stack.enter_context(bar)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def say(self, text: str) -> None:
        self.bar.say(text)

    def sync(self) -> None:
        """Wait until all metrics are on the disk."""
        if self.metrics is not None:
            self.metrics.sync()

    def step(self, epoch: int, step: Step, loss: float, waited: float) -> None:
        """The progress bar after every step, a line of metrics after some."""
        state, batch_size = self.state, self.config.batch_size
        seen = state.step_in_epoch * batch_size
        bootstrap = None if self.config.pairs == "standard" else state.partners_changed / seen
        state.recent.append(step.feature)
        self.bar.update(
            step=state.step, epoch=epoch, loss=loss, images=batch_size, waited_s=waited, bootstrap=bootstrap
        )
        if self.metrics is not None and state.step % self.config.save.log_every == 0:
            values = {"epoch": epoch, "loss": loss, "lr": state.optimizer.param_groups[0]["lr"]}
            values |= {name: float(value) for name, value in step.diagnostics.items()}
            self.metrics.write(state.step, values)

    def epoch(self, epoch: int, step: Step, unreadable: dict[int, str]) -> None:
        """The epoch's line of metrics, and a word if the encoder collapses or images cannot be read."""
        state = self.state
        neighbours = self.neighbour_accuracy()  # takes all ranks
        if self.metrics is None:
            return
        entropy = step.diagnostics.get("teacher_entropy")
        features = torch.cat(list(state.recent))
        for sentence in self.watch.update(features, None if entropy is None else float(entropy)):
            self.say(sentence)
        if len(unreadable) > self.told_unreadable:
            self.told_unreadable = len(unreadable)
            self.say(
                f"{len(unreadable)} of {len(self.images)} images cannot be read and are replaced by others, "
                f"the last found being {[*unreadable.values()][-1]}. All are listed in "
                f"{self.path / UNREADABLE_FILE}."
            )
        values: dict[str, float] = {
            "epoch": epoch,
            "epoch_loss": state.loss_sum / self.steps_per_epoch,
            "bootstrap_ratio": state.partners_changed / (self.steps_per_epoch * self.config.batch_size),
            "unreadable": len(unreadable),
            **{f"epoch_{name}": value for name, value in self.watch.readings.items()},
            **neighbours,
        }
        every = self.config.eval.every
        if every and (epoch + 1) % every == 0:
            values["knn_top1"] = online_knn(
                state.method.exported,
                self.images,
                EvalTransform.for_run(self.config),
                device=step.feature.device,
                workers=self.config.data.workers,
                seed=self.config.seed,
            )
        self.metrics.write(state.step, values)

    def neighbour_accuracy(self) -> dict[str, float]:
        """Of this epoch's lists: how often the first and second neighbour is the image, or of its class."""
        memory = self.state.memory
        if memory is None:
            return {}
        counts = neighbour_counts(memory.current_ids, memory.rows.start, self.images.labels)
        visited, *hits = self.ranks.all_mean(*counts.values())
        names = list(counts)[1:]
        return {name: hit / visited if visited else math.nan for name, hit in zip(names, hits, strict=True)}


def neighbour_counts(lists: Tensor, first: int, labels: Tensor | None) -> dict[str, int]:
    """How many of the lists (N, K) of the images from `first` on name the image, or one of its class, at rank 1, 2.

    The first is mostly the image itself, so its class says little; the second is the one to watch.
    """
    visited = (lists[:, 0] >= 0).nonzero()[:, 0]
    images = visited + first
    counts = {"visited": len(visited)}
    for rank in range(min(2, lists.shape[1])):
        neighbour = lists[visited, rank].long()
        counts[f"nn_self_top{rank + 1}"] = int((neighbour == images).sum())
        if labels is not None:
            same = (labels[neighbour.clamp(min=0)] == labels[images]) & (neighbour >= 0)
            counts[f"nn_accuracy_top{rank + 1}"] = int(same.sum())
    return counts
