"""How a run goes, told to people (progress bar, warnings) and to programs (metrics), and the collapse watch.

The watch says in words when self-distillation has stopped telling images apart. It reads three vital signs, each on a
scale that does not depend on the model's size:

- **spread**: deviation of the L2-normalised features, in units of 1/sqrt(D), its value when they fill the
  sphere (SimSiam, section 4.1). 0 means that all features are equal.
- **rank**: RankMe (Garrido et al., 2023), how many directions the features use. 1 means one.
- **entropy** of DINO's teacher, in units of ln(out_dim). 1 is a uniform output, 0 a one-hot one; DINO's
  centring pulls towards the former, its sharpening towards the latter (DINO, section 5.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from adasim.config import Config
from adasim.data import ImageSet
from adasim.dist.processes import Distributed
from adasim.methods import Step
from adasim.models import Backbone
from adasim.neighbors import PairPolicy
from adasim.runs.folder import RunFolder
from adasim.runs.metrics import UNREADABLE_FILE, MetricsLog, Pace, read_metrics
from adasim.runs.trackers import FILES, open_tracker
from adasim.train.progress import Progress
from adasim.train.state import TrainState
from adasim.util import terminal
from adasim.util.errors import UserError
from adasim.util.spread import feature_spread, rankme

ALIKE = "The encoder gives nearly the same feature to every image"
FLAT = "The features use only"
TEACHER = "The teacher's output is"
BEGINNINGS = (ALIKE, FLAT, TEACHER)
"""Of the watch's sentences."""
READINGS = ("feature_spread", "rankme", "teacher_entropy_share")
"""Names of the vital signs, as they are logged of every epoch."""
ROWS = 2048
"""RankMe looks at no more features than this: the cost is cubic and the answer settles early."""

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
        self.state, self.ranks = state, ranks
        self.steps_per_epoch = steps_per_epoch
        self.knn = knn
        self.watch = CollapseWatch(state.method.output_width)
        self.told_unreadable = 0
        console = terminal.console() if ranks.is_main else terminal.console(quiet=True, force_terminal=False)
        self.bar = Progress(config.epochs * steps_per_epoch, config.epochs, console=console)
        self.metrics: MetricsLog | None = None

    def __enter__(self) -> Reporter:
        self._stack = ExitStack()
        with self.ranks.raise_on_all():
            if self.ranks.is_main:
                try:
                    self.metrics = self._stack.enter_context(MetricsLog(self.path, self.state.step))
                except OSError as error:
                    raise UserError(
                        f"Cannot write to {self.path}: {error.strerror or error}. Make room or make it writable, "
                        f"then: adasim pretrain --resume {self.path}"
                    ) from error
        self.pace = Pace() if self.metrics is None else self.metrics.pace
        if self.metrics is not None:
            for line in read_metrics(self.path):
                self.watch.recall({name: line.get(f"epoch_{name}") for name in READINGS})
        self._follow()
        self.bar.step = self.state.step
        self._stack.enter_context(self.bar)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.metrics is not None and self.metrics.tracker is not None:
            self.metrics.tracker.close(complete=kind is None)
        self._stack.close()

    def _follow(self) -> None:
        """Let the service of `--log` get the metrics, too. Only rank 0 has any."""
        log = self.config.save.log
        if self.metrics is not None and log != FILES:
            assert self.run.id is not None
            name, config = self.path.resolve().name, self.config.to_dict()
            self.metrics.tracker = open_tracker(log, self.run.id, name, config, self.say)

    def say(self, text: str) -> None:
        """Print a message; on standard error too where nobody reads standard output any more."""
        self.bar.say(text)
        if terminal.is_unread() and self.ranks.is_main:
            terminal.complain(text)

    def sync(self) -> None:
        """Wait until all metrics are on the disk."""
        if self.metrics is not None:
            self.metrics.sync()

    def step(self, epoch: int, step: Step, loss: float, waited: float) -> None:
        """The progress bar after every step, a line of metrics after some."""
        state, batch_size = self.state, self.config.batch_size
        seen = state.step_in_epoch * batch_size
        standard = self.config.pairs == "standard"
        bootstrap = None if standard else state.partners_changed / seen
        state.recent.append(step.feature)
        self.pace.count(batch_size, waited)
        self.bar.update(
            step=state.step, epoch=epoch, loss=loss, images=batch_size, waited_s=waited, bootstrap=bootstrap
        )
        if self.metrics is not None and state.step % self.config.save.log_every == 0:
            values = {"epoch": epoch, "loss": loss, **self.schedules(epoch)}
            values |= {name: float(value) for name, value in step.diagnostics.items()}
            values |= self.pace.lap()
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
            # Also where few steps are logged, so that no curve of them lacks its warm-up.
            **self.schedules(epoch),
            **neighbours,
            **measured,
        }
        values |= self.pace.epoch()
        self.metrics.write(state.step, values)

    def online_knn(self, epoch: int) -> dict[str, float]:
        """k-NN accuracy, every so many epochs: the first process measures, the others wait as long as it takes."""
        every, knn = self.config.eval.every, self.knn
        if not every or (epoch + 1) % every:
            return {}
        assert knn is not None
        encoder = self.state.method.eval_encoder
        accuracy = self.ranks.run_with_heartbeat(
            (lambda: knn(encoder, self.images, self.config)) if self.ranks.is_main else None
        )
        return {} if accuracy is None else {"knn_top1": accuracy}

    def neighbour_accuracy(self, epoch: int, policy: PairPolicy) -> dict[str, float]:
        """How often neighbours are of the image's class: this epoch's lists (released code), p_win (paper)."""
        memory, labels = self.state.memory, self.images.labels
        if memory is None:
            return {}
        first = memory.rows.start
        # Without lists, who was visited is all that the memory says.
        counts = neighbour_counts(memory.current_ids, first, labels) if memory.lists else {}
        if labels is not None:
            partners = policy.partners(epoch)[first : memory.rows.stop]  # as they were drawn
            visited = (memory.current_ids[:, 0] >= 0).nonzero()[:, 0]
            chosen = {"partner_accuracy": partners}
            if memory.lists:
                chosen["second_neighbour_accuracy"] = memory.best_other(partners)
            for name, images in chosen.items():
                counts[name] = _same_class(images[visited].long(), visited + first, labels)
            # In the first epoch p_win has no candidates yet.
            if memory.lists and memory.epochs == 0 and memory.timing == "previous":
                counts["second_neighbour_accuracy"] = (math.nan, len(visited))
        if not counts:
            return {}
        values = self.ranks.all_mean(*(value for pair in counts.values() for value in pair))
        pairs = zip(counts, values[::2], values[1::2], strict=True)
        return {name: hits / asked if asked else math.nan for name, hits, asked in pairs}


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


