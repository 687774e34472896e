"""The linear probe finds what a textbook solver finds on the same frozen features."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits
from torch import Tensor

from adasim.config import ModelConfig
from adasim.data import synthetic
from adasim.eval import linear_probe
from adasim.eval.features import extract
from adasim.models import build_backbone
from adasim.models.transforms import EvalTransform
from adasim.options import SWEEP

pytestmark = pytest.mark.slow

Features = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.mark.parametrize("protocol", ["dino", "simsiam"])
def test_the_linear_probe_agrees_with_logistic_regression_within_one_point(
    features: Features, textbook: float, protocol: Literal["dino", "simsiam"]
) -> None:
    train, train_labels, test, test_labels = features

    def last(asked: Tensor, labels: Tensor) -> list[float]:
        result = linear_probe(
            *(train, train_labels, asked, labels), rates=SWEEP, protocol=protocol, batch_size=256
        )
        return [score.top1 for score in result.last_epochs()]

    fit = last(
        train, train_labels
    )  # the solver minimises the training loss: take the rate that comes nearest
    accuracy = last(test, test_labels)[fit.index(max(fit))]
    assert abs(accuracy - textbook) <= 1


@pytest.fixture(scope="module")
def features() -> Features:
    """Of the synthetic images, by an untrained encoder: training features and labels, then test."""
    torch.manual_seed(0)
    backbone = build_backbone(ModelConfig(name="resnet_tiny"), 32, student=False)
    transform = EvalTransform.of_size(32, (0.5,), (0.25,))
    sets = synthetic(4000, 32), synthetic(2000, 32, split="test")
    train, test = (extract(backbone, images, transform) for images in sets)
    mean, std = train.mean(0), train.std(0)  # so that every solver ends soon
    return (train - mean) / std, sets[0].labels, (test - mean) / std, sets[1].labels


@pytest.fixture(scope="module")
def textbook(features: Features) -> float:
    """scikit-learn's accuracy in percent."""
    train, train_labels, test, test_labels = (part.numpy() for part in features)
    with threadpool_limits(1):
        solver = LogisticRegression(max_iter=1000).fit(train, train_labels)
    accuracy = 100 * solver.score(test, test_labels)
    assert accuracy > 12  # chance is 6.25
    return accuracy
