"""`adasim eval linear`: a linear layer on frozen features, by DINO's or SimSiam's protocol.

`dino`: SGD with momentum, no decay (Caron et al., 2021). `simsiam`: the same with LARS (Chen and He, 2021; You et
al., 2017). Both begin at normal(0, 0.01) weights and zero biases, take the rate
from lr * batch_size / 256 to 0 by a cosine that moves once an epoch, and report the best epoch on the test images.

A sweep looks at the test images once, at its end: it chooses its rate on held-out training images, and reports the
last epoch. All its rates are trained at once, as one stacked layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from rich.table import Column, Table
from timm.models import VisionTransformer
from torch import Tensor

from adasim.data import ImageSet, Subset
from adasim.eval.evaluation import Evaluation, Extractor, Report, pick_quick
from adasim.eval.features import (
    FeatureKind,
    check_features,
    check_labels,
    check_positive,
    check_split,
    encode,
    frozen,
)
from adasim.eval.splits import hold_out
from adasim.options import SWEEP, LinearOptions
from adasim.registry import EVALUATIONS, METHODS
from adasim.util import seeding
from adasim.util.errors import UserError
from adasim.util.fields import Range, check_name

Batches = Iterable[tuple[Tensor, Tensor]]
"""(B, D) features and their (B,) labels, batch after batch."""
FALLBACK = "dino"
"""The protocol of encoders whose method is not known."""
_ENCODED = 64
"""Images encoded at a time: the same ones, and so the same bits, where each rank's part is a multiple."""
_SMALL_TRAINING_SET = 100_000  # below it, a published batch of 1024 or 4096 makes too few steps
_LOGITS = 1 << 24  # test logits held at a time


@dataclass(frozen=True, kw_only=True)
class LinearProtocol:
    """Published settings."""

    rate: float  # per 256 images
    conv_rate: float | None = None  # where the encoder is no ViT; None: `rate` as well
    epochs: int
    batch_size: int
    lars: bool = False  # whether LARS scales the gradients of SGD with momentum 0.9
    features: FeatureKind = "pooled"  # what the layer sees
    bilinear: bool = False  # resize images bilinearly, and not as the encoder's own view does


_DINO = LinearProtocol(rate=0.001, conv_rate=0.03, epochs=100, batch_size=1024, features="linear-dino")
# The rate of its code; the paper has 0.02.
_SIMSIAM = LinearProtocol(rate=0.1, epochs=90, batch_size=4096, lars=True, bilinear=True)
LINEAR_PROTOCOLS: dict[str, LinearProtocol] = {
    "dino": _DINO,
    "simsiam": _SIMSIAM,
    "simsiam-sgd": replace(_SIMSIAM, lars=False, rate=30.0, batch_size=256),  # tried in the same paper
}
"""By name. A method says by its `linear_protocol` which of them its encoders are measured by."""


class Score(NamedTuple):
    """An accuracy in percent, and where it was reached (epochs count from 1)."""

    top1: float
    rate: float
    epoch: int
    top5: float


@dataclass(frozen=True)
class LinearResult:
    """Test accuracy after every epoch. What is chosen by it is chosen on the test set."""

    epochs: tuple[tuple[Score, ...], ...]
    """The scores of all rates, epoch after epoch."""

    @property
    def best(self) -> Score:
        """The best epoch: how both papers report. Of several rates, the best one."""
        return max((score for scores in self.epochs for score in scores), key=lambda score: score.top1)

    @property
    def last(self) -> Score:
        """The last epoch; of several rates, that of the one which ends best."""
        return max(self.epochs[-1], key=lambda score: score.top1)


