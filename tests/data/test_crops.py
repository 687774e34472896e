"""Views against torchvision, operation by operation and as a whole."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from adasim.config import ViewsConfig
from adasim.data import BatchedViews, FolderImages, augment, crops
from adasim.data.crops import (
    UNIFORMS,
    Changes,
    CropDraws,
    CropWorker,
    ViewSettings,
    draw_changes,
    reduction,
    view_uniforms,
)
from adasim.models.transform import EvalTransform
from adasim.registry import METHODS
from adasim.util import seeding

from .pictures import picture, smooth
from .reference import torchvision_views

MEAN, STD = (
    torch.tensor(x).view(3, 1, 1) for x in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
)  # ImageNet's
Boxes = tuple[Tensor, Tensor, Tensor, Tensor]


def drawn(settings: ViewSettings, count: int, height: int, width: int) -> tuple[Boxes, Changes]:
    uniforms = seeding.uniform(0, "test", 0, torch.arange(count), UNIFORMS)
    return CropDraws(settings, uniforms).boxes(height, width), draw_changes(settings, uniforms)


def box(boxes: Boxes, i: int) -> list[int]:
    return [int(side[i]) for side in boxes]


@pytest.fixture
def images() -> Tensor:
    return smooth(12, 40, 36).float() / 255


@pytest.mark.parametrize("size", [32, 24, 96])
@pytest.mark.parametrize("recipe", ["dino", "simsiam"])
def test_crops_of_a_batch_and_of_one_image_are_torchvisions(recipe: str, size: int) -> None:
    images = smooth(12, 40, 36).contiguous(memory_format=torch.channels_last)  # as decoders lay them out
    settings = ViewSettings.of(ViewsConfig(**METHODS[recipe].VIEWS, size=size, scale=(0.1, 1.0)), 1)
    boxes, changes = drawn(settings, len(images), 40, 36)
    ours = crops.crop_batch(images, settings, boxes, changes.flip)
    assert changes.flip.any()
    assert not changes.flip.all()
    for i, image in enumerate(images):
        top, left, height, width = box(boxes, i)
        rest = (top, left, height, width, [size, size], InterpolationMode(settings.interpolation))
        theirs = TF.resized_crop(image.contiguous() / 255, *rest, antialias=True).clamp(0, 1)
        theirs = TF.horizontal_flip(theirs) if changes.flip[i] else theirs
        torch.testing.assert_close(ours[i], theirs, atol=2e-6, rtol=0)
        one = crops.crop_image(image, settings, (top, left, height, width))
        assert one.shape == (3, size, size)
        theirs = TF.resized_crop(image.contiguous(), *rest, antialias=True)
        assert (one.int() - theirs.int()).abs().max() <= 1


def test_a_box_never_leaves_the_image_and_that_of_one_image_is_that_of_the_batch() -> None:
    settings = ViewSettings.of(ViewsConfig(scale=(0.05, 1.0)), 1)
    draws = CropDraws(settings, seeding.uniform(1, "test", 0, torch.arange(500), UNIFORMS))
    for H, W in ((100, 100), (375, 500), (8, 8), (1, 50), (50, 1), (33, 500)):
        boxes = draws.boxes(H, W)
        for i in range(500):
            top, left, height, width = box(boxes, i)
            assert draws.box(i, H, W) == (top, left, height, width)
            assert 0 <= top < top + height <= H
            assert 0 <= left < left + width <= W


@pytest.mark.parametrize(
    ("ours", "theirs", "factors"),
    [
        (lambda x, f: augment.pull(x, f, 0 * f, 0 * f), TF.adjust_brightness, [0.6, 0.9, 1.4]),
        (lambda x, f: augment.pull(x, f, 1 - f, 0 * f), TF.adjust_contrast, [0.6, 0.9, 1.4]),
        (lambda x, f: augment.pull(x, f, 0 * f, 1 - f), TF.adjust_saturation, [0.6, 0.9, 1.4]),
        (augment.shift_hue, TF.adjust_hue, [-0.5, -0.1, 0.0, 0.03, 0.5]),
    ],
    ids=["brightness", "contrast", "saturation", "hue"],
)
def test_colour_changes_are_torchvisions(images: Tensor, ours, theirs, factors) -> None:
    images[0] = images[0, :1]  # one without colour: its hue is undefined
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 0.5, 1.0])] * 3)  # two or three channels alike
    images[1, :, :27, 0] = corners.t()
    for factor in factors:
        expected = torch.stack([theirs(image, factor) for image in images])
        got = images.clone()
        ours(got, torch.full((len(images), 1, 1, 1), factor))
        torch.testing.assert_close(got, expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize("size", [36, 96])  # by matrices, and by shifted copies
def test_the_blur_is_torchvisions(size: int) -> None:
    images, sigmas = smooth(12, size, size).float() / 255, torch.linspace(0.1, 2.0, 12)
    ours = augment.blur(images, sigmas)
    for i, sigma in enumerate(sigmas.tolist()):
        theirs = TF.gaussian_blur(images[i], [13, 13], [sigma, sigma])
        torch.testing.assert_close(ours[i], theirs, atol=2e-6, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("view", [1, 2, 3])
@pytest.mark.parametrize("recipe", ["dino", "simsiam"])
def test_views_are_torchvisions_whether_cropped_in_memory_or_one_by_one(
    recipe: str, view: int, channels: int
) -> None:
    """Within torchvision's rounding to 8 bits after each of up to seven steps: a level on average, ten at worst.

    Solarising turns a difference around level 128 upside down, so those few pixels are left out.
    """
    config = ViewsConfig(**METHODS[recipe].VIEWS, size=32, local_crops=1, local_size=16)
    images, ids = smooth(64, 40, 32, channels=channels), torch.arange(100, 164)
    one = torchvision_views(config, images, view, seeding.uniform(5, f"view{view}", 2, ids, UNIFORMS))
    batched = BatchedViews(config)
    in_memory = batched(images, view, 5, 2, ids)
    settings = batched.settings[view]
    draws = CropDraws(settings, seeding.uniform(5, f"view{view}", 2, ids, UNIFORMS))
    cut = [
        crops.crop_image(image.expand(3, -1, -1), settings, draws.box(i, 40, 32))
        for i, image in enumerate(images)
    ]
    one_by_one = batched.of_crops(torch.stack(cut), view, 5, 2, ids)
    solarized = recipe == "dino" and view == 2
    assert in_memory.shape == (64, 3, *([16, 16] if view == 3 else [32, 32]))
    # In the last pair only the crop was rounded.
    for ours, theirs, mean, most in (
        (in_memory, one, 2, 10),
        (one_by_one, one, 2, 10),
        (in_memory, one_by_one, 0.5, 6),
    ):
        levels = ((ours - theirs) * STD).abs() * 255
        near_threshold = ((ours * STD + MEAN - 0.5).abs() < 1.2 * most / 255) if solarized else ours.isnan()
        assert levels.mean() < mean
        assert levels[~near_threshold].max() < most


def test_a_batched_view_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    views, images, ids = BatchedViews(ViewsConfig(size=32)), smooth(50, 32, 32), torch.arange(50) * 7
    whole, finished = views(images, 2, 0, 4, ids), views.of_crops(images.clone(), 2, 0, 4, ids)
    part = torch.tensor([41, 3, 17])
    assert torch.equal(views(images[part], 2, 0, 4, ids[part]), whole[part])
    assert torch.equal(views.of_crops(images[part], 2, 0, 4, ids[part]), finished[part])


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_views_made_within_a_forward_pass_are_fp32(images: Tensor, precision: torch.dtype) -> None:
    """As view 2 is with `neighbors.timing=current`."""
    views, ids = BatchedViews(ViewsConfig(size=24, blur=1.0)), torch.arange(len(images))
    pixels = (images * 255).byte()

    def made() -> list[Tensor]:
        crops = pixels[..., :24, :24].clone()
        return [views(pixels, 2, 0, 0, ids), views.of_crops(crops, 2, 0, 0, ids)]

    expected = made()
    with torch.autocast("cpu", precision):
        for found, view in zip(made(), expected, strict=True):
            assert torch.equal(found, view)


def test_evaluations_normalise_as_views_do() -> None:
    views, transform = ViewsConfig(), EvalTransform.of_size(224)
    assert (transform.mean, transform.std) == (views.mean, views.std)


def test_levels_from_128_up_are_inverted() -> None:
    views = BatchedViews(ViewsConfig(size=16, color=0, blur=0, flip=0, solarize_p=(0.0, 1.0)))
    ramp = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 3, 1, 1)
    made = views.of_crops(ramp, 2, 0, 0, torch.tensor([0]))
    levels = ((made[0] * STD + MEAN)[0].flatten() * 255).round().tolist()
    assert levels == [level if level < 128 else 255 - level for level in range(256)]


@pytest.mark.parametrize(
    ("recipe", "view", "blur", "solarize", "jitter"),
    [
        ("dino", 1, 1.0, 0.0, (0.4, 0.4, 0.2, 0.1)),
        ("dino", 2, 0.1, 0.2, (0.4, 0.4, 0.2, 0.1)),
        ("dino", 3, 0.5, 0.0, (0.4, 0.4, 0.2, 0.1)),
        ("simsiam", 1, 0.5, 0.0, (0.4, 0.4, 0.4, 0.1)),
        ("simsiam", 2, 0.5, 0.0, (0.4, 0.4, 0.4, 0.1)),
    ],
)
def test_probabilities_and_ranges_are_the_published_ones(
    recipe: str, view: int, blur: float, solarize: float, jitter: tuple[float, ...]
) -> None:
    n = 40_000  # five standard errors of a share are then at most 0.0125
    settings = ViewSettings.of(ViewsConfig(**METHODS[recipe].VIEWS), view)
    _, params = drawn(settings, n, 100, 100)
    shares = {"flip": 0.5, "jitter": 0.8, "grey": 0.2, "blur": blur, "solarize": solarize}
    for name, share in shares.items():
        assert getattr(params, name).double().mean() == pytest.approx(share, abs=0.0125)
    for column, (centre, spread) in enumerate(zip((1, 1, 1, 0), jitter, strict=True)):
        found = params.factors[:, column]
        assert found.min() >= centre - spread
        assert found.max() <= centre + spread
        assert found.std() == pytest.approx(spread / 3**0.5, rel=0.03)
    assert params.sigma.mean() == pytest.approx(1.05, abs=0.02)
    assert params.sigma.min() == pytest.approx(0.1, abs=1e-3)
    assert params.sigma.max() == pytest.approx(2.0, abs=1e-3)
    first = params.order[:, 0].bincount(minlength=4) / n
    torch.testing.assert_close(first, torch.full((4,), 0.25), atol=0.0125, rtol=0)


@pytest.mark.parametrize(("height", "width"), [(100, 100), (90, 200), (300, 40)])
def test_crops_are_distributed_as_torchvisions(height: int, width: int) -> None:
    n, scale = 3000, (0.2, 1.0)
    settings = ViewSettings.of(ViewsConfig(scale=scale), 1)
    ours, _ = drawn(settings, n, height, width)
    theirs = v2.RandomResizedCrop(8, scale=scale)  # its ratios are 3/4 to 4/3
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    with seeding.seeded(0):
        made = [theirs.make_params([image]) for _ in range(n)]
    for name, side in zip(("top", "left", "height", "width"), ours, strict=True):
        a = side.double().sort().values
        b = torch.tensor([d[name] for d in made]).double().sort().values
        grid = torch.cat([a, b])
        below = [torch.searchsorted(values, grid, right=True) for values in (a, b)]
        gap = (below[0] - below[1]).abs().max() / n
        assert gap < 1.95 * (2 / n) ** 0.5  # Kolmogorov and Smirnov, at one in a thousand


# JPEGs at reduced size


def test_a_reduced_image_is_no_smaller_than_any_view_of_it_needs() -> None:
    assert reduction([(448, 900, 224)]) == 1
    assert reduction([(895, 896, 224)]) == 1
    assert reduction([(896, 896, 224)]) == 4
    assert reduction([(1792, 2000, 224)]) == 8
    assert reduction([(9000, 9000, 224), (700, 384, 96)]) == 4  # the local crop decides
    assert reduction([(9000, 9000, 224), (100, 100, 224)]) == 1  # enlarged anyway: by no more than before


def cut(
    images: FolderImages, views: ViewsConfig, numbers: tuple[int, ...], i: int, count: int
) -> list[Tensor]:
    """Crops of image i, `count` times, of 32 pixels."""
    made = [torch.empty(count, 3, 32, 32, dtype=torch.uint8) for _ in numbers]
    CropWorker(images, views, 0)((1, numbers), [(i, i)] * count, made)
    return made


@pytest.mark.parametrize("size", [(800, 1200), (801, 1203)])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_reduced_crop_shows_the_same_box(tmp_path: Path, orientation: int, size: tuple[int, int]) -> None:
    """On an image without fine detail, where only a shift or a stretch of the box could make a difference: half a
    pixel of the reduced image would be two levels."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = smooth(1, *size)[0].permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(tmp_path / "0.jpg", quality=98, exif=exif, subsampling=0)
    images = FolderImages(tmp_path)
    views = [ViewsConfig(size=32, local_crops=1, local_size=32, reduced_jpeg=r) for r in (False, True)]
    upright = orientation == 1 or size == (800, 1200)
    for exact, close in zip(*(cut(images, config, (1, 3), 0, 4) for config in views), strict=True):
        difference = (exact.int() - close.int()).abs().float()
        assert difference.mean() < 0.6
        assert (difference.max() > 0) == upright  # a turned photo of odd sides is decoded whole
    _, scale = images.load_reduced(0, lambda height, width: 8)
    assert scale == (8 if upright else 1)


def test_only_jpegs_are_reduced_and_only_if_asked(tmp_path: Path) -> None:
    pixels = picture(smooth(1, 800, 1000)[0])
    pixels.save(tmp_path / "0.png")
    pixels.save(tmp_path / "1.jpg")
    images = FolderImages(tmp_path)
    shapes = [tuple(images.load_reduced(i, lambda height, width: 8)[0].shape) for i in (0, 1)]
    assert shapes == [(3, 800, 1000), (3, 100, 125)]
    (crop,) = cut(images, ViewsConfig(size=32, reduced_jpeg=False), (1,), 1, 1)
    settings = ViewSettings.of(ViewsConfig(size=32), 1)
    box = CropDraws(settings, view_uniforms(0, 1, 1, torch.tensor([1]))).box(0, 800, 1000)
    assert torch.equal(crop[0], crops.crop_image(images.load(1), settings, box))
