"""Intersection over union of predicted and true masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adasim.eval.tensors import check_positive, some_ids
from adasim.util.errors import UserError

_PIXELS = 1 << 22  # pixels counted at a time


class MeanIou(NamedTuple):
    """Intersection over union in percent, from counts over all pixels of all images."""

    miou: float
    """Mean over all classes; a class that is in no mask and no prediction counts 0, as published."""
    miou_present: float
    """The same mean without such absent classes."""
    iou: tuple[float, ...]
    """Per class; 0 for an absent one."""


class Confusion:
    """Counts of (true class, predicted class) pixels, over as many images as are added."""

    def __init__(self, num_classes: int, ignore: int = 255, left_out: Sequence[int] = ()) -> None:
        check_positive(num_classes=num_classes)
        self.num_classes = num_classes
        self.ignore = ignore
        self.left_out = [i for i in left_out if 0 <= i < num_classes]
        self.counts = torch.zeros(num_classes, num_classes, dtype=torch.int64)  # (true, predicted)

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        """Count class ids of equal shapes; pixels whose target is `ignore` are left out."""
        if predictions.shape != targets.shape:
            raise UserError(
                f"The predictions have shape {tuple(predictions.shape)} and the masks "
                f"{tuple(targets.shape)}. Resize one to the other before they are compared."
            )
        check_masks(targets, self.num_classes, self.ignore)
        C = self.num_classes
        for guess, truth in zip(
            predictions.flatten().split(_PIXELS), targets.flatten().split(_PIXELS), strict=True
        ):
            kept = truth != self.ignore
            guess, truth = guess[kept].to(torch.int64), truth[kept].to(torch.int64)
            if len(guess) and not 0 <= int(guess.min()) <= int(guess.max()) < C:
                raise UserError(f"The predictions hold ids outside 0 to {C - 1}. Raise num_classes.")
            self.counts += torch.bincount(truth * C + guess, minlength=C * C).view(C, C).cpu()

    def result(self) -> MeanIou:
        """IoU = tp / (tp + fp + fn) of each class, and its means."""
        both = self.counts.diagonal()  # tp
        either = self.counts.sum(dim=0) + self.counts.sum(dim=1) - both  # tp + fp + fn
        if not int(either.sum()):
            raise UserError(
                f"Every pixel of the masks is {self.ignore} (ignored), so there is nothing to score."
            )
        iou = 100 * both.double() / either.clamp(min=1)
        scored = torch.ones(self.num_classes, dtype=torch.bool)
        scored[self.left_out] = False
        present = scored & (either > 0)
        return MeanIou(float(iou[scored].mean()), float(iou[present].mean()), tuple(iou.tolist()))


def miou(predictions: Tensor, targets: Tensor, num_classes: int, ignore: int = 255) -> MeanIou:
    """Mean intersection over union of class ids, both of shape (images, H, W) or any other equal shape."""
    confusion = Confusion(num_classes, ignore)
    confusion.add(predictions, targets)
    return confusion.result()


def check_masks(masks: Tensor, num_classes: int, ignore: int) -> Tensor:
    """Masks of ids 0..num_classes-1 or `ignore`."""
    if masks.is_floating_point() or masks.is_complex() or masks.dtype == torch.bool:
        raise UserError(f"The masks hold {masks.dtype}; give whole numbers, one id per class.")
    unknown = masks[((masks < 0) | (masks >= num_classes)) & (masks != ignore)].unique().tolist()
    if unknown:
        raise UserError(
            f"The masks hold {some_ids(unknown)}; this data set has classes 0 to {num_classes - 1}, "
            f"and {ignore} for pixels to ignore. Remap the masks or raise num_classes."
        )
    return masks
