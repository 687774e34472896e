"""The hunts, as functions of tensors: wrong labels, surprising and lonely images. Those for duplicates are in
duplicates.py; `hunt` runs all of them. A label of -1 is unknown."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adasim.explore.collection import Collection
from adasim.explore.duplicates import (
    Group,
    find_groups,
    looks_as_features,
    mutual_neighbours,
    near_and_scenes,
)
from adasim.explore.looks import Looks
from adasim.explore.support import Support, nearest_others, unit_rows

NEAREST = 10
"""Nearest images, by features, that second opinions and duplicates look at."""
_ROWS = 512  # images whose distances to all are held at once

# ---- labels ----


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
        score = b.square() / (a.square() + b.square())
        # Both 0: copies with two labels; neither is the nearer one.
        score = torch.where((a == 0) & (b == 0), 0.5, score)
        ratio[ids[block]] = torch.where(torch.isfinite(a) & torch.isfinite(b), score, torch.nan)
    return ratio


# ---- outliers ----


def surprising(support: Support) -> tuple[Tensor, Tensor]:
    """Ids of images whose best match is another image, and by how much its probability exceeds theirs; most first."""
    excess = support.p[:, 0] - support.self_match()
    ids = (excess > 0).nonzero()[:, 0]
    order = excess[ids].argsort(descending=True, stable=True)
    return ids[order], excess[ids[order]]


def popularity(support: Support) -> Tensor:
    """(N,): in how many other images' supports an image stands."""
    listed = support.neighbours[~support.is_self() & (support.neighbours >= 0) & (support.p > 0)]
    return torch.bincount(listed, minlength=len(support))


def lonely(support: Support, distances: Tensor) -> Tensor:
    """Ids of images in nobody's support, the farthest from its nearest other image first.

    Args:
        distances: (N,), to the nearest other image; where it is not finite the image could not be looked at, and
            is left out.
    """
    ids = ((popularity(support) == 0) & torch.isfinite(distances)).nonzero()[:, 0]
    return ids[distances[ids].argsort(descending=True, stable=True)]


# ---- all together ----


@dataclass
class Findings:
    """What the hunts found. Ids are those of the collection."""

    groups: list[Group]
    """Duplicates."""
    suspects: Tensor
    """Wrong labels, worst first."""
    mass: LabelMass | None
    agreement: Tensor
    ratio: Tensor
    """Second opinions on every image's label; NaN where there is none."""
    confusion: dict[tuple[int, int], float]
    surprising: Tensor
    excess: Tensor
    lonely: Tensor
    nearest: Tensor
    """(N,): the nearest other image by features; -1 where there is none."""
    distance: Tensor
    """(N,): how far it is."""
    popularity: Tensor


def hunt(
    collection: Collection, support: Support, features: Tensor, looks: Looks, remembered: int | None = None
) -> Findings:
    """Run every hunt.

    Args:
        features: (N, D), one centred view of every image; NaN for one that cannot be read.
        remembered: only so many images, the first ones, could become anybody's neighbour, and so be lonely.
    """
    distances, ids = nearest_others(features, NEAREST)
    readable = torch.tensor([bool(digest) for digest in looks.hashes])
    pictures = torch.where(readable[:, None], looks_as_features(looks.small), torch.nan)
    pairs, differences, near = near_and_scenes(
        mutual_neighbours(distances, ids), mutual_neighbours(*nearest_others(pictures, NEAREST)), looks.small
    )
    usable = readable[pairs].all(1)  # given features may know an image that cannot be read
    groups = find_groups(
        looks.hashes,
        pairs[usable],
        differences[usable],
        near[usable],
        collection.split_of,
        looks.sizes.prod(1).tolist(),
    )
    unknown = torch.full((len(collection),), torch.nan, dtype=torch.float64)
    mass, agreeing, ratio, cells = None, unknown, unknown, {}
    suspects = torch.empty(0, dtype=torch.int64)
    labels = collection.labels
    if labels is not None:
        mass = label_mass(support, labels)
        agreeing, ratio = agreement(ids, labels), distance_ratio(features, labels)
        suspects = wrong_labels(mass, labels, ratio)
        cells = confusion(support, labels)
    odd, excess = surprising(support)
    alone = lonely(support, distances[:, 0]) if distances.shape[1] else torch.empty(0, dtype=torch.int64)
    return Findings(
        groups=groups,
        suspects=suspects,
        mass=mass,
        agreement=agreeing,
        ratio=ratio,
        confusion=cells,
        surprising=odd,
        excess=excess,
        lonely=alone[alone < (len(collection) if remembered is None else remembered)],
        nearest=ids[:, 0] if ids.shape[1] else torch.full((len(collection),), -1),
        distance=distances[:, 0] if distances.shape[1] else unknown,
        popularity=popularity(support),
    )
