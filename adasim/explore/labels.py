"""Wrong labels: images whose neighbours carry another label, and two second opinions. A label of -1 is unknown."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adasim.explore.support import Support, unit_rows

_ROWS = 512  # images whose distances to all are held at once


@dataclass(frozen=True)
class LabelMass:
    """How p_win, the image itself left out, is spread over labels; all (N,)."""

    own: Tensor
    """Mass on the image's own label."""
    other: Tensor
    """Mass on the other label that has the most of it."""
    suggested: Tensor
    """That label; -1 where no neighbour has another one."""
    known: Tensor
    """Whether the image and a neighbour of it have labels at all."""


def label_mass(support: Support, labels: Tensor) -> LabelMass:
    """The mass of each image's neighbours on its own label and on the strongest other one.

    Neighbours without a label do not vote. Ties go to the smaller label.
    """
    theirs = torch.where(support.neighbours >= 0, labels[support.neighbours.clamp(min=0)], -1)  # (N, S)
    p = support.others() * (theirs >= 0)
    total = p.sum(1, keepdim=True)
    p = p / total.clamp(min=1e-300)
    is_own = theirs == labels[:, None]
    # (N, S): the whole mass on the label of each neighbour
    mass = torch.stack([(p * (theirs == column[:, None])).sum(1) for column in theirs.unbind(1)], dim=1)
    foreign = mass.masked_fill(is_own | (theirs < 0), -1.0)
    other = foreign.amax(1)
    best = foreign >= (other - 1e-12)[:, None]
    suggested = torch.where(best, theirs, torch.iinfo(torch.int64).max).amin(1)
    none = other < 0
    known = (labels >= 0) & (total[:, 0] > 0)
    return LabelMass(
        own=(p * is_own).sum(1) * known,
        other=other.clamp(min=0) * known,
        suggested=torch.where(none | ~known, -1, suggested),
        known=known,
    )


def wrong_labels(mass: LabelMass, labels: Tensor, ratio: Tensor) -> Tensor:
    """Ids of the suspects, the one with the most mass on other labels first.

    A suspect has more mass on another label than on its own, and on its own less than half of what images with that
    label have on average: so a poor encoder, or a class that is hard to tell, does not put everybody under suspicion.

    Args:
        labels: (N,)
        ratio: (N,) of `distance_ratio`, which decides between equals: few neighbours give many equals.
    """
    own = labels[mass.known]
    expected = torch.zeros(int(labels.max().clamp(min=0)) + 1, dtype=torch.float64)
    expected.index_add_(0, own, mass.own[mass.known])
    expected /= torch.bincount(own, minlength=len(expected)).clamp(min=1)
    suspicious = mass.known & (mass.other > mass.own) & (mass.own < expected[labels.clamp(min=0)] / 2)
    suspects = suspicious.nonzero()[:, 0]
    order = ratio[suspects].nan_to_num(1.0).argsort(stable=True)
    # Rounded, so that equals are equals: the last bits of a sum are nobody's opinion.
    rounded = mass.own[suspects].mul(1e4).round()
    return suspects[order[rounded[order].argsort(stable=True)]]


def confusion(support: Support, labels: Tensor) -> dict[tuple[int, int], float]:
    """{(a, b): the mean mass that images labelled a have on label b}, where it is not 0."""
    neighbours, p = support.neighbours, support.others()
    theirs = torch.where(neighbours >= 0, labels[neighbours.clamp(min=0)], -1)
    valid = (p > 0) & (theirs >= 0) & (labels >= 0)[:, None]
    counted = valid.any(1)
    if not counted.any():
        return {}
    p = p * valid
    p = p / p.sum(1, keepdim=True).clamp(min=1e-300)
    classes = int(labels.max()) + 1
    cells = (labels[:, None] * classes + theirs)[valid]
    pairs, place = cells.unique(return_inverse=True)
    sums = torch.zeros(len(pairs), dtype=torch.float64).index_add_(0, place, p[valid])
    sizes = torch.bincount(labels[counted], minlength=classes)
    means = sums / sizes[pairs // classes]
    return {(int(c) // classes, int(c) % classes): m for c, m in zip(pairs, means.tolist(), strict=True)}


def agreement(neighbours: Tensor, labels: Tensor) -> Tensor:
    """(N,): the share of an image's nearest neighbours (N, K) with its label; NaN where none has one."""
    theirs = torch.where(neighbours >= 0, labels[neighbours.clamp(min=0)], -1)
    voting = (theirs >= 0) & (labels >= 0)[:, None]
    return ((theirs == labels[:, None]) & voting).sum(1).double() / voting.sum(1)


def distance_ratio(features: Tensor, labels: Tensor) -> Tensor:
    """SelfClean's score for label errors (arXiv 2305.17048): b^2 / (a^2 + b^2), (N,); the lower, the more suspicious.

    a is the distance to the nearest image of the same label, b to the nearest of another, each half of 1 - cosine.
    Below 0.5 an image of another label is closer. NaN where one of the two does not exist.
    """
    unit = unit_rows(features)
    usable = torch.isfinite(unit[:, 0]) & (labels >= 0)
    ids = usable.nonzero()[:, 0]
    rows, own = unit[ids], labels[ids]
    ratio = torch.full((len(unit),), torch.nan, dtype=torch.float64)
    for block in torch.arange(len(ids)).split(_ROWS) if len(ids) else ():
        similarities = rows[block] @ rows.T  # (B, n)
        similarities[torch.arange(len(block)), block] = -torch.inf
        same = own[block, None] == own
        a = (1 - similarities.masked_fill(~same, -torch.inf).amax(1).double()).clamp(min=0) / 2
        b = (1 - similarities.masked_fill_(same, -torch.inf).amax(1).double()).clamp(min=0) / 2
        found = b.square() / (a.square() + b.square())
        # Both 0: copies with two labels; neither is the nearer one.
        found = torch.where((a == 0) & (b == 0), 0.5, found)
        ratio[ids[block]] = torch.where(torch.isfinite(a) & torch.isfinite(b), found, torch.nan)
    return ratio
