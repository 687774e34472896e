"""All hunts over one collection, and what they found as tables of text: for the page, and for CSV files."""

from __future__ import annotations

from collections.abc import Sequence
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
from adasim.explore.labels import LabelMass, agreement, confusion, distance_ratio, label_mass, wrong_labels
from adasim.explore.looks import Looks
from adasim.explore.outliers import lonely, popularity, surprising
from adasim.explore.support import Support, nearest_others

NEAREST = 10
"""Nearest images, by features, that second opinions and duplicates look at."""


@dataclass
class Findings:
    """What was found. Ids are those of the collection."""

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
    readable = torch.tensor([bool(found) for found in looks.hashes])
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


@dataclass(frozen=True)
class Table:
    """A list of findings as text: what the page shows and exports, and what `--csv` writes."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


IMAGE = ("id", "split", "file", "label")
"""The columns that say which image a row is about."""


def tables(collection: Collection, support: Support, findings: Findings) -> dict[str, Table]:
    """The lists by name: duplicates, wrong-labels (where there are labels), surprising, lonely."""
    found = {"duplicates": _duplicates(collection, findings.groups)}
    if findings.mass is not None:
        found["wrong-labels"] = _wrong_labels(collection, findings, findings.mass)
    found["surprising"] = _surprising(collection, support, findings)
    found["lonely"] = _lonely(collection, findings)
    return found


def _image(collection: Collection, i: int) -> tuple[str, ...]:
    return str(i), collection.splits[collection.split_of[i]], collection.names[i], collection.class_name(i)


def _duplicates(collection: Collection, groups: Sequence[Group]) -> Table:
    rows = []
    for number, group in enumerate(groups, 1):
        labels = {collection.class_name(i) for i in group.members}
        reason = {
            "exact": "The same pixels.",
            "near": f"Nearly the same picture (its detail differs by {group.difference:.2f}).",
            "same scene": f"Alike to the encoder, though the detail differs (by {group.difference:.2f}).",
        }[group.kind]
        if group.straddles:
            reason += f" In {' and '.join(collection.splits)}: what is tested was trained on."
        if len(labels) > 1:
            reason += f" Labelled {', '.join(sorted(name or 'nothing' for name in labels))}."
        for place, i in enumerate(group.members):
            keep = "no" if place else "yes"
            straddles = "yes" if group.straddles else "no"
            rows.append((*_image(collection, i), str(number), group.kind, keep, straddles, reason))
    return Table((*IMAGE, "group", "kind", "keep", "straddles", "reason"), rows)


def _wrong_labels(collection: Collection, findings: Findings, mass: LabelMass) -> Table:
    rows = []
    for i in findings.suspects.tolist():
        own, suggested = collection.class_name(i), collection.classes[int(mass.suggested[i])]
        reason = f"{mass.other[i]:.0%} of its neighbours' mass is on {suggested}, {mass.own[i]:.0%} on {own}."
        agreeing, ratio = float(findings.agreement[i]), float(findings.ratio[i])
        rows.append(
            (
                *_image(collection, i),
                suggested,
                *(f"{value:.4f}" for value in (1 - mass.own[i], mass.other[i], mass.own[i])),
                _number(agreeing),
                _number(ratio),
                reason,
            )
        )
    columns = (
        "suggested",
        "foreign_mass",
        "suggested_mass",
        "own_mass",
        "agreeing_neighbours",
        "distance_ratio",
    )
    return Table((*IMAGE, *columns, "reason"), rows)


def _surprising(collection: Collection, support: Support, findings: Findings) -> Table:
    own = support.self_match()
    rows = []
    for i, excess in zip(findings.surprising.tolist(), findings.excess.tolist(), strict=True):
        best, p = int(support.neighbours[i, 0]), float(support.p[i, 0])
        reason = f"Its best match is image {best} with {p:.0%}; itself it matches with {float(own[i]):.0%}."
        rows.append(
            (*_image(collection, i), str(best), f"{p:.4f}", f"{float(own[i]):.4f}", f"{excess:.4f}", reason)
        )
    return Table((*IMAGE, "best_match", "best_probability", "self_probability", "excess", "reason"), rows)


def _lonely(collection: Collection, findings: Findings) -> Table:
    rows = []
    for i in findings.lonely.tolist():
        nearest, distance = int(findings.nearest[i]), float(findings.distance[i])
        reason = (
            f"In no other image's support; the nearest is image {nearest}, at a distance of {distance:.3f}."
        )
        rows.append((*_image(collection, i), str(nearest), f"{distance:.4f}", reason))
    return Table((*IMAGE, "nearest", "distance", "reason"), rows)


def _number(value: float) -> str:
    return "" if value != value else f"{value:.4f}"
