"""Suspicious labels against brute force."""

import math

import torch
from explore.test_support import features, random_support

from adasim.explore.hunts import agreement, confusion, distance_ratio, label_mass, wrong_labels
from adasim.explore.support import nearest_others


def some_labels(n: int, classes: int = 4, seed: int = 5) -> torch.Tensor:
    labels = torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))
    labels[::7] = -1
    return labels


def masses(i: int) -> dict[int, float]:
    """The mass of image i's neighbours on each label, from the definition."""
    found: dict[int, float] = {}
    for j, p in zip(SUPPORT.neighbours[i].tolist(), SUPPORT.p[i].tolist(), strict=True):
        if j not in (-1, i) and int(LABELS[j]) >= 0:
            found[int(LABELS[j])] = found.get(int(LABELS[j]), 0.0) + p
    total = sum(found.values())
    return {label: mass / total for label, mass in found.items()}


SUPPORT = random_support(n=80, width=6, seed=2)
LABELS = some_labels(80)


def test_label_mass_is_p_win_without_the_image_summed_by_label() -> None:
    mass = label_mass(SUPPORT, LABELS)
    for i in range(80):
        expected, own = masses(i), int(LABELS[i])
        assert bool(mass.known[i]) == (own >= 0 and bool(expected))
        if not mass.known[i]:
            assert (float(mass.own[i]), float(mass.other[i]), int(mass.suggested[i])) == (0, 0, -1)
            continue
        assert abs(float(mass.own[i]) - expected.pop(own, 0.0)) < 1e-9
        best = max(expected.values(), default=0.0)
        assert abs(float(mass.other[i]) - best) < 1e-9
        likely = [label for label, value in expected.items() if abs(value - best) < 1e-9]
        assert int(mass.suggested[i]) == (min(likely) if likely else -1)


def test_suspects_have_more_mass_elsewhere_and_less_than_half_of_what_is_usual_the_worst_first() -> None:
    mass = label_mass(SUPPORT, LABELS)
    ratio = torch.rand(80, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    known = [i for i in range(80) if mass.known[i]]
    usual = {
        label: sum(float(mass.own[i]) for i in known if int(LABELS[i]) == label)
        / sum(int(LABELS[i]) == label for i in known)
        for label in range(4)
    }
    expected = [
        i for i in known if mass.other[i] > mass.own[i] and float(mass.own[i]) < usual[int(LABELS[i])] / 2
    ]
    assert 5 < len(expected) < 75
    expected.sort(key=lambda i: (round(float(mass.own[i]) * 1e4), float(ratio[i])))
    assert wrong_labels(mass, LABELS, ratio).tolist() == expected


def test_confusion_is_the_mean_mass_of_a_label_on_each_label() -> None:
    found = confusion(SUPPORT, LABELS)
    for a in range(4):
        rows = [masses(i) for i in range(80) if int(LABELS[i]) == a]
        rows = [row for row in rows if row]
        for b in range(4):
            mean = sum(row.get(b, 0.0) for row in rows) / len(rows)
            assert abs(found.get((a, b), 0.0) - mean) < 1e-9
    assert confusion(SUPPORT, torch.full((80,), -1)) == {}


def test_agreement_is_the_share_of_labelled_nearest_with_the_same_label() -> None:
    _, ids = nearest_others(features(80), 5)
    found = agreement(ids, LABELS)
    for i in range(80):
        votes = [int(LABELS[j]) == int(LABELS[i]) for j in ids[i].tolist() if int(LABELS[j]) >= 0]
        if int(LABELS[i]) < 0 or not votes:
            assert math.isnan(found[i])
        else:
            assert abs(float(found[i]) - sum(votes) / len(votes)) < 1e-12


def test_the_distance_ratio_is_selfcleans() -> None:
    x = features(80)
    labels = LABELS.clone()
    labels[labels == 3] = 2
    labels[4] = 3  # alone with its label: there is no nearest image of the same one
    found = distance_ratio(x, labels)
    unit = x.double() / x.double().norm(dim=1, keepdim=True)
    for i in range(80):
        own = int(labels[i])
        others = [j for j in range(80) if j != i and int(labels[j]) >= 0]
        same = [(1 - float(unit[i] @ unit[j])) / 2 for j in others if int(labels[j]) == own]
        apart = [(1 - float(unit[i] @ unit[j])) / 2 for j in others if int(labels[j]) != own]
        if own < 0 or not same:
            assert math.isnan(found[i])
        else:
            expected = min(apart) ** 2 / (min(same) ** 2 + min(apart) ** 2)
            assert abs(float(found[i]) - expected) < 1e-5


def test_copies_under_two_labels_decide_nothing() -> None:
    x = features(10)
    x[1:4] = x[0]
    assert distance_ratio(x, torch.tensor([0, 0, 1, 1, 0, 1, 0, 1, 0, 1]))[:4].tolist() == [0.5] * 4