@dataclass
class _Sign:
    """One way to collapse. It is reported after `patience` bad readings in a row, once until it clears.

    A sign that had been good before has *become* bad: fewer readings are needed than at the start of a run,
    which may look like a collapse (an untrained network finds all images alike) and recover.
    """

    patience: int
    patience_at_start: int
    was_good: bool = False
    streak: int = 0

    def read(self, bad: bool) -> bool:
        """True if it is to be reported now."""
        self.streak = self.streak + 1 if bad else 0
        self.was_good |= not bad
        return self.streak == (self.patience if self.was_good else self.patience_at_start)


class CollapseWatch:
    """Reads the vital signs once an epoch (or as often as wished) and returns sentences, usually none.

    Thresholds, with readings of healthy runs of this package (32-pixel images, out_dim 512) beside them:

    - spread below 0.1: a mean cosine above 0.99 between any two images. Untrained ResNets and ViTs: 0.2 to
      0.6, trained ones: 0.5 to 0.6. At once if it was above before, after 5 readings if it never was.
    - rank below 3. Untrained: 8 to 70, trained: 38 to 86 (15 at thirty times the learning rate). Likewise.
    - entropy above 0.999. A healthy DINO run passes through a plateau where centring has removed what all
      images have in common and little else is there yet; it peaked at 0.995 there (ln(out_dim) - 0.03),
      while a run with too warm a teacher (0.5) passed 0.999 in its second epoch. After 3 readings.
    - entropy below 0.05: nearly all mass is on one prototype. A run whose centre was held still (no centring)
      fell below it in its sixth epoch and ended at 0.027. After 3 readings.
    """

    SPREAD, RANK, UNIFORM, ONE_HOT = 0.1, 3.0, 0.999, 0.05

    def __init__(self, out_dim: int | None = None) -> None:
        """`out_dim`: width of DINO's output, None for SimSiam."""
        self.out_dim = out_dim
        self.readings: dict[str, float] = {}
        """The latest vital signs, to be logged."""
        self._alike = _Sign(patience=1, patience_at_start=5)
        self._flat = _Sign(patience=1, patience_at_start=5)
        self._uniform = _Sign(patience=3, patience_at_start=3)
        self._one_hot = _Sign(patience=3, patience_at_start=3)

    def update(self, features: Tensor, teacher_entropy: float | None = None) -> list[str]:
        """Read once: features (B, D) of the epoch's last images, and the teacher's mean entropy in nats.

        Returns:
            A sentence for every sign that has just turned bad.
        """
        self.readings = {}
        features = features.detach().float()
        features = features[features.isfinite().all(dim=1)]
        if len(features) >= 16:  # fewer say little about rank or spread
            few = features[:: math.ceil(len(features) / ROWS)]
            self.readings |= {"feature_spread": float(feature_spread(few)), "rankme": rankme(few)}
        if teacher_entropy is not None and self.out_dim is not None and math.isfinite(teacher_entropy):
            self.readings["teacher_entropy_share"] = teacher_entropy / math.log(self.out_dim)
        return self._judge(self.readings, features.shape[1])

    def recall(self, readings: Mapping[str, float | None]) -> None:
        """Take note of what was read in an earlier epoch, in a run that goes on."""
        self._judge({name: value for name, value in readings.items() if value is not None}, 0)

    def _judge(self, readings: Mapping[str, float], width: int) -> list[str]:
        said = []
        if "feature_spread" in readings and "rankme" in readings:
            said += self._judge_features(readings["feature_spread"], readings["rankme"], width)
        if "teacher_entropy_share" in readings:
            said += self._judge_entropy(readings["teacher_entropy_share"])
        return said

    def _judge_features(self, spread: float, rank: float, width: int) -> list[str]:
        said = []
        if self._alike.read(spread < self.SPREAD):
            said.append(
                f"{ALIKE}: they vary {spread:.1%} as much "
                f"as features that fill the sphere. It has collapsed, or has not begun to learn. Lower "
                f"--optim.lr, or try --pairs standard to see whether the pairs are the cause."
            )
        if self._flat.read(rank < self.RANK):
            said.append(
                f"{FLAT} {rank:.1f} of {width} directions (RankMe): most of what "
                f"could tell images apart is lost. Lower --optim.lr or --optim.weight-decay, or make the "
                f"views harder (a smaller --views.scale)."
            )
        return said

    def _judge_entropy(self, share: float) -> list[str]:
        said = []
        if self._uniform.read(share > self.UNIFORM):
            said.append(
                f"{TEACHER} uniform: its entropy is {share:.2%} of ln({self.out_dim}), so it says "
                f"the same of every image and there is nothing to learn from it. Sharpen it with a lower "
                f"--dino.teacher-temp, or let the centre follow slower (a higher --dino.center-momentum)."
            )
        if self._one_hot.read(share < self.ONE_HOT):
            said.append(
                f"{TEACHER} one-hot: its entropy is {share:.2%} of ln({self.out_dim}). If all "
                f"images share one prototype, this is a collapse. Soften it with a higher "
                f"--dino.teacher-temp, or let the centre follow faster (a lower --dino.center-momentum)."
            )
        return said
