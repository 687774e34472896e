"""Suspicious labels: votes and rates against brute force, the probe against scikit-learn, and planted errors."""

import math

import pytest
import torch
from explore.test_support import features
from torch import Tensor

from adasim.explore.labels import (
    AT_LEAST,
    estimate_wrong,
    find_wrong_labels,
    mislabelling_rates,
    neighbour_votes,
    probe_probabilities,
)
from adasim.explore.support import nearest_others


def blobs(n: int = 600, classes: int = 4, spread: float = 0.45) -> tuple[Tensor, Tensor]:
    """Features around one centre a class, and their classes."""
    labels = torch.arange(n) % classes
    return 2 * features(classes, 16, seed=8)[labels] + 2 * spread * features(n, 16, seed=9), labels


def test_votes_are_shares_of_the_labelled_neighbours_the_nearer_weighing_more() -> None:
    x = features(80)
    labels = torch.randint(4, (80,), generator=torch.Generator().manual_seed(5))
    labels[::7] = -1
    nearest = nearest_others(x, 6)
    votes = neighbour_votes(nearest, labels, 4)
    reaches = []
    for i in range(80):
        there = [
            float(d) for d, j in zip(nearest.distances[i], nearest.ids[i], strict=True) if labels[j] >= 0
        ]
        reaches.append(max(there) - min(there) if there else 0.0)
    scale = sum(reaches) / 80 / 3
    for i in range(80):
        expected = [0.0] * 4
        for d, j in zip(nearest.distances[i].tolist(), nearest.ids[i].tolist(), strict=True):
            if labels[j] >= 0:
                expected[int(labels[j])] += math.exp(-d / scale)
        total = sum(expected)
        assert torch.allclose(
            votes[i], torch.tensor([e / total if total else 0.0 for e in expected]), atol=1e-4
        )


def test_the_probe_is_scikit_learns_logistic_regression_out_of_fold() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    x, labels = blobs(spread=1.0)
    p = probe_probabilities(x, labels, 4)
    unit = torch.nn.functional.normalize(x, dim=1)
    unit = unit - unit.mean(0)
    unit = unit / unit.square().sum(1).mean().sqrt()
    from adasim.util.seeding import permutation

    fold = permutation(0, "probe", 0, len(x)) % 5
    for held in range(5):
        model = linear_model.LogisticRegression(C=1.0, max_iter=500, tol=1e-6)
        model.fit(unit[fold != held].numpy(), labels[fold != held].numpy())
        # Its intercept is free and ours has the penalty of a weight: a small difference.
        assert (
            abs(p[fold == held] - torch.tensor(model.predict_proba(unit[fold == held].numpy()))).max() < 0.02
        )


def test_rates_are_one_for_all_unless_two_classes_are_exchanged() -> None:
    truth = torch.arange(3000) % 3
    p = 0.02 + 0.94 * torch.eye(3)[truth]
    labels = truth.clone()
    labels[truth == 0] = torch.where(torch.arange(1000) % 5 == 0, 1, 0)  # a fifth of class 0 is called 1
    rates = mislabelling_rates(p, labels)
    assert torch.allclose(rates.sum(1), torch.ones(3), atol=1e-5)
    assert rates[0, 1] > 5 * rates[0, 2]
    assert 0.05 < rates[0, 1] < 0.2  # cautious: below the truth
    assert abs(estimate_wrong(p, rates, labels) - 200) < 20
    rates = mislabelling_rates(p, truth)
    assert estimate_wrong(p, rates, truth) < 10
    assert (rates[~torch.eye(3, dtype=torch.bool)] < 1e-3).all()


@pytest.mark.parametrize("kind", ["any", "exchanged"])
def test_planted_errors_come_first_with_the_true_label_suggested(kind: str) -> None:
    x, truth = blobs()
    labels = truth.clone()
    wrong = torch.arange(0, 600, 20) if kind == "any" else (truth < 2).nonzero()[::10, 0]
    labels[wrong] = (truth[wrong] + 1) % 4 if kind == "any" else 1 - truth[wrong]
    labels[5::50] = -1  # neighbours without a vote
    wrong = wrong[labels[wrong] >= 0]
    found = find_wrong_labels(x, nearest_others(x), labels, 4)
    assert found is not None
    first = found.suspects[: len(wrong)]
    assert len(set(first.tolist()) & set(wrong.tolist())) >= 0.9 * len(wrong)
    caught = first[torch.isin(first, wrong)]
    assert found.suggested[caught].tolist() == truth[caught].tolist()
    assert found.judge(int(caught[0])) == "both"
    assert not found.known[5::50].any()
    assert not torch.isin(found.suspects, torch.arange(5, 600, 50)).any()
    assert found.score[found.suspects].tolist() == sorted(found.score[found.suspects].tolist(), reverse=True)
    shown = found.suspects[found.score[found.suspects] >= found.threshold]
    assert len(shown) >= min(AT_LEAST, len(found.suspects))
    assert 0.5 * len(wrong) < found.estimate < 1.5 * len(wrong)


def test_confusion_is_the_mean_vote_of_a_label_on_each_label() -> None:
    x, labels = blobs(200, spread=1.0)
    nearest = nearest_others(x)
    found = find_wrong_labels(x, nearest, labels, 4)
    assert found is not None
    votes = neighbour_votes(nearest, labels, 4)
    for (a, b), share in found.confusion.items():
        assert abs(share - float(votes[labels == a, b].mean())) < 1e-5


def test_without_two_classes_there_is_nothing_to_judge() -> None:
    x = features(20)
    for labels in (torch.zeros(20), torch.full((20,), -1)):
        assert find_wrong_labels(x, nearest_others(x), labels.long(), 2) is None
