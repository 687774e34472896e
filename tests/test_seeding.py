"""Random numbers are functions of their names: seed, purpose, epoch and image."""

from itertools import combinations

import torch

from adasim.util.seeding import key, permutation, seeded, uniform


def test_a_number_depends_on_its_name_alone() -> None:
    ids = torch.tensor([5, 900, 7])
    together = uniform(3, "partner", 11, ids, 4)
    alone = torch.cat([uniform(3, "partner", 11, ids[i : i + 1], 4) for i in range(3)])
    assert torch.equal(together, alone)
    assert together.min() >= 0
    assert together.max() < 1


def test_every_part_of_the_name_matters() -> None:
    ids = torch.arange(50)
    draws = [uniform(*name, ids) for name in ((0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1))]
    for first, second in combinations(draws, 2):
        assert not torch.isclose(first, second).any()
    assert len({key(0), key(1), key(0, 0), key(0, 0, 0), key(0, "0")}) == 5


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    draws = uniform(0, "x", 0, torch.arange(40_000), 2)
    assert torch.allclose(draws.mean(0), torch.full((2,), 0.5, dtype=torch.float64), atol=0.01)
    assert torch.allclose(draws.var(0), torch.full((2,), 1 / 12, dtype=torch.float64), atol=0.002)
    neighbours = torch.stack([draws[1:, 0], draws[:-1, 0], draws[1:, 1]])
    assert (torch.corrcoef(neighbours) - torch.eye(3)).abs().max() < 0.02


def test_permutation_is_a_permutation_that_changes_with_the_epoch() -> None:
    first, second = permutation(0, "order", 0, 1000), permutation(0, "order", 1, 1000)
    assert torch.equal(first.sort().values, torch.arange(1000))
    assert not torch.equal(first, second)


def test_seeded_gives_the_generator_back() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with seeded(key(0, "view", 1)):
        inner = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with seeded(key(0, "view", 1)):
        assert torch.equal(torch.rand(3), inner)