def linear_probe(
    train_features: Any,
    train_labels: Any,
    test_features: Any,
    test_labels: Any,
    *,
    num_classes: int | None = None,
    rates: Sequence[float] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    protocol: str = "dino",
    seed: int = 0,
) -> LinearResult:
    """Train linear heads on frozen features, and score them on the test set after every epoch.

    Args:
        train_features: (N, D), used as they are: every epoch sees the same features (the quick mode). Or a function
            from an epoch (from 0) to its batches of features (B, D) and labels (B,), as augmentation asks for: one
            pass of the backbone feeds all rates.
        train_labels: (N,) whole numbers, in any range; beside a function they are not looked at.
        test_features: (M, D).
        test_labels: (M,); each must occur among `train_labels`.
        num_classes: beside a function, whose labels are 0..num_classes-1.
        rates: learning rates per 256 images, one head each; None takes the published one (DINO's for a ViT).
        epochs: None takes the published number.
        batch_size: of a full batch, which scales the rates; None takes the published one.
        protocol: a name of `LINEAR_PROTOCOLS`.
    """
    check_name("protocol", protocol, LINEAR_PROTOCOLS)
    published = LINEAR_PROTOCOLS[protocol]
    rates = (published.rate,) if rates is None else tuple(float(rate) for rate in rates)
    epochs = published.epochs if epochs is None else epochs
    batch_size = published.batch_size if batch_size is None else batch_size
    check_positive(epochs=epochs, batch_size=batch_size, rates=min(rates, default=0))
    if callable(train_features):
        classes = num_classes or 0
        test = check_features(test_features, "test_features")
        test_labels = _check_batch(test, test_labels, test.shape[1], classes).to(test.device)

        def epoch_batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
            for features, labels in train_features(epoch):
                yield features, _check_batch(features, labels, test.shape[1], classes)

    else:
        train, labels, test, test_labels, seen = check_split(
            train_features, train_labels, test_features, test_labels
        )
        classes = len(seen)

        def epoch_batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
            order = seeding.permutation(seed, "linear order", epoch, len(train)).to(train.device)
            for ids in order.split(batch_size):
                yield train.index_select(0, ids), labels[ids]

    heads = StackedHeads(len(rates), test.shape[1], classes, seed, published.lars, test.device)
    peak = torch.tensor(rates, device=test.device) * batch_size / 256
    scores = []
    for epoch in range(epochs):
        lr = peak * (0.5 * (1 + math.cos(math.pi * epoch / epochs)))
        images = 0
        for features, targets in epoch_batches(epoch):
            heads.step(features.to(test.device, torch.float32), targets.to(test.device), lr)
            images += len(targets)
        if not images:
            raise UserError(f"Epoch {epoch} of the linear probe has no images. Check the training split.")
        accuracies = zip(rates, *_accuracy(heads, test, test_labels), strict=True)
        scores.append(tuple(Score(top1, rate, epoch + 1, top5) for rate, top1, top5 in accuracies))
    return LinearResult(tuple(scores))


def _check_batch(features: Any, labels: Any, dim: int, num_classes: int) -> Tensor:
    """The labels of a batch that fits a head of `num_classes` over width `dim`, as int64."""
    features = check_features(features, "a training batch")
    labels = check_labels(labels, len(features), "the labels of a training batch")
    if features.shape[1] != dim or int(labels.max()) >= num_classes:
        raise UserError(
            f"A batch is {features.shape[1]} wide with labels up to {int(labels.max())}, but test_features are {dim} "
            f"wide and num_classes={num_classes}."
        )
    return labels


class StackedHeads:
    """R linear heads over the same features: one product forward, one back, then each head's own step.

    All heads begin at the same weights, so that what a rate reaches does not depend on its company.
    """

    def __init__(
        self, rates: int, dim: int, num_classes: int, seed: int, lars: bool, device: torch.device
    ) -> None:
        with seeding.seeded(seeding.key(seed, "linear head")):
            weight = torch.empty(num_classes, dim).normal_(std=0.01)
        self.weight = weight.to(device).repeat(rates, 1, 1)  # (R, C, D)
        self.bias = torch.zeros(rates, num_classes, device=device)  # (R, C)
        self.lars = lars
        self._velocity = [torch.zeros_like(self.weight), torch.zeros_like(self.bias)]

    def logits(self, features: Tensor) -> Tensor:
        """(B, D) features to (R, C, B) logits: images innermost, so that a softmax over classes is fast."""
        flat = torch.addmm(self.bias.view(-1, 1), self.weight.flatten(0, 1), features.T)
        return flat.view(*self.bias.shape, len(features))

    def step(self, features: Tensor, labels: Tensor, lr: Tensor) -> None:
        """One SGD step of every head on the batch's mean cross-entropy; `lr` is one rate per head, (R,)."""
        # The gradient of the logits in closed form: (softmax - one-hot) / B.
        error = torch.softmax(self.logits(features), dim=1)  # (R, C, B)
        places = labels.expand(len(lr), 1, -1)
        error.scatter_add_(1, places, error.new_tensor(-1.0).expand_as(places))
        error = error.div_(len(labels)).flatten(0, 1)  # (R * C, B)
        gradients = [(error @ features).view_as(self.weight), error.sum(dim=1).view_as(self.bias)]
        for value, gradient, velocity in zip(
            (self.weight, self.bias), gradients, self._velocity, strict=True
        ):
            per_head = (-1, *[1] * (value.ndim - 1))
            if self.lars:
                gradient *= lars_scale(value, gradient).view(per_head)
            velocity.mul_(0.9).add_(gradient)
            value.addcmul_(velocity, lr.view(per_head), value=-1)


