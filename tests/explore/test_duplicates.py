"""Duplicates: mutual neighbours against brute force, and planted copies that must be found."""

import importlib
import math

import pytest
import torch
from explore.test_support import features
from torch import Tensor

from adasim.data.images import ArrayImages
from adasim.explore import looks as looking
from adasim.explore.duplicates import (
    CANDIDATE,
    DIFFERENCE,
    Mutual,
    find_groups,
    looks_as_features,
    mutual_neighbours,
    near_and_scenes,
    thumbnail_difference,
)
from adasim.explore.looks import TILE, look
from adasim.explore.support import nearest_others

NONE = Mutual(torch.empty(0, 2, dtype=torch.int64), torch.empty(0), torch.empty(0))


def pictures(n: int, seed: int = 0) -> Tensor:
    """Smooth random pictures with some detail, uint8 (n, 3, 32, 32)."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.nn.functional.interpolate(
        torch.rand(n, 3, 8, 8, generator=generator), size=32, mode="bicubic"
    )
    return (255 * (0.8 * coarse.clamp(0, 1) + 0.2 * torch.rand(n, 3, 32, 32, generator=generator))).byte()


def test_mutual_neighbours_are_among_each_others_nearest_measured_by_their_surroundings() -> None:
    nearest = nearest_others(features(60), 6)
    distances, ids = nearest.distances, nearest.ids
    found = mutual_neighbours(nearest, mutual=2)
    near = [set(row[:2]) for row in ids.tolist()]
    expected = [(i, j) for i in range(60) for j in range(i + 1, 60) if j in near[i] and i in near[j]]
    assert [tuple(pair) for pair in found.pairs.tolist()] == expected
    for (i, j), closeness in zip(expected, found.closeness.tolist(), strict=True):
        between = float(distances[i][ids[i].tolist().index(j)])
        assert abs(closeness - between / math.sqrt(distances[i, -1] * distances[j, -1])) < 1e-5
    logs = sorted(math.log(c) for c in found.closeness.tolist())
    middle = (logs[(len(logs) - 1) // 2] + logs[len(logs) // 2]) / 2
    away = sorted(abs(log - middle) for log in logs)
    deviation = 1.4826 * (away[(len(away) - 1) // 2] + away[len(away) // 2]) / 2
    assert abs(found.threshold(2.0) - math.exp(middle - 2 * deviation)) < 1e-6
    assert found.would_stand_out(found.pairs, found.closeness * 0, 2.0).all()
    assert found.close(2.0).tolist() == found.pairs[found.closeness < found.threshold(2.0)].tolist()


def test_the_threshold_scales_with_the_features() -> None:
    """Whether features crowd in a corner or spread over the sphere, the same pair stands out."""
    x = features(200, dim=8)
    x[1] = x[0] + 0.02 * features(1, dim=8, seed=9)[0]
    crowded = x * 0.05 + torch.ones(8)
    for space in (x, crowded):
        found = mutual_neighbours(nearest_others(space, 10))
        assert found.pairs[found.closeness.argmin()].tolist() == [0, 1]
        assert [0, 1] in found.close(4.0).tolist()
        assert len(found.close(4.0)) < 0.1 * len(found.pairs)


def test_the_same_detail_on_another_picture_is_no_near_copy() -> None:
    """Two brick walls: the encoder names the pair and the detail agrees, the blurred thumbnails do not."""
    small = pictures(201)
    grain = torch.randint(-40, 41, (3, 32, 32), generator=torch.Generator().manual_seed(1))
    slope = torch.linspace(60, 190, 32)[:, None].expand(3, 32, 32)
    small[0], small[200] = (slope + grain).byte(), (slope.flip(1) + grain).byte()
    encoded = features(201, dim=16)
    encoded[200] = encoded[0] + 0.01
    pairs, differences, near = near_and_scenes(
        mutual_neighbours(nearest_others(encoded, 10)),
        mutual_neighbours(nearest_others(looks_as_features(small), 10)),
        small,
    )
    place = pairs.tolist().index([0, 200])
    assert differences[place] < DIFFERENCE
    assert not near[place]


def test_four_copies_are_all_each_others_neighbours_and_too_few_images_have_none() -> None:
    x = features(200, dim=8)
    x[1:4] = x[0] + 0.02 * features(3, dim=8, seed=9)
    found = mutual_neighbours(nearest_others(x, 10)).pairs.tolist()
    assert all([i, j] in found for i in range(4) for j in range(i + 1, 4))
    for count in (1, 2):
        assert len(mutual_neighbours(nearest_others(features(count), 10)).close(CANDIDATE)) == 0


def test_detail_tells_copies_from_look_alikes() -> None:
    original = pictures(40)
    relit = (original.float() * 0.7 + 20).byte()
    shifted = original.roll((1, -2), (2, 3))
    everything = torch.cat([original, relit, shifted, original.flip(-1)])
    ids = torch.arange(40)
    for copy in (1, 2, 3):
        difference = thumbnail_difference(everything, torch.stack([ids, ids + 40 * copy], 1))
        assert (difference < DIFFERENCE).all(), copy
    strangers = thumbnail_difference(original, torch.stack([ids[:-1], ids[1:]], 1))
    assert (strangers > DIFFERENCE).all()


def test_plain_images_are_nobodys_near_copy() -> None:
    plain = torch.full((3, 3, 32, 32), 200, dtype=torch.uint8)
    plain[1] = 40
    assert thumbnail_difference(plain, torch.tensor([[0, 1], [0, 2]])).tolist() == [1.0, 1.0]
    assert not looks_as_features(plain).any()


def test_groups_join_exact_and_near_copies_and_keep_scenes_apart() -> None:
    hashes = ["a", "b", "a", "c", "d", "e", "f", ""]
    pairs = torch.tensor([[1, 2], [3, 4], [4, 5], [6, 7]])
    groups = find_groups(
        hashes,
        pairs,
        torch.tensor([0.3, 0.9, 0.1, 0.95]),
        torch.tensor([True, False, True, False]),
        splits=[0, 0, 0, 0, 0, 1, 0, 0],
        sizes=[10, 30, 30, 10, 99, 10, 10, 10],
    )
    found = [(g.members, g.kind, round(g.difference, 4), g.straddles) for g in groups]
    assert found == [
        ([5, 4], "near", 0.1, True),  # in both splits: first, and the test image is kept though it is smaller
        # 0 and 2 are equal, 1 is near 2; the largest with the smallest id is kept
        ([1, 0, 2], "near", 0.3, False),
        ([6, 7], "same scene", 0.95, False),  # 3 is alike to 4, but 4 is a copy already
    ]
    none = torch.empty(0)
    groups = find_groups(["x", "y", "x", "", ""], NONE.pairs, none, none, [0] * 5, [1] * 5)
    assert [(g.members, g.kind) for g in groups] == [([0, 2], "exact")]  # without any features


def test_planted_copies_among_generated_images_are_found_by_their_looks() -> None:
    """With no encoder at all: random features say nothing."""
    hidden = importlib.import_module("benchmarks._planted").planted(600, 3, exact=15, near=15)
    looks = look([hidden.images])
    drawn = mutual_neighbours(nearest_others(looks_as_features(looks.small), 10))
    pairs, differences, near = near_and_scenes(NONE, drawn, looks.small)
    groups = find_groups(looks.hashes, pairs, differences, near, [0] * 600, [1] * 600)
    exact = {tuple(sorted(g.members)) for g in groups if g.kind == "exact"}
    assert exact == {tuple(sorted(pair)) for pair in hidden.duplicates}
    close = {tuple(sorted(g.members)) for g in groups if g.kind == "near"}
    planted = {tuple(sorted(pair)) for pair in hidden.near_duplicates}
    assert len(close & planted) >= 11
    assert len(close & planted) >= 0.6 * len(close)


def test_a_mirrored_copy_is_near_if_the_encoder_takes_it_for_the_same() -> None:
    """By its looks it is far away; the encoder names the pair, and the mirror confirms it."""
    small = pictures(200)
    small = torch.cat([small, small[:1].flip(-1)])
    encoded = features(201, dim=16)
    encoded[200] = encoded[0] + 0.01
    by_features = mutual_neighbours(nearest_others(encoded, 10))
    by_looks = mutual_neighbours(nearest_others(looks_as_features(small), 10))
    pairs, _, near = near_and_scenes(by_features, by_looks, small)
    assert [0, 200] not in by_looks.close(CANDIDATE).tolist()
    assert pairs[near].tolist() == [[0, 200]]
    # With the mirror taken away it is a scene: alike to the encoder alone.
    small[200] = pictures(1, seed=5)[0]
    pairs, _, near = near_and_scenes(by_features, by_looks, small)
    assert [0, 200] in pairs[~near].tolist()


@pytest.mark.parametrize("size", [TILE + 8, 40])
def test_thumbnails_read_in_parts_become_the_same_sheets(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.randint(0, 256, (70, 3, size, size), generator=torch.Generator().manual_seed(0))
    images = [ArrayImages("some", pixels.to(torch.uint8))]
    at_once = look(images)
    monkeypatch.setattr(looking, "_CHUNK", 40)
    told: list[int] = []
    assert look(images, told.append).sheets == at_once.sheets
    assert len(told) == 2


def test_thumbnails_are_compared_a_thousand_at_a_time() -> None:
    small = pictures(1100)
    assert torch.equal(looks_as_features(small)[1000:], looks_as_features(small[1000:]))
