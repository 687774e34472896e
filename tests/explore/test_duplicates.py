"""Duplicates: every kind of copy must be found and named, and strangers must not."""

import math

import pytest
import torch
from explore.test_support import features
from torch import Tensor

from adasim.data.images import ArrayImages
from adasim.explore import looks as looking
from adasim.explore.align import align
from adasim.explore.duplicates import DETAIL, Pairs, close_pairs, find_groups, find_pairs, surroundings
from adasim.explore.looks import TILE, look
from adasim.explore.support import nearest_others


def pictures(n: int, seed: int = 0) -> Tensor:
    """Smooth random pictures with some detail, uint8 (n, 3, 32, 32)."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.nn.functional.interpolate(
        torch.rand(n, 3, 8, 8, generator=generator), size=32, mode="bicubic"
    )
    return (255 * (0.8 * coarse.clamp(0, 1) + 0.2 * torch.rand(n, 3, 32, 32, generator=generator))).byte()


def copies_of(original: Tensor) -> dict[str, Tensor]:
    """(n, 3, 32, 32) uint8, each kind of copy that must be found."""
    x = original.float()
    warp = torch.nn.functional.grid_sample

    def warped(matrix: list[list[float]]) -> Tensor:
        grid = torch.nn.functional.affine_grid(
            torch.tensor(matrix).expand(len(x), 2, 3), list(x.shape), False
        )
        return warp(x, grid, padding_mode="border", align_corners=False)

    turn = math.radians(12)
    framed = x.clone()
    framed[:, :, :3] = framed[:, :, -3:] = framed[:, :, :, :3] = framed[:, :, :, -3:] = 10
    kinds = {
        "relit": 0.7 * x + 20,
        "shifted": warped([[1, 0, 0.1], [0, 1, -0.15]]),
        "mirrored": x.flip(-1),
        "cut": warped([[0.8, 0, 0.15], [0, 0.8, -0.1]]),
        "stretched": warped([[0.85, 0, 0], [0, 1, 0]]),
        "turned": warped([[math.cos(turn), -math.sin(turn), 0], [math.sin(turn), math.cos(turn), 0]]),
        "without colour": x.mean(1, keepdim=True).expand_as(x),
        "inverted": 255 - x,
        "framed": framed,
    }
    return {kind: copy.clamp(0, 255).byte() for kind, copy in kinds.items()}


def test_every_kind_of_copy_is_found_and_named_whatever_share_of_the_images_it_is() -> None:
    """With features that know which picture it is, as a good encoder's; and with copies of all images."""
    small = pictures(60)
    for kind, copies in copies_of(small).items():
        everything = torch.cat([small, copies])
        x = features(60, dim=16).repeat(2, 1) + 0.02 * features(120, dim=16, seed=3)
        found = find_pairs(nearest_others(x), everything)
        near = {tuple(pair) for pair in found.ids[found.near].tolist()}
        assert len({(i, i + 60) for i in range(60)} - near) <= 2, kind
        assert len(near) <= 62, kind
        if kind not in ("relit", "shifted"):
            assert sum(kind in how for how in found.how) >= 55, kind


def test_copies_are_found_by_their_looks_where_the_encoder_says_nothing() -> None:
    small = pictures(200)
    kinds = copies_of(small)
    for kind in ("relit", "without colour", "inverted", "framed"):
        everything = torch.cat([small, kinds[kind][:20]])
        found = find_pairs(nearest_others(features(220, dim=16)), everything)
        near = found.ids[found.near].tolist()
        assert sum([i, 200 + i] in near for i in range(20)) >= 19, kind


def test_strangers_are_no_copies_and_plain_images_nobodys() -> None:
    small = pictures(100)
    assert (align(small.float().mean(1, keepdim=True), torch.arange(100).view(50, 2)).detail < DETAIL).all()
    plain = torch.stack([torch.full((3, 32, 32), shade, dtype=torch.uint8) for shade in (200, 40, 200)])
    assert not find_pairs(nearest_others(torch.ones(3, 4)), plain).near.any()


def test_drawings_that_agree_with_all_their_neighbours_are_no_copies() -> None:
    generator = torch.Generator().manual_seed(0)
    stripes = (torch.arange(32.0) + 6.3 * torch.rand(60, 1, 1, 1, generator=generator)).sin()
    noise = 15 * torch.randn(60, 1, 32, 32, generator=generator)
    small = (128 + 60 * stripes + noise).clamp(0, 255).byte().expand(60, 3, 32, 32)
    assert align(small.float().mean(1, keepdim=True), torch.arange(60).view(30, 2)).detail.median() > DETAIL
    assert not find_pairs(nearest_others(1 + 0.05 * features(60, dim=16)), small).near.any()


