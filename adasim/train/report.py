"""How a run goes, told to people (progress bar, warnings) and to programs (metrics).

Epoch  12/100 ━━━━━━━━╸━━━━━━━━━━━━━━━  35%  1:02:11 left
loss 6.021   1,234 images/s   waiting for data 3%   bootstrapped 17%
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

from adasim.config import Config
from adasim.data import ImageSet
from adasim.dist.processes import Distributed
from adasim.methods import Step
from adasim.models import Backbone
from adasim.neighbors import NeighborMemory, PairPolicy
from adasim.runs.folder import RunFolder
from adasim.runs.metrics import UNREADABLE_FILE, MetricsLog, Pace, Tracker, read_metrics
from adasim.train.state import TrainState
from adasim.util import terminal
from adasim.util.collapse import READINGS, CollapseWatch
from adasim.util.files import write_errors
from adasim.util.units import duration

_SMOOTH_S = 20.0  # speeds are averages over about this long

_HARDLY_ANY = 0.01  # of the pairs
_ASKED = 1000  # partners, and images of a class, for how near they are
MEANT = (
    "On our benches AdaSim's pairs cost 1.8 points of k-NN where 37% were of one class and gained 0.3 where "
    "53% were; any of the class instead gained 2.2, and 1.4 if only from its nearest tenth: docs/results.md."
)
"""What right and near partners have meant; tests/test_paper.py compares the figures with the results."""

KnnDuringTraining = Callable[[Backbone, ImageSet, Config], float]
"""k-NN accuracy in percent of an encoder in training on (some of) its own images; changes nothing."""


class Reporter:
    """Prints and writes for all ranks on rank 0; on the others it only counts.

    Features that are watched for collapse, and the methods' diagnostics, are those of rank 0's part of the batch.
    """

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        images: ImageSet,
        state: TrainState,
        steps_per_epoch: int,
        ranks: Distributed,
        knn: KnnDuringTraining | None = None,
    ) -> None:
        self.config, self.run, self.path, self.images = config, run, run.path, images
        self.state, self.ranks, self.knn, self.steps_per_epoch = state, ranks, knn, steps_per_epoch
        self.watch = CollapseWatch(state.method.output_width)
        self.waited = 0.0  # seconds that this step has waited for data
        self.told_unreadable = 0
        console = terminal.console() if ranks.is_main else terminal.console(quiet=True, force_terminal=False)
        self.bar = Progress(config.epochs * steps_per_epoch, config.epochs, console=console)
        self.pace = Pace()
        self.metrics: MetricsLog | None = None  # on rank 0

    def __enter__(self) -> Reporter:
        self._stack = ExitStack()
        with self.ranks.raise_on_all():
            if self.ranks.is_main:
                with write_errors(f"to {self.path}", f"then: adasim pretrain --resume {self.path}"):
                    self.metrics = self._stack.enter_context(MetricsLog(self.path, self.state.step))
        if self.metrics is not None:
            self.pace = self.metrics.pace
            for line in read_metrics(self.path):
                self.watch.recall({name: line.get(f"epoch_{name}") for name in READINGS})
            name, settings = self.path.resolve().name, self.config.to_dict()
            log = self.config.save.log
            self.metrics.tracker = Tracker.open(log, str(self.run.id), name, settings, self.say)
        self.bar.step = self.state.step
        self._stack.enter_context(self.bar)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.metrics is not None and self.metrics.tracker is not None:
            self.metrics.tracker.close(complete=kind is None)
        self._stack.close()

    def say(self, text: str) -> None:
        """Print a message; on standard error too where nobody reads standard output any more."""
        self.bar.say(text)
        if terminal.is_unread() and self.ranks.is_main:
            terminal.complain(text)

    def sync(self) -> None:
        """Wait until all metrics are on the disk."""
        if self.metrics is not None:
            self.metrics.sync()

    def step(self, epoch: int, step: Step, loss: float) -> None:
        """The progress bar after every step, a line of metrics after some."""
        state, images = self.state, self.config.batch_size
        share = state.partners_changed / (state.step_in_epoch * images)
        bootstrap = None if self.config.pairs == "standard" else share
        state.recent.append(step.feature)
        self.pace.count(images, self.waited)
        self.bar.update(state.step, epoch, loss, images, self.waited, bootstrap)
        self.waited = 0.0
        if self.metrics is not None and state.step % self.config.save.log_every == 0:
            diagnostics = {name: float(value) for name, value in step.diagnostics.items()}
            values = {"epoch": epoch, "loss": loss, **self.schedules(epoch), **diagnostics, **self.pace.lap()}
            self.metrics.write(state.step, values)

    def schedules(self, epoch: int) -> dict[str, float]:
        """Learning rate and its like, as they were in the step that was just made."""
        groups, total = self.state.optimizer.param_groups, self.config.epochs * self.steps_per_epoch
        return {
            "lr": max(group["lr"] for group in groups if not group["fixed_lr"]),  # an encoder may have less
            "weight_decay": max(group["weight_decay"] for group in groups),  # biases may have none
            **self.state.method.schedules(epoch, self.state.step - 1, total),
        }

    def epoch(self, epoch: int, step: Step, policy: PairPolicy, unreadable: dict[int, str]) -> None:
        """The epoch's line of metrics, and a sentence if the encoder collapses or images cannot be read."""
        state = self.state
        neighbours = self.neighbour_accuracy(epoch, policy)  # takes all ranks
        measured = self.online_knn(epoch)  # so does this
        if self.metrics is None:
            return
        entropy = step.diagnostics.get("teacher_entropy")
        features = torch.cat(list(state.recent))
        for sentence in self.watch.update(features, None if entropy is None else float(entropy)):
            self.say(sentence)
        joined = state.partners_changed / (self.steps_per_epoch * self.config.batch_size)
        if "gate_open" in neighbours:
            right, nearer = (
                neighbours.get(name, math.nan) for name in ("partner_accuracy", "nearer_in_class")
            )
            self.say(regime(neighbours["gate_open"], joined, right, nearer))
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
            "bootstrap_ratio": joined,
            "unreadable": len(unreadable),
            **{f"epoch_{name}": value for name, value in self.watch.readings.items()},
            **self.schedules(epoch),  # also where few steps are logged, so that no curve lacks its warm-up
            **neighbours,
            **measured,
            **self.pace.epoch(),
        }
        self.metrics.write(state.step, values)

    def online_knn(self, epoch: int) -> dict[str, float]:
        """k-NN accuracy, every so many epochs: the first process measures, the others wait as long as it takes."""
        every, knn = self.config.eval.every, self.knn
        if not every or (epoch + 1) % every:
            return {}
        assert knn is not None
        measure = partial(knn, self.state.method.eval_encoder, self.images, self.config)
        accuracy = self.ranks.run_with_heartbeat(measure if self.ranks.is_main else None)
        return {} if accuracy is None else {"knn_top1": accuracy}

    @property
    def typical_epoch(self) -> int:
        """After twice the window (or the last): no list of the first epoch, where nobody is its own best, is left."""
        return min(2 * self.config.neighbors.window, self.config.epochs - 1)

    def neighbour_accuracy(self, epoch: int, policy: PairPolicy) -> dict[str, float]:
        """How often neighbours are of the image's class: this epoch's lists (released code), p_win (paper)."""
        memory, labels = self.state.memory, self.images.labels
        if memory is None:
            return {}
        first = memory.rows.start
        counts = neighbour_counts(memory.current_ids, first, labels)
        if labels is not None:
            partners = policy.partners(epoch)[first : memory.rows.stop]  # as they were drawn
            visited = (memory.current_ids[:, 0] >= 0).nonzero()[:, 0]
            own = torch.arange(first, memory.rows.stop, dtype=partners.dtype)
            chosen = {
                "partner_accuracy": partners,
                "second_neighbour_accuracy": memory.best_other(partners),
                "other_neighbour_accuracy": memory.best_other(partners, own),
            }
            for name, images in chosen.items():
                counts[name] = _same_class(images[visited].long(), visited + first, labels)
            # In the first epoch p_win has no candidates yet.
            if memory.epochs == 0 and memory.timing == "previous":
                for name in ("second_neighbour_accuracy", "other_neighbour_accuracy"):
                    counts[name] = (math.nan, len(visited))
        if self.config.pairs == "adasim" and self.config.neighbors.tau and epoch == self.typical_epoch:
            own = torch.arange(first, memory.rows.stop)
            best = memory.distribution(own, self.config.neighbors.tau)[0][:, 0]
            counts["gate_open"] = (int((best == own).sum()), len(own))
            if labels is not None:
                counts["nearer_in_class"] = nearer_in_class(memory, partners, labels)
        if not counts:
            return {}
        values = self.ranks.all_mean(*(value for pair in counts.values() for value in pair))
        pairs = zip(counts, values[::2], values[1::2], strict=True)
        return {name: hits / asked if asked else math.nan for name, hits, asked in pairs}


