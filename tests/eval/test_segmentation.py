from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from adasim.data import synthetic
from adasim.dist.processes import ALONE
from adasim.eval import linear_segmentation, miou, segmentation
from adasim.eval.encoder import open_encoder
from adasim.eval.evaluation import Extractor
from adasim.eval.segmentation import PatchFeatures, add_gradient, count_pixels, logits_of_few, mean_iou, warp
from adasim.util.errors import UserError

MakeRun = Callable[..., Path]


def count_by_class(predictions, targets, num_classes, ignore):
    """IoU per class in percent from tp, fp and fn, each counted on its own; None where all three are 0."""
    kept = targets != ignore
    for c in range(num_classes):
        tp = int(((predictions == c) & (targets == c) & kept).sum())
        fp = int(((predictions == c) & (targets != c) & kept).sum())
        fn = int(((predictions != c) & (targets == c) & kept).sum())
        yield 100 * tp / (tp + fp + fn) if tp + fp + fn else None


@pytest.mark.parametrize(("dtype", "ignore"), [(torch.uint8, 255), (torch.int64, 9), (torch.int32, -1)])
def test_miou_equals_counts_by_class(dtype, ignore):
    g = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 4, (3, 7, 5), generator=g).to(dtype)
    predictions = torch.randint(0, 5, (3, 7, 5), generator=g)
    targets[torch.rand(3, 7, 5, generator=g) < 0.2] = ignore
    expected = list(count_by_class(predictions, targets, 6, ignore))
    assert expected[5] is None
    result = miou(predictions, targets, num_classes=6, ignore=ignore)
    assert result.iou == pytest.approx([value or 0 for value in expected])
    assert result.miou == pytest.approx(sum(value or 0 for value in expected) / 6)
    assert result.miou_present == pytest.approx(sum(expected[:5]) / 5)


def test_left_out_ids_are_no_part_of_the_mean():
    counts = count_pixels(torch.tensor([1, 1, 2, 2]), torch.tensor([1, 2, 2, 255]), 4)
    # Class 1: tp 1, fp 1: 1/2. Class 2: tp 1, fn 1: 1/2. Class 3: nowhere. Class 0: left out.
    result = mean_iou(counts, left_out=(0, 9))
    assert result.miou == pytest.approx((50 + 50) / 3)
    assert result.miou_present == pytest.approx(50)


@pytest.mark.parametrize(
    ("predictions", "targets", "sentence"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int64), r"shape \(2, 3\) and the masks \(2, 4\)"),
        (torch.tensor([0, 1]), torch.tensor([0, 4]), "hold id 4; this data set has classes 0 to 1"),
        (torch.tensor([0, 1]), torch.tensor([-1, 0]), "hold id -1"),
        (torch.tensor([0, 1]), torch.zeros(2), "hold torch.float32"),
        (torch.tensor([0, 2]), torch.tensor([0, 1]), "The predictions hold ids outside 0 to 1"),
        (torch.tensor([0, 1]), torch.tensor([255, 255]), "Every pixel of the masks is ignored"),
    ],
)
def test_masks_that_cannot_be_scored_are_refused(predictions, targets, sentence):
    with pytest.raises(UserError, match=sentence):
        miou(predictions, targets, num_classes=2)


def test_the_gradient_is_that_of_the_mean_cross_entropy_over_labelled_pixels(monkeypatch):
    monkeypatch.setattr(segmentation, "_LOGITS", 1)  # an image at a time
    head = torch.nn.Conv2d(6, 3, kernel_size=1)
    features = torch.randn(4, 6, 2, 3)
    masks = torch.randint(0, 3, (4, 8, 12))
    masks[0] = 255
    masks[1, :3] = 255
    assert add_gradient(head, features, masks, 255, ALONE)
    assert head.bias is not None
    weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
    weight.requires_grad_(), bias.requires_grad_()
    small = torch.einsum("bdhw,cd->bchw", features, weight[:, :, 0, 0]) + bias[:, None, None]
    large = F.interpolate(small, size=(8, 12), mode="bilinear", align_corners=False)
    F.cross_entropy(large, masks, ignore_index=255).backward()
    torch.testing.assert_close(head.weight.grad, weight.grad)
    torch.testing.assert_close(head.bias.grad, bias.grad)
    torch.testing.assert_close(torch.cat([part for part, _ in logits_of_few(head, features, masks)]), large)


