"""How far features spread and how many directions they use, by hand; and when the collapse watch speaks."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adasim.util.collapse import READINGS, CollapseWatch, feature_spread, rankme


def test_rankme_is_the_exponential_of_the_entropy_of_the_singular_values() -> None:
    features = torch.randn(50, 8) @ torch.diag(torch.tensor([5.0, 3, 2, 1, 0.5, 0.1, 0.01, 0]))
    values = np.linalg.svd(features.double().numpy(), compute_uv=False)
    p = [v / sum(values) + 1e-7 for v in values]
    assert rankme(features) == pytest.approx(math.exp(-sum(x * math.log(x) for x in p)), rel=1e-5)


THREE_AND_ONE = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
TURN = torch.tensor([[math.cos(0.3), -math.sin(0.3)], [math.sin(0.3), math.cos(0.3)]])


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        *((4.2 * torch.eye(8)[:used].repeat(3, 1), used) for used in (1, 2, 5, 8)),  # equal values: ln d
        # Values 3 and 1: p = 3/4, 1/4.
        (THREE_AND_ONE, math.exp(0.75 * math.log(4 / 3) + 0.25 * math.log(4))),
        (THREE_AND_ONE @ TURN, math.exp(0.75 * math.log(4 / 3) + 0.25 * math.log(4))),
        (torch.ones(20, 6), 1),
        (torch.zeros(20, 6), 1),
    ],
)
def test_rankme_by_hand(features: Tensor, expected: float) -> None:
    assert rankme(features) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        # Rows +-(1, 1)/sqrt(2): each column deviates by 1/sqrt(2), which is 1/sqrt(D). Lengths do not matter.
        (torch.tensor([[1.0, 1.0], [-5.0, -5.0]]), 1),
        # Rows (3, 4)/5 and (1, 0): deviations 0.2 and 0.4 about the means.
        (torch.tensor([[3.0, 4.0], [7.0, 0.0]]), 0.3 * math.sqrt(2)),
        (torch.randn(20_000, 64, generator=torch.Generator().manual_seed(0)), 1),  # all over the sphere
        (torch.ones(10, 64), 0),
    ],
)
def test_feature_spread_by_hand(features: Tensor, expected: float) -> None:
    assert feature_spread(features) == pytest.approx(expected, abs=0.01 if len(features) > 10 else 1e-6)


def healthy(dim: int = 32) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(256, dim)


def alike(share: float, dim: int = 32) -> Tensor:
    """Unit features around one direction, with a spread of about `share` / sqrt(dim) per column."""
    torch.manual_seed(2)
    mean = F.normalize(torch.ones(dim), dim=0)
    return mean + share * torch.randn(256, dim) / math.sqrt(dim)


def test_a_healthy_run_hears_nothing_even_if_features_are_all_alike_at_its_start() -> None:
    watch = CollapseWatch(out_dim=512)
    assert [watch.update(alike(share)) for share in (0.01, 0.01, 0.03, 0.06, 0.3)] == [[]] * 5
    for share in (0.69, 0.9, 0.98, 0.9935, 0.994, 0.9, 0.6, 0.3, 0.1):
        assert watch.update(healthy(), share * math.log(512)) == []
    assert watch.readings["feature_spread"] == pytest.approx(1.0, abs=0.05)
    assert watch.readings["teacher_entropy_share"] == pytest.approx(0.1)
    assert 20 < watch.readings["rankme"] <= 32


def test_features_that_never_come_apart_are_reported_after_five_readings() -> None:
    watch = CollapseWatch()
    said = [watch.update(alike(0.05)) for _ in range(8)]
    assert [len(s) for s in said] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert "nearly the same feature to every image" in said[4][0]
    assert "--optim.lr" in said[4][0]


def test_features_that_fall_together_are_reported_at_once_and_again_after_a_recovery() -> None:
    watch = CollapseWatch()
    watch.update(alike(0.3))
    assert len(watch.update(alike(0.05))) == 1  # already in the first epoch
    assert watch.update(alike(0.05)) == []
    assert watch.update(healthy()) == []
    assert len(watch.update(alike(0.05))) == 1


def test_a_watch_that_recalls_earlier_readings_says_what_one_that_never_stopped_would() -> None:
    """As in a run that is resumed after every epoch."""
    for epochs in ([healthy(), alike(0.05), alike(0.05)], [alike(0.05)] * 7):
        straight, said = CollapseWatch(), []
        logged: list[dict[str, float | None]] = []
        expected = [straight.update(features) for features in epochs]
        for features in epochs:
            watch = CollapseWatch()
            for readings in logged:
                watch.recall(readings)
            said.append(watch.update(features))
            logged.append({name: watch.readings.get(name) for name in READINGS})
        assert said == expected
        assert sum(map(len, said)) == 1


def test_features_on_two_directions_are_reported() -> None:
    """Opposite ends of two axes: spread over them, but of rank 2 in 32 dimensions."""
    torch.manual_seed(3)
    flat = torch.randn(256, 2) @ torch.eye(32)[:2]
    watch = CollapseWatch()
    watch.update(healthy())
    (sentence,) = watch.update(flat)
    assert "2.0 of 32 directions" in sentence


@pytest.mark.parametrize(
    ("share", "words", "option"),
    [
        (0.9995, "output is uniform: its entropy is 99.95% of ln(512)", "lower --dino.teacher-temp"),
        (0.001, "output is one-hot: its entropy is 0.10% of ln(512)", "higher --dino.teacher-temp"),
    ],
)
def test_a_teacher_that_says_nothing_is_reported_when_it_persists(
    share: float, words: str, option: str
) -> None:
    watch = CollapseWatch(out_dim=512)
    said = [watch.update(healthy(), share * math.log(512)) for _ in range(6)]
    assert [len(s) for s in said] == [0, 0, 1, 0, 0, 0]
    assert words in said[2][0]
    assert option in said[2][0]
    assert watch.update(healthy(), 0.5 * math.log(512)) == []  # it clears
    for bad in (share, share, 0.5):  # two bad readings are a passing thing
        assert watch.update(healthy(), bad * math.log(512)) == []
    assert [len(watch.update(healthy(), share * math.log(512))) for _ in range(3)] == [0, 0, 1]


def test_what_cannot_be_judged_is_not_judged() -> None:
    watch = CollapseWatch(out_dim=16)
    bad = torch.full((64, 8), math.nan)
    for _ in range(9):
        assert watch.update(bad, math.nan) == []
        assert watch.update(torch.ones(3, 8)) == []  # three features say nothing about rank
    assert watch.readings == {}
    assert CollapseWatch().update(healthy(), 1.0) == []  # no out_dim: SimSiam has no teacher output
    features = healthy()
    features[7, 3] = math.inf
    features[9] = math.nan
    watch.update(features)  # rows that are not finite are left out
    assert watch.readings["feature_spread"] == pytest.approx(1.0, abs=0.05)
