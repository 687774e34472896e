"""Copies and wrong labels planted among generated images, for tools that claim to find them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adasim.data.synthetic import FAMILIES, SyntheticImages, synthetic
from adasim.util import seeding

Pair = tuple[int, int]


@dataclass
class Planted:
    images: SyntheticImages
    duplicates: list[Pair]
    """(copy, original): equal pixel for pixel."""
    near_duplicates: list[Pair]
    """(copy, original): slightly turned, shifted, relit, with noise of its own."""
    wrong_labels: list[Pair]
    """(image, its true class)."""


def planted(count: int, seed: int = 0, *, exact: int = 0, near: int = 0, wrong: int = 0) -> Planted:
    """`synthetic(count)` with so many copies, near copies and wrong labels at places that never overlap."""
    assert 2 * (exact + near) + wrong <= count
    data = synthetic(count, seed=seed)
    images, masks, labels = data.images, data.masks, data.labels
    places = seeding.permutation(seed, "embedded train planted", 0, count)
    copies, originals = places[: exact + near], places[exact + near : 2 * (exact + near)]
    mislabelled = places[2 * (exact + near) :][:wrong]
    images[copies], masks[copies], labels[copies] = images[originals], masks[originals], labels[originals]
    if near:
        images[copies[exact:]] = _disturb(seed, copies[exact:], images[copies[exact:]])
    truth = labels[mislabelled].clone()
    step = seeding.uniform(seed, "embedded train wrong", 0, mislabelled)[:, 0]
    labels[mislabelled] = (truth + 1 + (step * (len(FAMILIES) - 1)).long()) % len(FAMILIES)
    pairs = list(zip(copies.tolist(), originals.tolist(), strict=True))
    suspects = list(zip(mislabelled.tolist(), truth.tolist(), strict=True))
    return Planted(data, pairs[:exact], pairs[exact:], suspects)


def _disturb(seed: int, ids: Tensor, images: Tensor) -> Tensor:
    """Turn by up to 5 degrees, shift by up to 4%, relight by up to 10%, and add noise."""
    r = seeding.uniform(seed, "embedded train near", 0, ids, 4).float()
    angle = math.radians(5) * (2 * r[:, 0] - 1)
    shift = 0.08 * (2 * r[:, 1:3] - 1)
    rows = torch.stack([angle.cos(), -angle.sin(), shift[:, 0], angle.sin(), angle.cos(), shift[:, 1]], 1)
    grid = F.affine_grid(rows.view(-1, 2, 3), list(images.shape), align_corners=False)
    moved = F.grid_sample(images.float(), grid, padding_mode="reflection", align_corners=False)
    size = images.shape[-1]
    noise = seeding.uniform(seed, "embedded train near noise", 0, ids, size * size).float() - 0.5
    relit = moved * (0.9 + 0.2 * r[:, 3, None, None, None]) + 10 * noise.view(-1, 1, size, size)
    return relit.clamp(0, 255).round().to(torch.uint8)
