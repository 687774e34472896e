"""Features and labels as the protocols take them: what cannot be measured is refused here, in one sentence."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from adasim.util.errors import UserError
from adasim.util.terminal import few

_SUM_TYPE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class CheckedSets(NamedTuple):
    """Checked train and test sets; labels became 0..C-1, in the order of the C values seen in training."""

    train: Tensor  # (N, D)
    train_labels: Tensor  # (N,) int64
    test: Tensor  # (M, D)
    test_labels: Tensor  # (M,) int64
    classes: Tensor  # (C,) the labels as they were given


def check_split(train: Any, train_labels: Any, test: Any, test_labels: Any) -> CheckedSets:
    """Two labelled sets of features (tensors or arrays) that fit together, or a UserError."""
    train, test = check_features(train, "train_features"), check_features(test, "test_features")
    if train.shape[1] != test.shape[1]:
        raise UserError(
            f"train_features are {train.shape[1]} wide and test_features {test.shape[1]}. "
            f"Extract both with the same backbone."
        )
    train_labels = check_labels(train_labels, len(train), "train_labels").to(train.device)
    test_labels = check_labels(test_labels, len(test), "test_labels").to(train.device)
    classes, train_labels = train_labels.unique(return_inverse=True)  # sorted: the order of classes is kept
    places = torch.searchsorted(classes, test_labels).clamp(max=len(classes) - 1)
    unseen = test_labels[classes[places] != test_labels].unique().tolist()
    if unseen:
        raise UserError(
            f"test_labels hold {some_ids(unseen)} that train_labels never show. "
            f"Leave those images out, or train on a split that has every class."
        )
    return CheckedSets(train, train_labels, test.to(train.device), places, classes)


def check_features(features: Any, name: str) -> Tensor:
    """An (N, D) table of finite floating-point features, N and D at least 1."""
    features = torch.as_tensor(features)
    if features.ndim != 2 or features.numel() == 0:
        raise UserError(f"{name} has shape {tuple(features.shape)}; give a non-empty (images, width) table.")
    if not features.is_floating_point():
        raise UserError(f"{name} holds {features.dtype}; give floating-point features.")
    # A row's sum is finite only if every value is; the other way round overflow may deceive, so look again.
    sums = features.sum(dim=1, dtype=_SUM_TYPE.get(features.dtype))
    for row in (~sums.isfinite()).nonzero()[:, 0].tolist():
        if not features[row].isfinite().all():
            raise UserError(
                f"{name} has a NaN or infinite value in row {row}. "
                f"Leave that image out, or extract again in fp32 from a checkpoint that did not diverge."
            )
    return features


def check_labels(labels: Any, count: int, name: str) -> Tensor:
    """One whole-number label of 0 or more per image, as int64; -1 stands for a missing label."""
    labels = torch.as_tensor(labels)
    if labels.ndim != 1 or len(labels) != count:
        raise UserError(
            f"{name} has shape {tuple(labels.shape)} for {count} images; give one label per image."
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise UserError(f"{name} holds {labels.dtype}; give whole numbers, one per class.")
    labels = labels.to(torch.int64)
    missing = int((labels < 0).sum())
    if missing:
        row = int((labels < 0).nonzero()[0])
        raise UserError(
            f"{name}: {missing} of {count} images have no label (the first is row {row}). "
            f"Label them or leave them out."
        )
    return labels


def check_positive(**values: float) -> None:
    """Refuse any named value that is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise UserError(f"{name}={value} must be above 0.")


def some_ids(values: list[int]) -> str:
    """The first few of them, in words."""
    return f"id{'s' if len(values) > 1 else ''} {few(map(str, values), 5)}"
