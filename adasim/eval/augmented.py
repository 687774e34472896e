"""Features of freshly cropped and flipped training images, epoch after epoch, for the linear protocols."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.data import ImageSet, PairLoader
from adasim.eval.features import FeatureKind, encode, frozen
from adasim.models import Backbone
from adasim.models.transform import EvalTransform

Batches = Iterable[tuple[Tensor, Tensor]]
"""(B, D) features and their (B,) labels, batch after batch."""


def augmented_batches(
    backbone: Backbone,
    images: ImageSet,
    labels: Tensor,
    transform: EvalTransform,
    *,
    kind: FeatureKind,
    batch_size: int,
    device: torch.device | str = "cpu",
    workers: int = 0,
    seed: int = 0,
) -> Callable[[int], Batches]:
    """A function from an epoch to its batches of features (B, D) and labels (B,).

    A view is a random crop of 8% to 100% of the area, resized bilinearly, and flipped half of the time. The
    images left over at an epoch's end are dropped; each epoch leaves others.
    """
    views = ViewsConfig(
        interpolation="bilinear",  # as both papers' linear protocols
        size=transform.size,
        scale=(0.08, 1.0),
        color=0.0,
        blur=0.0,
        solarize=0.0,
        reduced_jpeg=False,  # as published
        mean=transform.mean,
        std=transform.std,
    )
    backbone.to(device)
    loader = PairLoader(images, views, batch_size=batch_size, seed=seed, workers=workers, device=device)

    def batches(epoch: int) -> Batches:
        for batch in loader.views(epoch, loader.batches(epoch)):
            with frozen(backbone), torch.no_grad():
                features = encode(backbone, batch.views[0], kind).float()
            yield features, labels[batch.ids.cpu()]

    return batches