def blocks(seed, images=12, dim=8, classes=3):
    """Patch features whose class is the block of the mask they cover, in a 4 x 4 grid of 8-pixel patches."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(42))
    ids = torch.randint(0, classes, (images, 2, 2), generator=g)
    ids = ids.repeat_interleave(2, 1).repeat_interleave(2, 2)  # (images, 4, 4)
    features = centres[ids].permute(0, 3, 1, 2) + 0.1 * torch.randn(images, dim, 4, 4, generator=g)
    return features, ids.repeat_interleave(8, 1).repeat_interleave(8, 2).to(torch.uint8)


def in_batches(features, masks, size=4):
    return list(zip(features.split(size), masks.split(size), strict=True))


def test_a_linear_head_learns_separable_patches_and_every_epoch_is_scored():
    train, test = in_batches(*blocks(0)), in_batches(*blocks(1))
    asked = []

    def epoch_batches(epoch):
        asked.append(epoch)
        return train

    scores = linear_segmentation(epoch_batches, lambda: test, dim=8, num_classes=3, epochs=15)
    assert asked == list(range(15))
    assert len(scores) == 15
    assert scores[-1].miou > 85  # what is missing sits on the blurred borders of the upsampled blocks
    assert linear_segmentation(lambda _: train, lambda: test, dim=8, num_classes=3, epochs=15) == scores


def test_a_batch_of_ignored_pixels_alone_makes_no_step():
    features, masks = blocks(0, images=4)
    blank = (features, torch.full_like(masks, 255))
    test = [(features, masks)]
    for epochs in (1, 2):
        options: dict[str, Any] = {"dim": 8, "num_classes": 3, "epochs": epochs}
        with_blank = linear_segmentation(lambda _: [blank, (features, masks), blank], lambda: test, **options)
        assert with_blank == linear_segmentation(lambda _: test, lambda: test, **options)


def given(batches, *_):
    return batches


@pytest.mark.parametrize(
    ("features", "masks", "sentence"),
    [
        ((2, 8, 4, 4), torch.zeros(3, 32, 32), "A segmentation batch has features"),
        ((2, 7, 4, 4), torch.zeros(2, 32, 32), r"give \(images, 8, rows, columns\)"),
        ((2, 8, 4), torch.zeros(2, 32, 32), "A segmentation batch has features"),
        ((2, 8, 4, 4), torch.full((2, 32, 32), 3), "hold id 3; this data set has classes 0 to 2"),
        ((2, 8, 4, 4), torch.zeros(2, 32, 32), "hold a NaN or infinite"),
    ],
)
def test_bad_segmentation_batches_are_refused(features, masks, sentence):
    value = torch.nan if "NaN" in sentence else 0.0
    bad = [(torch.full(features, value), masks.to(torch.uint8))]
    good = [(torch.zeros(2, 8, 4, 4), torch.zeros(2, 32, 32, dtype=torch.uint8))]
    for train, test in [(bad, good), (good, bad)]:
        with pytest.raises(UserError, match=sentence):
            linear_segmentation(partial(given, train), partial(given, test), dim=8, num_classes=3, epochs=1)


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
    extractor = Extractor(open_encoder(make_run(model="vit_mini", method="dino")))
    with torch.no_grad():
        extractor.encoder.backbone.net.get_parameter("patch_embed.proj.bias").fill_(torch.nan)
    patches = PatchFeatures(extractor, synthetic(10, 16), torch.arange(10), size=32, blocks=2, batch_size=4)
    with pytest.raises(UserError, match=r"not finite for 4 of 4 images: 1 of its .* such as patch_embed"):
        patches.hold()


def test_held_patch_features_are_those_of_the_images_in_order(make_run: MakeRun) -> None:
    images = synthetic(10, 16)
    extractor = Extractor(open_encoder(make_run(model="vit_mini", method="dino")))
    patches = PatchFeatures(extractor, images, torch.arange(10), size=32, blocks=2, batch_size=4)
    fresh = list(patches.in_order())
    assert patches.hold()
    held = list(patches.in_order())
    assert patches.shape[0] == 2 * 96
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
