"""A linear layer on frozen features, for one learning rate or for several at once as one stacked layer.

Two protocols. `dino`: SGD with momentum, no decay (Caron et al., 2021). `simsiam`: the same with LARS (Chen and He,
2021; You et al., 2017). Each can have the other's optimiser. Both begin at normal(0, 0.01) weights and zero biases,
and take the rate from lr * batch_size / 256 to 0 by a cosine that moves once an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from adasim.eval.features import FeatureKind
from adasim.eval.tensors import check_features, check_labels, check_positive, check_split
from adasim.util import seeding
from adasim.util.errors import UserError

Batches = Iterable[tuple[Tensor, Tensor]]
"""(B, D) features and their (B,) labels, batch after batch."""
Optimizer = Literal["sgd", "lars"]

_LOGITS = 1 << 24  # test logits held at a time


@dataclass(frozen=True, kw_only=True)
class LinearProtocol:
    """Published settings, which an argument of None takes."""

    rate: float | None
    """Learning rate per 256 images; None: nothing is published."""
    conv_rate: float | None = None
    """The same where the encoder is no ViT; None: `rate` as well."""
    epochs: int
    batch_size: int
    optimizer: Optimizer
    """SGD with momentum 0.9, plain or with gradients scaled by LARS (`lars_scale`)."""
    scale_bias: bool = True
    """Whether LARS scales the bias's gradient, too: so does apex's LARC, SimSiam's; DINO's LARS leaves it alone."""
    features: FeatureKind
    """What the layer sees: the encoder's own output, or the last blocks' CLS tokens."""
    bilinear: bool
    """Resize images bilinearly, and not as the encoder's own view does."""

    def published_rate(self, is_vit: bool = True) -> float:
        """The one rate for a ViT, or for another net."""
        rate = self.rate if is_vit or self.conv_rate is None else self.conv_rate
        if rate is None:
            raise UserError(
                f"No rate is published for this protocol with {self.optimizer}. Name one (--rates), or --sweep."
            )
        return rate


_SIMSIAM = LinearProtocol(
    rate=0.1, epochs=90, batch_size=4096, optimizer="lars", features="pooled", bilinear=True
)
LINEAR_PROTOCOLS: dict[str, LinearProtocol] = {
    "dino": LinearProtocol(
        rate=0.001,
        conv_rate=0.03,
        epochs=100,
        batch_size=1024,
        optimizer="sgd",
        scale_bias=False,
        features="linear-dino",
        bilinear=False,
    ),
    "simsiam": _SIMSIAM,  # the rate of its code; the paper has 0.02
    "simsiam-sgd": replace(_SIMSIAM, optimizer="sgd", rate=30.0, batch_size=256),  # tried in the same paper
}
"""By name. A method says by its `linear_protocol` which of them its encoders are measured by."""


def linear_protocol(name: str, optimizer: str = "auto") -> LinearProtocol:
    """The protocol of that name, with its own optimiser or with another; or a sentence."""
    if name not in LINEAR_PROTOCOLS:
        raise UserError(f"protocol={name!r} is unknown. Choose {' or '.join(LINEAR_PROTOCOLS)}.")
    if optimizer not in ("auto", *get_args(Optimizer)):
        raise UserError(
            f"optimizer={optimizer!r} is unknown. Choose auto, {' or '.join(get_args(Optimizer))}."
        )
    protocol = LINEAR_PROTOCOLS[name]
    if optimizer in ("auto", protocol.optimizer):
        return protocol
    unknown = replace(protocol, optimizer=cast(Optimizer, optimizer), rate=None, conv_rate=None)
    return LINEAR_PROTOCOLS.get(f"{name}-{optimizer}", unknown)


class Score(NamedTuple):
    """An accuracy in percent, and where it was reached (epochs count from 1)."""

    top1: float
    rate: float
    epoch: int
    top5: float


