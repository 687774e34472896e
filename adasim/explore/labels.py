"""Wrong labels: what neighbours and a linear probe make of every image's label, and how labels are confused here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from adasim.explore.support import Nearest
from adasim.util.seeding import permutation
from adasim.util.terminal import progress_bar

# All chosen on CIFAR-10's test images with labels made wrong, and on generated images.
VOTES_WEIGHT = 0.5
"""How much the logarithm of the neighbours' vote counts beside the probe's."""
_DOUBT = 0.05  # of a vote, spread over all classes: fifty neighbours are no proof
_FOLDS, _STEPS, _WIDTH = 5, 20, 512  # of the probe: folds, Newton steps, width of its features
_AT_ONCE = 8192  # images in a part of a step
_FEW_CLASSES = 100  # beyond, two folds must do
_ANCHORS = 0.2  # of the images taken for a class the surest ones, whose labels tell how it is mislabelled
_PRIOR, _PRIOR_IMAGES = 0.3, 20  # images, in parts of the anchors and beside them, that have one rate for all
_EM_STEPS = 20  # of the estimate of how many labels are wrong
_CHANCE = 1.5  # standard deviations of a count that are put down to chance
SURE = 0.25
"""The list shows suspects down to this score, and at least the first `AT_LEAST`."""
AT_LEAST = 50


@dataclass(frozen=True)
class LabelFindings:
    """What is to be said about every image's label; all (N,) or (N, 2)."""

    known: Tensor
    """Whether the image has a label, features and neighbours with labels; where not, all else is 0."""
    score: Tensor
    """The estimated probability that the label is wrong."""
    suggested: Tensor
    """The likeliest other label; -1 where there is none."""
    votes: Tensor
    """Shares of the neighbours' vote on the image's label, and on the suggested one."""
    probe: Tensor
    """The probe's probabilities of the same two."""
    suspects: Tensor
    """Ids, the highest score first."""
    threshold: float
    """The score down to which the list pays."""
    estimate: int
    """About how many labels are wrong."""
    confusion: dict[tuple[int, int], float]
    """{(a, b): the mean share of votes on label b for images labelled a}, where it is not 0."""

    def judge(self, i: int) -> str:
        """Who finds the suggested label likelier than the image's own."""
        votes, probe = (bool(of[i, 1] > of[i, 0]) for of in (self.votes, self.probe))
        return "both" if votes and probe else "neighbours" if votes else "probe" if probe else "neither"


def find_wrong_labels(
    features: Tensor, nearest: Nearest, labels: Tensor, classes: int
) -> LabelFindings | None:
    """Judge every label by neighbours and a probe; None where fewer than two classes have images.

    P(class | image) is the product of the probe's out-of-fold probabilities and the square root of the neighbours'
    vote. With T[a, b] the rate at which images of class a are labelled b (`mislabelling_rates`), the probability
    that a label b is right is P(b) T[b, b] / sum over a of P(a) T[a, b]. With one rate for all pairs of classes that
    ranks by P(b) alone; where labels of two classes are exchanged it ranks by the margin between them.

    Args:
        features: (N, D), NaN for an image without.
        labels: (N,), -1 for an image without. It is a neighbour without a vote.
    """
    votes = neighbour_votes(nearest, labels, classes)
    known = (labels >= 0) & torch.isfinite(features).all(1) & (votes.sum(1) > 0)
    if len(labels[known].unique()) < 2:
        return None
    ids = known.nonzero()[:, 0]
    own, votes = labels[ids], votes[ids]
    probe = probe_probabilities(features[ids], own, classes)
    doubted = (1 - _DOUBT) * votes + _DOUBT / classes
    p = (probe.clamp(min=1e-7).log() + VOTES_WEIGHT * doubted.log()).softmax(1)
    rates = mislabelling_rates(p, own)
    q = posterior(p, rates, own)
    score = 1 - q.gather(1, own[:, None])[:, 0]
    suggested = q.scatter(1, own[:, None], -1).argmax(1)
    of_own = p.gather(1, own[:, None])[:, 0]
    sums, sizes = torch.zeros(classes).index_add_(0, own, of_own), torch.bincount(own, minlength=classes)
    # Less than half of what is usual for that label: else a poor encoder would suspect everybody.
    suspicious = (p.gather(1, suggested[:, None])[:, 0] > of_own) & (of_own < (sums / sizes)[own] / 2)
    order = score.argsort(descending=True, stable=True)
    suspects = order[suspicious[order]]
    last = min(AT_LEAST, len(suspects)) - 1
    threshold = min(SURE, float(score[suspects[last]])) if len(suspects) else SURE
    two = torch.stack([own, suggested], 1)
    cells = torch.zeros(classes, classes).index_add_(0, own, votes) / sizes.clamp(min=1)[:, None]

    def everywhere(values: Tensor, missing: float = 0) -> Tensor:
        return values.new_full((len(labels), *values.shape[1:]), missing).index_copy_(0, ids, values)

    return LabelFindings(
        known=known,
        score=everywhere(score),
        suggested=everywhere(suggested, -1),
        votes=everywhere(votes.gather(1, two)),
        probe=everywhere(probe.gather(1, two)),
        suspects=ids[suspects],
        threshold=threshold,
        estimate=estimate_wrong(p, rates, own),
        confusion={(a, b): float(cells[a, b]) for a, b in cells.nonzero().tolist()},
    )


