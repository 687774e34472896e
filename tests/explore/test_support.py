"""Supports against brute force, and the hunts that follow from them alone."""

import math

import torch
from torch import Tensor

from adasim.data import open_images
from adasim.eval.encoder import open_encoder
from adasim.eval.evaluation import Extractor
from adasim.explore.hunts import lonely, popularity, surprising
from adasim.explore.map import coordinates
from adasim.explore.open import augmented_support
from adasim.explore.support import (
    Support,
    nearest_others,
    support_of_features,
    support_of_memory,
    unit_rows,
    with_more,
)
from adasim.neighbors import NeighborMemory
from adasim.options import ExploreOptions


def features(n: int, dim: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))


def random_support(n: int = 40, width: int = 5, seed: int = 0) -> Support:
    """Supports of 2 to `width` neighbours, best first, about half of them with the image itself."""
    generator = torch.Generator().manual_seed(seed)
    neighbours = torch.stack([torch.randperm(n, generator=generator)[:width] for _ in range(n)])
    own = torch.rand(n, generator=generator) < 0.5
    missing = own & ~(neighbours == torch.arange(n)[:, None]).any(1)
    neighbours[missing, 1] = torch.arange(n)[missing]
    lengths = torch.randint(2, width + 1, (n,), generator=generator)
    padding = torch.arange(width) >= lengths[:, None]
    p = torch.rand(n, width, generator=generator, dtype=torch.float64).sort(1, descending=True).values
    p = p.masked_fill(padding, 0)
    return Support(neighbours.masked_fill(padding, -1), p / p.sum(1, keepdim=True))


def test_the_support_of_features_is_the_softmax_of_cosines_over_the_nearest() -> None:
    x = features(30)
    support = support_of_features(nearest_others(x), k=4, tau=0.2)
    unit = x.double() / x.double().norm(dim=1, keepdim=True)
    for i in range(30):
        cosines = [float(unit[i] @ unit[j]) for j in range(30)]
        best = sorted(range(30), key=lambda j: (-cosines[j], j))[:5]
        weights = [math.exp(cosines[j] / 0.2) for j in best]
        assert support.neighbours[i].tolist() == best
        assert torch.allclose(support.p[i], torch.tensor(weights).double() / sum(weights), atol=1e-5)


def test_an_image_without_features_has_no_neighbours_and_is_nobodys() -> None:
    x = features(12)
    x[5] = torch.nan
    support = support_of_features(nearest_others(x), k=11, tau=0.2)
    assert (support.neighbours[5] == -1).all()
    assert not (support.neighbours == 5).any()
    assert support.p[5].sum() == 0
    assert math.isnan(support.self_match()[5])
    found = nearest_others(x, 3)
    assert (found.ids[5] == -1).all()
    assert torch.isinf(found.distances[5]).all()


def test_many_images_without_features_take_nobody_elses_neighbours() -> None:
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    x[48:] = torch.nan
    assert torch.equal(nearest_others(x, 5).ids[:48], nearest_others(x[:48], 5).ids)


def test_the_map_puts_clusters_apart_and_images_without_features_nowhere() -> None:
    generator = torch.Generator().manual_seed(0)
    cluster = torch.arange(120) % 3
    x = torch.eye(3)[cluster].repeat(1, 4) + 0.1 * torch.randn(120, 12, generator=generator)
    x[7] = torch.nan
    places = coordinates(x, nearest_others(x))
    known = torch.arange(120) != 7
    assert places[7].isnan().all()
    assert torch.equal(places[known], coordinates(x, nearest_others(x))[known])
    middles = torch.stack([places[known & (cluster == c)].mean(0) for c in range(3)])
    assert torch.equal(torch.cdist(places[known], middles).argmin(1), cluster[known])
    assert (
        coordinates(x[:5], nearest_others(x[:5])).isfinite().all()
    )  # too few for anything but principal components


def test_the_nearest_others_are_those_of_a_full_sort_even_among_many_copies() -> None:
    x = features(25)
    x[3:10] = x[3]  # seven equal images, more than are asked for
    found = nearest_others(x, 4)
    distances, ids = found.distances, found.ids
    unit = unit_rows(x).double()
    cosines = unit @ unit.T
    for i in range(25):
        assert i not in ids[i].tolist()
        others = sorted(1 - float(cosines[i, j]) for j in range(25) if j != i)[:4]
        assert torch.allclose(distances[i].double(), torch.tensor(others).double().clamp(min=0), atol=1e-6)


