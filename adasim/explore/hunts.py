"""All hunts together: duplicates (duplicates.py), wrong labels (labels.py), surprising and lonely images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adasim.explore.duplicates import Group, find_groups, find_pairs
from adasim.explore.labels import LabelFindings, find_wrong_labels
from adasim.explore.looks import Looks
from adasim.explore.open import Opened
from adasim.explore.support import Nearest, Support

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
        distances: (N,), to the nearest other image; where it is not finite or 0 the image could not be looked at or
            has a copy, and is left out.
    """
    ids = ((popularity(support) == 0) & torch.isfinite(distances) & (distances > 1e-6)).nonzero()[:, 0]
    return ids[distances[ids].argsort(descending=True, stable=True)]


# ---- all together ----


@dataclass
class Findings:
    """What the hunts found. Ids are those of the collection."""

    groups: list[Group]
    """Duplicates."""
    labels: LabelFindings | None
    """Wrong labels; None where there are no labels to judge."""
    surprising: Tensor
    excess: Tensor
    lonely: Tensor
    nearest: Tensor
    """(N,): the nearest other image by features; -1 where there is none."""
    distance: Tensor
    """(N,): how far it is."""
    popularity: Tensor


def hunt(opened: Opened, looks: Looks, nearest: Nearest) -> Findings:
    """Run every hunt; `nearest` by features."""
    collection, support, features = opened.collection, opened.support, opened.features
    groups = find_groups(
        looks.hashes, find_pairs(nearest, looks.small), collection.split_of, looks.sizes.prod(1).tolist()
    )
    labels = None
    if collection.labels is not None:
        labels = find_wrong_labels(features, nearest, collection.labels, len(collection.classes))
    odd, excess = surprising(support)
    first = torch.full((len(collection),), -1), torch.full((len(collection),), torch.inf)
    if nearest.ids.shape[1]:
        first = nearest.ids[:, 0], nearest.distances[:, 0]
    copies = torch.tensor([i for group in groups if group.kind != "same scene" for i in group.members])
    alone = lonely(support, first[1].index_fill(0, copies.long(), torch.inf))
    remembered = len(collection) if opened.remembered is None else opened.remembered
    return Findings(
        groups=groups,
        labels=labels,
        surprising=odd,
        excess=excess,
        lonely=alone[alone < remembered],
        nearest=first[0],
        distance=first[1],
        popularity=popularity(support),
    )
