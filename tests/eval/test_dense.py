"""What segmentation sees: images and masks that are moved alike, and patch features with their own masks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from adasim.data import synthetic
from adasim.eval.dense import PatchFeatures, warp
from adasim.models import load_backbone
from adasim.models.transform import EvalTransform
from adasim.util.errors import UserError

MakeRun = Callable[..., Path]
TRANSFORM = EvalTransform.of_size(16, (0.5,) * 3, (0.25,) * 3)


def test_a_warp_moves_image_and_mask_alike_and_ignores_what_comes_from_outside() -> None:
    ids = torch.arange(64)
    masks = torch.zeros(64, 32, 32, dtype=torch.uint8)
    masks[:, 8:20, 4:26] = 1
    views = masks[:, None].float() + 1  # inside the image nothing is 0
    moved, labels = warp(views, masks, seed=0, epoch=1, ids=ids)
    outside = labels == 255
    assert outside.any()
    assert (moved[:, 0][outside] < 1).float().mean() > 0.99
    clear = ~outside & ((moved[:, 0] - moved[:, 0].round()).abs() < 1e-3)  # away from every edge
    assert torch.equal(moved[:, 0][clear].round().long() - 1, labels[clear].long())
    flipped = (labels == 1).float().mean(dim=1).flip(1) - (labels == 1).float().mean(dim=1)
    assert 10 < int((flipped[:, :16].sum(dim=1) > 0).sum()) < 54  # about half are mirrored


def test_a_warp_turns_by_up_to_5_degrees_and_scales_by_0_75_to_1_25() -> None:
    n, side = 500, 32
    axis = (torch.arange(side) + 0.5) * 2 / side - 1
    place = torch.stack(torch.meshgrid(axis, axis, indexing="xy")).repeat(n, 1, 1, 1)  # each pixel's x and y
    masks = torch.zeros(n, side, side, dtype=torch.uint8)
    moved, _ = warp(place, masks, seed=0, epoch=0, ids=torch.arange(n))
    middle = moved[:, :, 15:17, 15:17]
    down = (middle[:, :, 1] - middle[:, :, 0]).mean(2) * side / 2  # (n, 2): d(x, y) / dy
    scale, angle = 1 / down.norm(dim=1), torch.atan2(-down[:, 0], down[:, 1]).rad2deg()
    assert (float(scale.min()), float(scale.max())) == pytest.approx((0.75, 1.25), abs=0.01)
    assert (float(angle.min()), float(angle.max())) == pytest.approx((-5, 5), abs=0.2)


def test_patch_features_that_are_not_finite_are_refused(make_run: MakeRun) -> None:
    backbone = load_backbone(make_run(model="vit_mini", method="dino"))
    with torch.no_grad():
        backbone.net.get_parameter("patch_embed.proj.bias").fill_(torch.nan)
    patches = PatchFeatures(
        backbone, synthetic(10, 16), torch.arange(10), TRANSFORM, size=32, n_blocks=2, batch_size=4
    )
    with pytest.raises(UserError, match=r"not finite for 4 of 4 images: 1 of its .* such as patch_embed"):
        patches.hold()


def test_held_patch_features_are_those_of_the_images_in_order(make_run: MakeRun) -> None:
    images = synthetic(10, 16)
    backbone = load_backbone(make_run(model="vit_mini", method="dino"))
    patches = PatchFeatures(backbone, images, torch.arange(10), TRANSFORM, size=32, n_blocks=2, batch_size=4)
    fresh = list(patches.in_order())
    assert patches.hold()
    held = list(patches.in_order())
    assert patches.dim == 2 * 96
    for (a, mask), (b, same) in zip(fresh, held, strict=True):
        assert a.shape[1:] == (192, 8, 8)  # 32 pixels in patches of 4
        assert torch.allclose(a, b, atol=1e-5)
        assert torch.equal(mask, same)
    own = {m.numpy().tobytes(): f for features, masks in held for f, m in zip(features, masks, strict=True)}
    assert len(own) == 10  # all masks differ
    drawn = [(f, m) for features, masks in patches.shuffled(0) for f, m in zip(features, masks, strict=True)]
    assert {m.numpy().tobytes() for _, m in drawn} == set(own)
    assert all(torch.equal(f, own[m.numpy().tobytes()]) for f, m in drawn)
    assert not all(torch.equal(f, g) for (f, _), g in zip(drawn, own.values(), strict=True))