def neighbour_votes(nearest: Nearest, labels: Tensor, classes: int) -> Tensor:
    """(N, C): the share of each label among the nearest images, nearer ones weighing more; 0 where none has one."""
    theirs = torch.where(nearest.ids >= 0, labels[nearest.ids.clamp(min=0)], -1)  # (N, K)
    known = theirs >= 0
    distances = nearest.distances.masked_fill(~known, torch.inf)
    beyond = distances - distances.amin(1, keepdim=True)
    # A third of the usual distance from the first neighbour to the last, so that the scale of the features is none.
    scale = beyond.masked_fill(~known, 0).amax(1).mean().clamp(min=1e-6) / 3
    weights = (-beyond / scale).exp().masked_fill(~known, 0)
    votes = torch.zeros(len(labels), classes).scatter_add_(1, theirs.clamp(min=0), weights)
    return votes / votes.sum(1, keepdim=True).clamp(min=1e-12)


def probe_probabilities(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(N, C): probabilities of a logistic regression on the features that was trained without the image's fold.

    All folds are trained at once, by accelerated steps along the gradient times the inverse of a bound on the
    Hessian (Boehning 1992), which is the same for all of them.
    """
    x = F.normalize(features.float(), dim=1)
    x = x - x.mean(0)
    x = x / x.square().sum(1).mean().sqrt().clamp(min=1e-12)
    if x.shape[1] > _WIDTH:
        x = x @ torch.linalg.eigh(x.T @ x)[1][:, -_WIDTH:]  # the principal components
    x = F.pad(x, (0, 1), value=1.0)
    folds = _FOLDS if classes <= _FEW_CLASSES else 2
    fold = permutation(0, "probe", 0, len(x)) % folds
    bound = torch.linalg.cholesky(x.T @ x * 0.5 + torch.eye(x.shape[1]))
    weights = ahead = x.new_zeros(x.shape[1], folds * classes)
    with progress_bar("labels", _STEPS) as advance:
        for step in range(_STEPS):
            gradient = ahead.clone()  # of the penalty
            for rows in torch.arange(len(x)).split(_AT_ONCE):
                residual = (x[rows] @ ahead).view(len(rows), folds, classes).softmax(2)
                residual -= F.one_hot(labels[rows], classes)[:, None]
                residual[torch.arange(len(rows)), fold[rows]] = 0  # held out
                gradient += x[rows].T @ residual.flatten(1)
            moved = ahead - torch.cholesky_solve(gradient, bound)
            weights, ahead = moved, moved + step / (step + 3) * (moved - weights)
            advance(1)
    return (x @ weights).view(len(x), folds, classes)[torch.arange(len(x)), fold].softmax(1)


def posterior(p: Tensor, rates: Tensor, labels: Tensor) -> Tensor:
    """(N, C): probabilities of the classes, given also the labels, and how often which is labelled so."""
    q = p * rates.T[labels]
    return q / q.sum(1, keepdim=True)


def estimate_wrong(p: Tensor, rates: Tensor, labels: Tensor) -> int:
    """About how many labels are wrong: expected under the rates that make these labels likeliest, found by EM."""
    for _ in range(_EM_STEPS):
        counts = (
            torch.zeros_like(rates).index_add_(0, labels, posterior(p, rates, labels)).T
        )  # (class, label)
        rates = counts / counts.sum(1, keepdim=True).clamp(min=1e-12)
    right = posterior(p, rates, labels).gather(1, labels[:, None])
    return round(float((1 - right).sum()))


def mislabelling_rates(p: Tensor, labels: Tensor) -> Tensor:
    """(C, C): how often images of class a are labelled b.

    Counted among the anchors of each class, the images that most surely belong to it: there hardly any other label
    comes from doubt. Counts are small, so each is lowered by what chance explains and then drawn towards one rate.
    """
    classes = p.shape[1]
    sureness, taken = p.max(1)
    order = sureness.argsort(descending=True, stable=True)
    counts = torch.zeros(classes, classes)
    for a in taken.unique().tolist():
        members = order[taken[order] == a]
        counts[a] = torch.bincount(labels[members[: max(1, int(_ANCHORS * len(members)))]], minlength=classes)
    anchors = counts.sum(1, keepdim=True)
    wrong = counts * (1 - torch.eye(classes))
    overall = (wrong.sum() + 1) / (anchors.sum() + 1) / (classes - 1)
    prior = _PRIOR * anchors + _PRIOR_IMAGES
    rates = ((wrong.sqrt() - _CHANCE).clamp(min=0).square() + prior * overall) / (anchors + prior)
    rates = rates * (1 - torch.eye(classes))
    return rates + torch.diag((1 - rates.sum(1)).clamp(min=1e-3))