@dataclass(frozen=True)
class LinearResult:
    """Test accuracy of every rate after every epoch. What is chosen by it is chosen on the test set."""

    rates: tuple[float, ...]
    """Learning rates per 256 images."""
    top1: tuple[tuple[float, ...], ...]
    """Percent, one row per epoch and one column per rate."""
    top5: tuple[tuple[float, ...], ...]
    """The same for the five likeliest classes."""

    def last_epochs(self) -> tuple[Score, ...]:
        """Each rate's last epoch."""
        return self._scores()[-1]

    @property
    def best(self) -> Score:
        """The best epoch: how both papers report. Of several rates, the best one."""
        return max((score for scores in self._scores() for score in scores), key=lambda score: score.top1)

    @property
    def last(self) -> Score:
        """The last epoch; of several rates, that of the one which ends best."""
        return max(self.last_epochs(), key=lambda score: score.top1)

    def _scores(self) -> list[tuple[Score, ...]]:
        epochs = zip(self.top1, self.top5, strict=True)
        return [
            tuple(Score(a, rate, epoch, b) for a, b, rate in zip(top1, top5, self.rates, strict=True))
            for epoch, (top1, top5) in enumerate(epochs, start=1)
        ]


def linear_probe(
    train_features: Any,
    train_labels: Any,
    test_features: Any,
    test_labels: Any,
    *,
    rates: Sequence[float] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    protocol: str = "dino",
    optimizer: str = "auto",
    seed: int = 0,
) -> LinearResult:
    """Train linear heads on cached features (the quick mode: every epoch sees the same features).

    Args:
        train_features: (N, D); used as they are.
        train_labels: (N,) whole numbers, in any range.
        test_features: (M, D).
        test_labels: (M,); each must occur among `train_labels`.
        rates: learning rates per 256 images, one head each; None takes the published one (DINO's for a ViT).
        epochs, batch_size: None takes the published ones.
        protocol: a name of `LINEAR_PROTOCOLS`.
        optimizer: `sgd` or `lars`, if not the protocol's own.
    """
    split = check_split(train_features, train_labels, test_features, test_labels)
    published = linear_protocol(protocol, optimizer)
    batch_size = published.batch_size if batch_size is None else batch_size
    check_positive(batch_size=batch_size)

    def shuffled(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = seeding.permutation(seed, "linear order", epoch, len(split.train)).to(split.train.device)
        for ids in order.split(batch_size):
            yield split.train.index_select(0, ids), split.train_labels[ids]

    classes = len(split.classes)
    return _train(
        shuffled, split.test, split.test_labels, classes, rates, epochs, batch_size, published, seed
    )


def linear_probe_stream(
    epoch_batches: Callable[[int], Batches],
    test_features: Any,
    test_labels: Any,
    *,
    num_classes: int,
    rates: Sequence[float] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    protocol: str = "dino",
    optimizer: str = "auto",
    seed: int = 0,
) -> LinearResult:
    """Train linear heads on features that are made anew for each epoch (from 0), as augmentation asks for.

    Labels are 0..num_classes-1, and `batch_size` is the size of a full batch: it scales the rates. The rest
    is as for `linear_probe`. One pass of the backbone feeds all rates.
    """
    test_features = check_features(test_features, "test_features")
    test_labels = check_labels(test_labels, len(test_features), "test_labels").to(test_features.device)
    if int(test_labels.max()) >= num_classes:
        raise UserError(f"test_labels hold {int(test_labels.max())}, but num_classes={num_classes}.")
    published = linear_protocol(protocol, optimizer)
    batch_size = published.batch_size if batch_size is None else batch_size
    check_positive(batch_size=batch_size)

    def checked(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for features, labels in epoch_batches(epoch):
            yield features, _check_batch(features, labels, test_features.shape[1], num_classes)

    return _train(
        checked, test_features, test_labels, num_classes, rates, epochs, batch_size, published, seed
    )


class StackedHeads:
    """R linear heads over the same features: one product forward, one back, then each head's own step.

    All heads begin at the same weights, so that what a rate reaches does not depend on its company. `scaled` says
    whether LARS scales the gradients of the weights, and of the biases.
    """

    def __init__(
        self,
        rates: int,
        dim: int,
        num_classes: int,
        seed: int,
        scaled: tuple[bool, bool],
        device: torch.device,
    ) -> None:
        with seeding.seeded(seeding.key(seed, "linear head")):
            weight = torch.empty(num_classes, dim).normal_(std=0.01)
        self.weight = weight.to(device).repeat(rates, 1, 1)  # (R, C, D)
        self.bias = torch.zeros(rates, num_classes, device=device)  # (R, C)
        self.scaled = scaled
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
        for value, gradient, velocity, scaled in zip(
            (self.weight, self.bias), gradients, self._velocity, self.scaled, strict=True
        ):
            if scaled:
                gradient *= _per_head(lars_scale(value, gradient), gradient)
            velocity.mul_(0.9).add_(gradient)
            value.addcmul_(velocity, _per_head(lr, velocity), value=-1)


def lars_scale(value: Tensor, gradient: Tensor, trust: float = 0.001) -> Tensor:
    """LARS without decay (LARC without clipping): trust * |w| / |g| for each of R stacked tensors, shape (R,).

    Where either norm is 0 (a bias at its start) the gradient stays as it is, as in apex, which SimSiam used.
    """
    norm = torch.linalg.vector_norm(value.flatten(1), dim=1)
    slope = torch.linalg.vector_norm(gradient.flatten(1), dim=1)
    return torch.where((norm != 0) & (slope != 0), trust * norm / (slope + 1e-8), 1.0)


def _train(
    epoch_batches: Callable[[int], Batches],
    test: Tensor,
    test_labels: Tensor,
    num_classes: int,
    rates: Sequence[float] | None,
    epochs: int | None,
    batch_size: int,
    published: LinearProtocol,
    seed: int,
) -> LinearResult:
    rates = (published.published_rate(),) if rates is None else tuple(float(rate) for rate in rates)
    epochs = published.epochs if epochs is None else epochs
    check_positive(epochs=epochs, num_classes=num_classes, rates=min(rates, default=0))
    lars = published.optimizer == "lars"
    scaled = (lars, lars and published.scale_bias)
    heads = StackedHeads(len(rates), test.shape[1], num_classes, seed, scaled, test.device)
    peak = torch.tensor(rates, device=test.device) * batch_size / 256
    top1, top5 = [], []
    for epoch in range(epochs):
        lr = peak * (0.5 * (1 + math.cos(math.pi * epoch / epochs)))
        seen = 0
        for features, labels in epoch_batches(epoch):
            heads.step(features.to(test.device, torch.float32), labels.to(test.device), lr)
            seen += len(labels)
        if not seen:
            raise UserError(f"Epoch {epoch} of the linear probe has no images. Check the training split.")
        right, among_five = _accuracy(heads, test, test_labels)
        top1.append(right)
        top5.append(among_five)
    return LinearResult(rates, tuple(top1), tuple(top5))


def _accuracy(
    heads: StackedHeads, features: Tensor, labels: Tensor
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Percent right per head, and percent among the five likeliest classes.

    Logits that are not finite are never right: a rate that diverged scores 0.
    """
    hits = torch.zeros(2, len(heads.bias), dtype=torch.int64, device=features.device)
    step = max(1, _LOGITS // heads.bias.numel())
    for start in range(0, len(features), step):
        some = labels[start : start + step]
        logits = heads.logits(features[start : start + step].float())  # (R, C, B)
        best, guess = logits.max(dim=1)  # (R, B)
        finite = torch.isfinite(best)
        own = logits.gather(1, some.expand(len(logits), 1, -1))  # (R, 1, B)
        hits[0] += ((guess == some) & finite).sum(dim=1)
        hits[1] += (((logits > own).sum(dim=1) < 5) & finite).sum(dim=1)
    right, among_five = (hits.double() * 100 / len(features)).tolist()
    return tuple(right), tuple(among_five)


def _per_head(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))


def _check_batch(features: Tensor, labels: Tensor, dim: int, num_classes: int) -> Tensor:
    """One batch of a stream, for a head of `num_classes` over width `dim`; returns the labels as int64."""
    features = check_features(features, "a training batch")
    if features.shape[1] != dim:
        raise UserError(
            f"A training batch is {features.shape[1]} wide and test_features {dim}. Use one backbone."
        )
    labels = check_labels(labels, len(features), "the labels of a training batch")
    if int(labels.max()) >= num_classes:
        raise UserError(f"A training batch holds label {int(labels.max())}, but num_classes={num_classes}.")
    return labels