@pytest.mark.parametrize(("count", "noise"), [(20, 8), (60, 0.5)])
def test_a_crowd_of_copies_of_one_picture_is_found(count: int, noise: float) -> None:
    small, generator = pictures(100), torch.Generator().manual_seed(1)
    crowd = 0.8 * small[:1] + noise * torch.randn(count, 1, 32, 32, generator=generator)
    x = features(100, dim=16)
    x = torch.cat([x, x[:1] + 0.02 * features(count, dim=16, seed=1)])
    found = find_pairs(nearest_others(x), torch.cat([small, crowd.clamp(0, 255).byte()]))
    total = 100 + count
    groups = find_groups([str(i) for i in range(total)], found, [0] * total, [1] * total)
    near = [sorted(group.members) for group in groups if group.kind == "near"]
    assert near == [[0, *range(100, total)]]


def test_what_only_the_encoder_finds_alike_is_the_same_scene() -> None:
    small = pictures(200)
    x = features(200, dim=16)
    x[1] = x[0] + 0.02 * features(1, dim=16, seed=9)[0]
    found = find_pairs(nearest_others(x), small)
    scenes = found.ids[~found.near].tolist()
    assert [0, 1] in scenes
    assert len(scenes) < 15
    crowded = x * 0.05 + torch.ones(16)  # the same in a corner of the sphere
    assert [0, 1] in find_pairs(nearest_others(crowded), small).ids.tolist()


def test_too_few_images_have_no_pairs() -> None:
    for count in (1, 2):
        assert len(find_pairs(nearest_others(features(count)), pictures(count)).ids) == 0


def test_closeness_is_measured_by_the_surroundings() -> None:
    nearest = nearest_others(features(60), 12)
    scale = surroundings(nearest)
    floor = float(nearest.distances[:, 9].median()) / 2
    assert torch.allclose(scale, nearest.distances[:, 9].clamp(min=floor))
    pairs, closeness, _ = close_pairs(nearest, 0.7, scale)
    expected = set()
    for i in range(60):
        for j, d in zip(nearest.ids[i, :5].tolist(), nearest.distances[i, :5].tolist(), strict=True):
            if d / math.sqrt(float(scale[i] * scale[j])) < 0.7:
                expected.add((min(i, j), max(i, j)))
    assert {tuple(pair) for pair in pairs.tolist()} == expected
    assert (closeness < 0.7).all()


def test_groups_join_exact_and_near_copies_and_keep_scenes_apart() -> None:
    hashes = ["a", "b", "a", "c", "d", "e", "f", ""]
    found = Pairs(
        torch.tensor([[1, 2], [3, 4], [4, 5], [6, 7]]),
        torch.tensor([0.7, 0.1, 0.9, 0.05]),
        torch.tensor([True, False, True, False]),
        ["cut to 80%", "", "mirrored", ""],
    )
    groups = find_groups(hashes, found, [0, 0, 0, 0, 0, 1, 0, 0], [10, 30, 30, 10, 99, 10, 10, 10])
    assert [(g.members, g.kind, round(g.score, 4), g.straddles, g.how) for g in groups] == [
        # In both splits: first, and the test image is kept though it is smaller.
        ([5, 4], "near", 0.9, True, "mirrored"),
        # 0 and 2 are equal, 1 is near 2; the largest with the smallest id is kept.
        ([1, 0, 2], "near", 0.7, False, "cut to 80%"),
        # 3 is alike to 4, but 4 is a copy already; 7 cannot be read.
    ]
    none = Pairs(torch.empty(0, 2, dtype=torch.int64), torch.empty(0), torch.empty(0), [])
    groups = find_groups(["x", "y", "x", "", ""], none, [0] * 5, [1] * 5)
    assert [(g.members, g.kind, g.score) for g in groups] == [([0, 2], "exact", 1.0)]


@pytest.mark.parametrize("size", [TILE + 8, 40])
def test_thumbnails_read_in_parts_become_the_same_sheets(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.randint(0, 256, (70, 3, size, size), generator=torch.Generator().manual_seed(0))
    images = [ArrayImages("some", pixels.to(torch.uint8))]
    at_once = look(images)
    monkeypatch.setattr(looking, "_CHUNK", 40)
    told: list[int] = []
    assert look(images, told.append).sheets == at_once.sheets
    assert len(told) == 2