def lars_scale(value: Tensor, gradient: Tensor) -> Tensor:
    """LARS without decay (LARC without clipping): 0.001 |w| / |g| for each of R stacked tensors, shape (R,).

    Where either norm is 0 (a bias at its start) the gradient stays as it is, as in apex, which SimSiam used.
    """
    norm = torch.linalg.vector_norm(value.flatten(1), dim=1)
    slope = torch.linalg.vector_norm(gradient.flatten(1), dim=1)
    return torch.where((norm != 0) & (slope != 0), 0.001 * norm / (slope + 1e-8), 1.0)


def _accuracy(heads: StackedHeads, features: Tensor, labels: Tensor) -> tuple[tuple[float, ...], ...]:
    """Percent right per head, and percent among the five likeliest classes.

    Logits that are not finite are never right: a rate that diverged scores 0.
    """
    hits = torch.zeros(2, len(heads.bias), dtype=torch.int64, device=features.device)
    step = max(1, _LOGITS // heads.bias.numel())
    for some, truth in zip(features.split(step), labels.split(step), strict=True):
        logits = heads.logits(some.float())  # (R, C, B)
        best, guess = logits.max(dim=1)  # (R, B)
        own = logits.gather(1, truth.expand(len(logits), 1, -1))  # (R, 1, B)
        hits[0] += ((guess == truth) & best.isfinite()).sum(dim=1)
        hits[1] += (((logits > own).sum(dim=1) < 5) & best.isfinite()).sum(dim=1)
    return tuple(tuple(row) for row in (hits.double() * 100 / len(features)).tolist())


# ---- the evaluation ----


@EVALUATIONS.register("linear")
@dataclass(kw_only=True)
class Linear(LinearOptions, Evaluation):
    """Measures what its options, in adasim/options.py, ask for."""

    def run(self, extractor: Extractor) -> Report:
        quick = pick_quick(self, extractor)
        mode = "quick" if quick else "augmented"
        encoder = extractor.encoder
        protocol = protocol_of(extractor) if self.protocol == "auto" else self.protocol
        check_name("protocol", protocol, LINEAR_PROTOCOLS)
        published = LINEAR_PROTOCOLS[protocol]
        if self.sweep and self.rates is not None and len(self.rates) < 2:
            raise UserError("--sweep chooses between rates: name several with --rates, or none for its own.")
        is_vit = isinstance(encoder.backbone.net, VisionTransformer)
        rate = published.rate if is_vit else published.conv_rate or published.rate
        rates = self.rates or (SWEEP if self.sweep else (rate,))

        split = extractor.open_split(self)
        transform = encoder.transform.bilinear() if published.bilinear else encoder.transform
        train, labels, test, test_labels = extractor.split_features(split, transform, published.features)
        small = len(labels) < _SMALL_TRAINING_SET
        usual = min(256, len(labels)) if small else published.batch_size
        batch_size = self.batch_size or usual
        Range(extractor.ranks.world).check("batch_size", batch_size)

        classes, seed = len(split.train.classes), extractor.seed
        learn = partial(linear_probe, num_classes=classes, epochs=self.epochs, protocol=protocol, seed=seed)

        def probe(rows: Tensor, asked: Tensor, asked_labels: Tensor, rates: Sequence[float]) -> LinearResult:
            """Heads trained on these rows of the training images, and scored on `asked` after every epoch."""
            batch = batch_size if len(rows) == len(labels) else min(batch_size, len(rows))
            inputs: Any = train.values[rows]
            if not quick:
                images, kind = Subset(split.train, train.ids[rows]), published.features
                inputs = augmented_batches(extractor, images, labels[rows], self.flip, kind, batch)
                asked = asked.to(extractor.device)
            return learn(inputs, labels[rows], asked, asked_labels, rates=rates, batch_size=batch)

        tried, swept = None, SWEEP
        if len(rates) > 1:
            rest, held = hold_out(labels, len(labels), seed, "Name one rate: --rates RATE.")
            extractor.say(
                f"A sweep of {len(rates)} rates: they are scored on {len(held):,} of the {len(labels):,} training "
                f"images, which are held out, and the best one then learns from all."
            )
            tried = probe(rest, train.values[held], labels[held], rates)
            swept, rates = tuple(score.rate for score in tried.epochs[-1]), (tried.last.rate,)
        result = probe(torch.arange(len(labels)), test.values, test_labels, rates)

        best, last = result.best, result.last
        metrics: dict[str, Any] = {"rate": last.rate, "top1_last": last.top1, "top5_last": last.top5}
        if tried is not None:
            choice, value = "swept rate", last.top1
            held_out = [score.top1 for score in tried.epochs[-1]]
            metrics |= {"rates": list(swept), "held_out_top1_by_rate": held_out}
        else:
            choice, value = "published rate" if self.rates is None else f"rate={last.rate:g}", best.top1
            metrics |= {"top1_best": best.top1, "top5_best": best.top5, "best_epoch": best.epoch}
        changes: dict[str, tuple[Any, Any]] = {
            "epochs": (len(result.epochs), published.epochs),
            "batch_size": (batch_size, usual),
            "flip": (self.flip, LinearOptions.flip),
        }
        optimizer = "lars" if published.lars else "sgd"
        line = extractor.result(
            "linear",
            value,
            setting=f"{protocol}, {mode}, {choice}",
            changes=changes if tried is None else changes | {"rates": (swept, SWEEP)},
            metrics=metrics,
            data=split,
            settings={"protocol": protocol, "mode": mode, "optimizer": optimizer, "rate": choice},
        )
        title = extractor.title(f"Linear ({protocol}, {mode}, {choice})", split)
        sentences = _sentences(tried, last.rate, is_published=self.rates is None, small=small)
        return Report(results=(line,), title=title, table=_table(result, tried), sentences=sentences)


def _table(result: LinearResult, tried: LinearResult | None) -> Table:
    """What a sweep tried, on held-out images; then the rate on the test images, the figure to report in bold."""
    if tried:
        rows = [("held out", score, "") for score in tried.epochs[-1]]
        rows.append(("test, last epoch", result.last, "bold"))
    else:
        rows = [("test, best epoch", result.best, "bold"), ("test, last epoch", result.last, "")]
    figures = (Column(heading, justify="right") for heading in ("rate", "epoch", "top-1", "top-5"))
    table = Table("images", *figures, box=None, padding=(0, 2))
    for images, score, style in rows:
        words = (f"{score.rate:g}", str(score.epoch), f"{score.top1:.2f}", f"{score.top5:.2f}")
        table.add_row(images, *words, style=style)
    return table


def _sentences(
    tried: LinearResult | None, rate: float, *, is_published: bool, small: bool
) -> tuple[str, ...]:
    """Whose rate it is, and what was chosen on which images."""
    if tried is not None:
        chosen = (
            f"The rate, {rate:g} per 256 images, was chosen on held-out training images, and nothing on the test "
            f"images."
        )
        edge = "It is at the edge of the sweep: try further --rates."
        rates = [score.rate for score in tried.epochs[-1]]
        return (chosen, edge) if rate in (min(rates), max(rates)) else (chosen,)
    whose = "the published one" if is_published else "that of --rates"
    said = (
        f"The rate, {rate:g} per 256 images, is {whose}. The best epoch is as published: on the test images."
    )
    hint = (
        f"A published rate is made for a million images, and often too low for fewer than {_SMALL_TRAINING_SET:,}: "
        f"--sweep chooses one on held-out training images."
    )
    return (said, hint) if small and is_published else (said,)


def augmented_batches(
    extractor: Extractor,
    images: ImageSet,
    labels: Tensor,
    flip: float,
    kind: FeatureKind,
    batch_size: int,
) -> Callable[[int], Batches]:
    """A function from an epoch to its batches of features (B, D) and labels (B,).

    As published, views are random crops of 8% to 100% of the area, bilinear, some mirrored. The images left over at
    an epoch's end are dropped; each epoch leaves others. Each rank reads and encodes its part of a batch, and all of
    them get the whole: every one then takes the step that one process alone would take.
    """
    backbone, ranks = extractor.encoder.backbone, extractor.ranks
    loader = extractor.view_loader(
        images, batch_size, ranks, interpolation="bilinear", scale=(0.08, 1.0), flip=flip, color=0.0
    )
    ends = [rank * batch_size // ranks.world for rank in range(ranks.world + 1)]
    counts = [end - start for start, end in pairwise(ends)]

    def batches(epoch: int) -> Batches:
        for batch in loader.views(epoch, loader.batches(epoch)):
            with frozen(backbone), torch.no_grad():
                made = [encode(backbone, some, kind).float() for some in batch.views[0].split(_ENCODED)]
            features = ranks.gather_rows(torch.cat(made), counts)
            yield features, labels[ranks.gather_rows(batch.ids, counts).cpu()]

    return batches


def protocol_of(extractor: Extractor) -> str:
    """The linear protocol that the method of the encoder's run names."""
    method = extractor.encoder.method
    if method is None:
        return FALLBACK
    if method not in METHODS:
        extractor.say(
            f"The method {method} of this run is not known here, so the linear protocol is that of {FALLBACK}. "
            f"Load its file with --plugin, or choose with --protocol."
        )
        return FALLBACK
    return str(METHODS[method].linear_protocol)
