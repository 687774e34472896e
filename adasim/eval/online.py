"""k-NN accuracy while pretraining runs: a part of the training images against the rest."""

from __future__ import annotations

import math

import torch

from adasim.data import ImageSet, Subset
from adasim.eval.features import extract
from adasim.eval.protocols.knn import knn_accuracy
from adasim.eval.splits import require_labels
from adasim.models import Backbone
from adasim.models.transforms import EvalTransform
from adasim.util import seeding


def online_knn(
    backbone: Backbone,
    images: ImageSet,
    transform: EvalTransform,
    *,
    max_images: int = 5000,
    k: int = 20,
    device: torch.device | str = "cpu",
    workers: int = 0,
    seed: int = 0,
) -> float:
    """Top-1 in percent of a fifth of up to `max_images` training images, classified by the other four fifths.

    The images are the same at every call, so the values of a run compare. Nothing of the training state moves:
    no random number is drawn, and the encoder's modes and running statistics are left as they were. Images without
    a label are left out, and those of a class that the four fifths lack are not asked about; where none is left, the
    answer is NaN.
    """
    labels = require_labels(images)
    chosen = seeding.permutation(seed, "online k-NN", 0, len(images))
    chosen = chosen[labels[chosen] >= 0][:max_images]
    if not len(chosen):
        return math.nan
    unreadable: dict[int, str] = {}
    features = extract(
        backbone,
        Subset(images, chosen),
        transform,
        device=device,
        workers=workers,
        progress=False,
        unreadable=unreadable,
    )
    usable = features.isfinite().all(dim=1)  # neither unreadable nor diverged
    features, labels = features[usable], labels[chosen][usable]
    asked = len(labels) // 5
    bank, bank_labels = features[asked:], labels[asked:]
    known = torch.isin(labels[:asked], bank_labels)
    if not known.any():
        return math.nan
    result = knn_accuracy(
        bank, bank_labels, features[:asked][known], labels[:asked][known], k=min(k, len(bank))
    )
    return result.top1