def regime(gate: float, joined: float, own_or_right: float, nearer: float = math.nan) -> str:
    """What AdaSim's pairs are like in this run, and what that has meant where it was tried.

    Args:
        gate: share of the images whose best match over the window is themselves.
        joined: share of the pairs that join two images.
        own_or_right: share of the images whose partner is of their class, themselves included; NaN without labels.
        nearer: share of a class that is nearer to an image than its partner of that class; NaN where unknown.
    """
    pairs = (
        f"AdaSim's pairs: the gate is open for {gate:.0%} of the images, {joined:.0%} of the pairs join two"
    )
    if joined < _HARDLY_ANY:
        return f"{pairs}: this run will hardly differ from one with --pairs standard."
    if math.isnan(own_or_right):
        return f"{pairs}. How many of these are of one class cannot be told without labels. {MEANT}"
    right = f"{max(0.0, 1 - (1 - own_or_right) / joined):.0%} of these of one class"
    if not math.isnan(nearer):
        right += f", on average nearer than {1 - nearer:.0%} of that class"
    return f"{pairs}, {right}. {MEANT}"


def nearer_in_class(memory: NeighborMemory, partners: Tensor, labels: Tensor) -> tuple[float, int]:
    """How large a share of its class is nearer to an image than its partner, summed over partners of the class, and
    over how many: about a thousand at most, of those whose image and partner are both held here; and beside at most
    so many of the class.

    Args:
        partners: one for each image that the memory holds; the image itself where it has none.
    """
    first, held = memory.rows.start, labels[memory.rows.start : memory.rows.stop]
    places, chosen = torch.arange(len(held)), partners.long() - first
    here = (chosen >= 0) & (chosen < len(held)) & (chosen != places) & (held >= 0)
    right = here & (held[chosen.clamp(0, len(held) - 1)] == held)
    asked = right.nonzero()[:, 0]
    asked = asked[:: len(asked) // _ASKED + 1]
    total = 0.0
    for place in asked.tolist():
        mates = ((held == held[place]) & (places != place)).nonzero()[:, 0]
        mates = mates[:: len(mates) // _ASKED + 1]
        shown = memory.features(first + torch.cat([torch.tensor([place]), chosen[place, None], mates]))
        similarities = shown[1:] @ shown[0]  # of the partner, then of the others
        total += float((similarities[1:] > similarities[0]).float().mean())
    return total, len(asked)


def neighbour_counts(lists: Tensor, first: int, labels: Tensor | None) -> dict[str, tuple[float, float]]:
    """How many of the lists (N, K) of the images from `first` on name the image, or one of its class, at rank 1, 2;
    and of how many lists that can be said.

    The first is mostly the image itself, so its class says little; the second is the one to watch.
    """
    visited = (lists[:, 0] >= 0).nonzero()[:, 0]
    images = visited + first
    counts: dict[str, tuple[float, float]] = {}
    for rank in range(min(2, lists.shape[1])):
        neighbour = lists[visited, rank].long()
        counts[f"nn_self_top{rank + 1}"] = (int((neighbour == images).sum()), len(visited))
        if labels is not None:
            counts[f"nn_accuracy_top{rank + 1}"] = _same_class(neighbour, images, labels)
    return counts


def _same_class(neighbours: Tensor, images: Tensor, labels: Tensor) -> tuple[int, int]:
    """How many neighbours are of their image's class, and of how many that is known: not without a label (-1)."""
    there = neighbours >= 0
    own, other = labels[images], labels[neighbours.clamp(min=0)]
    known = (own >= 0) & ((other >= 0) | ~there)  # an image without a neighbour counts as a miss
    return int(((own == other) & there & known).sum()), int(known.sum())


class Progress:
    """Shows a run's progress; `update` after every step, `say` for messages, which appear above the bar.

    Args:
        total_steps: steps of the whole run.
        epochs: epochs of the whole run.
        console: where to write; standard output by default. A bar if that is a terminal, else lines.
        every_s: without a terminal, a line at every new epoch and whenever so many seconds have passed.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        total_steps: int,
        epochs: int,
        console: Console | None = None,
        every_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps, self.epochs = total_steps, epochs
        self.step = 0
        """Steps done; what was done before a resume counts for the bar and not for the speed."""
        self.epoch, self.loss = 0, math.nan
        self.bootstrap: float | None = None
        self._console, self._every_s, self._clock = console or terminal.console(), every_s, clock
        self._last = clock()
        self._steps = self._images = self._waited = self._busy = 0.0  # decayed sums, of one age
        self._printed: tuple[int, float] | None = None  # epoch and time of the last plain line
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        self._last = self._clock()  # building the bar and its run is not training
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self._bar, console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._steps and self._printed != (self.epoch, self._last):
            self._print_line()

    def update(
        self, step: int, epoch: int, loss: float, images: int, waited_s: float, bootstrap: float | None = None
    ) -> None:
        """So many steps are done; the last one took `images`, and waited for data. Epochs count from 0.

        `bootstrap` is the share of images whose partner is another image; None where that has no meaning.
        """
        now = self._clock()
        took, self._last = now - self._last, now
        fade = math.exp(-took / _SMOOTH_S)
        self._steps = self._steps * fade + (step - self.step)
        self._images = self._images * fade + images
        self._waited = self._waited * fade + waited_s
        self._busy = self._busy * fade + took
        self.step, self.epoch, self.loss, self.bootstrap = step, epoch, loss, bootstrap
        if self._live is None:
            new = self._printed is None or self.epoch != self._printed[0] or step == self.total_steps
            if new or (self._printed is not None and now - self._printed[1] >= self._every_s):
                self._print_line()

    def say(self, text: str) -> None:
        """Print a message above the bar, on one line whatever names it holds."""
        self._console.print(terminal.printable(text), markup=False, emoji=False, soft_wrap=self._live is None)

    @property
    def images_per_second(self) -> float:
        return self._images / self._busy if self._busy else 0.0

    @property
    def waiting(self) -> float:
        """Share of the time spent waiting for data, 0 to 1."""
        return min(1.0, self._waited / self._busy) if self._busy else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At the present speed; None before the first step."""
        return (self.total_steps - self.step) * self._busy / self._steps if self._steps else None

    def _print_line(self) -> None:
        self._printed = (self.epoch, self._last)
        done = f"step {self.step:,}/{self.total_steps:,} ({self.step / max(1, self.total_steps):.0%})"
        line = ", ".join([f"epoch {self._epoch()}", done, *self._figures(), self._left()])
        self._console.print(line, markup=False, emoji=False, soft_wrap=True)

    def _bar(self) -> Group:
        right = (Column(justify="right", no_wrap=True) for _ in range(2))  # a column holds its cells
        line = Table.grid(Column(no_wrap=True), Column(ratio=1), *right, padding=(0, 1), expand=True)
        line.add_row(
            Text.assemble("Epoch ", (self._epoch(), "bold")),
            ProgressBar(total=max(1, self.total_steps), completed=self.step),
            f"{100 * self.step // max(1, self.total_steps)}%",
            Text(self._left(), style="cyan"),
        )
        return Group(line, Text("   ".join(self._figures()), style="dim", no_wrap=True, overflow="ellipsis"))

    def _epoch(self) -> str:
        return f"{min(self.epoch + 1, self.epochs):>{len(str(self.epochs))}}/{self.epochs}"

    def _figures(self) -> list[str]:
        if not self._steps:
            return ["starting"]
        speed = self.images_per_second
        figures = [
            f"loss {self.loss:.4g}",
            f"{speed:,.0f} images/s" if speed >= 10 else f"{speed:.2g} images/s",
            f"waiting for data {self.waiting:.0%}",
        ]
        return figures if self.bootstrap is None else [*figures, f"bootstrapped {self.bootstrap:.0%}"]

    def _left(self) -> str:
        return "-:-- left" if self.seconds_left is None else f"{duration(self.seconds_left)} left"
