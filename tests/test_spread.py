"""How far features spread and how many directions they use, against cases computed by hand."""

import math

import numpy as np
import pytest
import torch

from adasim.util.spread import feature_spread, rankme


def test_rankme_is_the_exponential_of_the_entropy_of_the_singular_values() -> None:
    features = torch.randn(50, 8) @ torch.diag(torch.tensor([5.0, 3, 2, 1, 0.5, 0.1, 0.01, 0]))
    values = np.linalg.svd(features.double().numpy(), compute_uv=False)
    p = [v / sum(values) + 1e-7 for v in values]
    assert rankme(features) == pytest.approx(math.exp(-sum(x * math.log(x) for x in p)), rel=1e-5)


@pytest.mark.parametrize("directions", [1, 2, 5, 8])
def test_rankme_counts_equally_used_orthogonal_directions(directions: int) -> None:
    """d singular values of one size have the entropy ln d."""
    features = torch.eye(8)[:directions].repeat(3, 1) * 4.2
    assert rankme(features) == pytest.approx(directions, rel=1e-4)


def test_rankme_of_unequal_singular_values() -> None:
    """Values 3 and 1: p = 3/4, 1/4; H = 3/4 ln(4/3) + 1/4 ln 4."""
    features = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    expected = math.exp(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    assert rankme(features) == pytest.approx(expected)
    rotation = torch.tensor([[math.cos(0.3), -math.sin(0.3)], [math.sin(0.3), math.cos(0.3)]])
    assert rankme(features @ rotation) == pytest.approx(expected)


def test_rankme_of_equal_or_zero_features_is_one() -> None:
    assert rankme(torch.ones(20, 6)) == pytest.approx(1.0, abs=1e-4)
    assert rankme(torch.zeros(20, 6)) == 1.0


def test_feature_spread_of_opposite_features_is_one() -> None:
    """Rows +-(1, 1)/sqrt(2): each column deviates by 1/sqrt(2), which is 1/sqrt(D). Lengths do not matter."""
    assert feature_spread(torch.tensor([[1.0, 1.0], [-5.0, -5.0]])) == pytest.approx(1.0)


def test_feature_spread_by_hand() -> None:
    """Rows (3, 4)/5 and (1, 0): deviations 0.2 and 0.4 about the means; 0.3 * sqrt(2)."""
    assert feature_spread(torch.tensor([[3.0, 4.0], [7.0, 0.0]])) == pytest.approx(0.3 * math.sqrt(2))


def test_feature_spread_is_one_on_the_sphere_and_zero_for_equal_features() -> None:
    torch.manual_seed(0)
    assert feature_spread(torch.randn(20_000, 64)) == pytest.approx(1.0, abs=0.01)
    assert feature_spread(torch.ones(10, 64)) == pytest.approx(0.0, abs=1e-6)