def test_the_support_of_a_memory_is_its_union_whatever_the_run_drew_from() -> None:
    memory = NeighborMemory(20, 6, window=3, k=4)
    for epoch in range(4):
        memory.observe(torch.arange(20), features(20, seed=1) + 0.3 * features(20, seed=epoch + 2))
        memory.end_epoch()
    support = support_of_memory(memory, tau=0.2)
    for i in range(20):
        sums: dict[int, float] = {}
        for slot in range(3):
            lists = zip(
                memory.history_ids[i, slot].tolist(),
                memory.history_similarities[i, slot].tolist(),
                strict=True,
            )
            for j, similarity in lists:
                sums[j] = sums.get(j, 0.0) + similarity
        weights = {j: math.exp(total / 3 / 0.2) for j, total in sums.items()}
        found = {
            j: p for j, p in zip(support.neighbours[i].tolist(), support.p[i].tolist(), strict=True) if j >= 0
        }
        assert found.keys() == weights.keys()
        for j, p in found.items():
            assert abs(p - weights[j] / sum(weights.values())) < 1e-9


def test_more_images_leave_the_first_supports_as_they_are_and_get_as_many_neighbours() -> None:
    x = features(30)
    first = support_of_features(nearest_others(x[:20]), k=6)
    both = with_more(first, nearest_others(x))
    assert torch.equal(both.neighbours[:20], first.neighbours)
    assert torch.equal(both.neighbours[20:], support_of_features(nearest_others(x), k=6).neighbours[20:])


def test_self_match_and_others_split_the_probability() -> None:
    support = random_support()
    others = support.others()
    for i in range(len(support)):
        pairs = list(zip(support.neighbours[i].tolist(), support.p[i].tolist(), strict=True))
        own = sum(p for j, p in pairs if j == i)
        assert abs(support.self_match()[i] - own) < 1e-12
        rest = [0.0 if j in (i, -1) else p / (1 - own) for j, p in pairs]
        assert torch.allclose(others[i], torch.tensor(rest).double())


def test_surprising_images_are_those_whose_best_match_is_another_the_clearest_first() -> None:
    support = random_support()
    ids, excess = surprising(support)
    expected = {}
    for i in range(len(support)):
        if int(support.neighbours[i, 0]) != i:
            expected[i] = float(support.p[i, 0] - support.self_match()[i])
    assert set(ids.tolist()) == set(expected)
    assert excess.tolist() == sorted(expected.values(), reverse=True)
    assert all(abs(expected[i] - e) < 1e-12 for i, e in zip(ids.tolist(), excess.tolist(), strict=True))


def test_with_one_view_each_copies_come_after_the_image_itself_and_nobody_is_surprising() -> None:
    x = features(25)
    x[3:10] = x[3]  # seven equal images, more than have a place in a support
    everything, few = nearest_others(x), support_of_features(nearest_others(x[:5]), k=4)
    for support in (support_of_features(everything, k=4), with_more(few, everything)):
        assert support.neighbours[:, 0].tolist() == list(range(25))
        assert all(len(set(row)) == len(row) for row in support.neighbours.tolist())
        assert len(surprising(support)[0]) == 0


def test_who_matches_another_as_well_as_itself_is_not_surprising() -> None:
    tied = Support(torch.tensor([[0, 1], [0, 1]]), torch.full((2, 2), 0.5, dtype=torch.float64))
    assert surprising(tied)[0].tolist() == []


def test_lonely_images_are_in_nobodys_support_the_farthest_first() -> None:
    support = random_support(n=60, width=3)
    distances = torch.rand(60, generator=torch.Generator().manual_seed(3))
    listed = [
        sum(j in support.neighbours[i].tolist() for i in range(60) if i != j) for j in range(60)
    ]  # an image's own support does not count
    assert popularity(support).tolist() == listed
    alone = [j for j in range(60) if not listed[j]]
    assert len(alone) > 1
    distances[alone[0]] = torch.inf  # it could not be looked at
    found = lonely(support, distances).tolist()
    assert found == sorted(alone[1:], key=lambda j: -float(distances[j]))


def test_augmented_passes_of_a_frozen_encoder_fill_a_window_for_every_image_of_every_split() -> None:
    sets = [open_images("synthetic:21", size=16), open_images("synthetic:21", size=16, split="test")]
    extractor = Extractor(open_encoder("vit_mini", random_weights=True, size=16))
    options = ExploreOptions(passes=3, k=4, seed=1, workers=0)
    support = augmented_support(extractor, sets, options)
    count = len(sets[0]) + len(sets[1])
    assert len(support) == count
    held = (support.neighbours >= 0).sum(1)
    assert (held >= 5).all()  # K + 1 in each pass: an image may find itself
    assert (held <= 15).all()
    assert torch.allclose(support.p.sum(1), torch.ones(count).double())
    assert torch.equal(support.neighbours, augmented_support(extractor, sets, options).neighbours)
