"""Extraction gives each image's own features, whatever the path; the cache gives them back or not at all."""

import json
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from helpers import forked, photograph
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode, v2

from adasim.config import ModelConfig
from adasim.data import ArrayImages, FolderImages, synthetic
from adasim.eval.features import cached_features, encode, extract
from adasim.eval.knn import online_knn
from adasim.models import Backbone, build_backbone
from adasim.models.transform import EvalTransform
from adasim.recipes import get_recipe
from adasim.util.errors import UserError

SMALL = EvalTransform.of_size(16, (0.5,), (0.25,))


def levels(view: Tensor, transform: EvalTransform) -> Tensor:
    """A normalised view as 8-bit levels again, (3, S, S)."""
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (transform.mean, transform.std))
    return (view * std + mean) * 255


def as_tensor(image: np.ndarray | Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@pytest.fixture(scope="module")
def resnet() -> Backbone:
    torch.manual_seed(0)
    backbone = build_backbone(ModelConfig(name="resnet_tiny"), 16, student=False)
    backbone(torch.randn(8, 3, 16, 16))  # running statistics that are not those of the initialisation
    return backbone


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """120 images of several sizes in three class folders."""
    for i in range(120):
        path = tmp_path / "photos" / "abc"[i % 3] / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photograph(16 + i % 5, 20)[:, :, :] // (1 + i % 4)).save(path)
    return tmp_path / "photos"


# Transforms


def test_the_view_is_torchvisions_pixel_for_pixel() -> None:
    published = EvalTransform.for_run(get_recipe("dino-vit-s16"))
    assert (published.size, published.resize) == (224, 256)
    for transform in (published, EvalTransform.of_size(96)):
        resize = v2.Resize(transform.resize, InterpolationMode.BICUBIC, antialias=True)
        theirs = v2.Compose([resize, v2.CenterCrop(transform.size)])
        for height, width in [(333, 500), (120, 111), (400, 401), (97, 210)]:
            pixels = as_tensor(photograph(height, width))
            assert torch.equal(transform.crop(pixels), theirs(pixels)), (height, width)


def test_a_transform_survives_timms_names_at_every_size_and_timm_makes_the_same_view() -> None:
    for size in range(8, 640):
        transform = EvalTransform.of_size(size, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
        assert EvalTransform.from_timm(json.loads(json.dumps(transform.to_timm()))) == transform
    photo = Image.fromarray(photograph(150, 201))
    for size in (32, 96, 100):
        transform = EvalTransform.of_size(size, (0.5,), (0.25,))
        theirs = timm.data.create_transform(**timm.data.resolve_data_config(transform.to_timm()))(photo)
        difference = (levels(transform(photo), transform) - levels(theirs, transform)).abs()
        assert difference.max() <= 2  # PIL rounds between its two passes


def test_a_pil_image_a_tensor_and_a_batch_get_the_same_view() -> None:
    pixels = photograph(40, 50)
    transform = EvalTransform.of_size(16)
    tensor = as_tensor(pixels)
    view = transform(Image.fromarray(pixels))
    assert view.shape == (3, 16, 16)
    assert torch.equal(view, transform(tensor))
    assert torch.equal(view, transform(tensor[None])[0])
    sideways = Image.fromarray(pixels)
    sideways.getexif()[0x0112] = 3  # upside down, as a camera notes it
    assert torch.equal(transform(sideways), transform(tensor.flip(1, 2)))


def test_the_few_shot_view_squashes_to_257_bilinearly_whatever_the_aspect() -> None:
    pixels = photograph(200, 330)
    transform = EvalTransform.of_size(224).for_fewshot()
    image = Image.fromarray(pixels).resize((257, 257), Image.Resampling.BILINEAR).crop((16, 16, 240, 240))
    view = transform(as_tensor(pixels)[None])[0]
    assert (levels(view, transform) - as_tensor(image)).abs().max() <= 2


def test_small_images_of_the_views_size_keep_their_pixels_and_greyscale_becomes_three_equal_channels() -> (
    None
):
    pixels = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    assert torch.allclose(SMALL(pixels), (pixels / 255 - 0.5) / 0.25, atol=1e-6)
    view = SMALL(torch.randint(0, 256, (2, 1, 20, 16), dtype=torch.uint8))
    assert view.shape == (2, 3, 16, 16)
    assert torch.equal(view[:, 0], view[:, 2])


@pytest.mark.parametrize("name", ["coat_lite_medium_384.in1k", "dm_nfnet_f0.dm_in1k", "resnet18.a1_in1k"])
def test_a_view_is_squashed_or_cropped_as_timms_configuration_says(name: str) -> None:
    wanted = timm.data.resolve_data_config(pretrained_cfg=vars(timm.get_pretrained_cfg(name)))
    transform = EvalTransform.from_timm(wanted)
    assert transform.squash == (wanted["crop_mode"] == "squash")
    assert EvalTransform.from_timm(json.loads(json.dumps(transform.to_timm()))) == transform
    assert transform.at(transform.size * 2).squash == transform.squash
    photo = Image.fromarray(photograph(150, 301))
    theirs = timm.data.create_transform(**wanted)(photo)
    assert (levels(transform(photo), transform) - levels(theirs, transform)).abs().max() <= 2


# Extraction


@pytest.mark.slow
def test_a_low_limit_of_open_files_is_enough_for_workers(resnet: Backbone, folder: Path) -> None:
    def work() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
        print(len(extract(resnet, FolderImages(folder), SMALL, batch_size=40, workers=2)))

    assert forked(work) == (0, "120\n")


@pytest.mark.parametrize("workers", [None, 0, 2])
def test_features_are_those_of_each_image_alone(resnet: Backbone, folder: Path, workers: int | None) -> None:
    images = synthetic(120, 16) if workers is None else FolderImages(folder)  # in memory, or files
    features = extract(resnet, images, SMALL, batch_size=50, workers=workers or 0)
    resnet.eval()
    with torch.no_grad():
        for i in (0, 49, 50, 119):
            assert torch.allclose(features[i], resnet(SMALL(images.load(i)[None]))[0], atol=1e-4)


def test_modes_and_statistics_are_left_as_they_were_and_no_number_is_drawn(resnet: Backbone) -> None:
    resnet.train()
    resnet.net.get_submodule("layer1").eval()  # a mixture, as fine-tuning makes it
    modes = [module.training for module in resnet.modules()]
    before = {name: tensor.clone() for name, tensor in resnet.state_dict().items()}
    generator = torch.get_rng_state()
    online_knn(resnet, synthetic(64, 16), SMALL)
    assert [module.training for module in resnet.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in resnet.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_features_may_be_learned_from(resnet: Backbone) -> None:
    features = extract(resnet, synthetic(8, 16), SMALL)
    layer = nn.Linear(features.shape[1], 2)
    layer(features).sum().backward()
    assert layer.weight.grad is not None


def test_dino_s_linear_input_is_the_cls_of_the_last_four_blocks_each_normed() -> None:
    torch.manual_seed(0)
    backbone = build_backbone(ModelConfig(name="vit_mini", patch_size=4), 16, student=False).eval()
    outputs: list[Tensor] = []
    net: Any = backbone.net
    for block in net.blocks:
        block.register_forward_hook(lambda module, args, output: outputs.append(output))
    views = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        found = encode(backbone, views, "linear-dino")
        wanted = torch.cat([net.norm(output)[:, 0] for output in outputs[-4:]], dim=1)
        assert torch.allclose(found[:, -96:], backbone(views), atol=1e-5)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_dino_s_linear_input_of_vit_b_is_cls_and_mean_patch() -> None:
    torch.manual_seed(0)
    net: Any = timm.create_model("vit_base_patch16_224", depth=1, img_size=32, num_classes=0).eval()
    backbone = Backbone(net, {"name": "vit_base", "dim": 768})
    views = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        tokens = net.forward_features(views)  # (B, 1 + 4, 768)
        wanted = torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=1)
        assert torch.allclose(encode(backbone, views, "linear-dino"), wanted, atol=1e-5)


def test_dino_s_linear_input_of_a_resnet_is_its_pooled_feature(resnet: Backbone) -> None:
    resnet.eval()
    views = torch.randn(2, 3, 16, 16)
    assert torch.equal(encode(resnet, views, "linear-dino"), encode(resnet, views, "pooled"))


def test_an_unreadable_image_stops_plain_extraction_by_name(resnet: Backbone, folder: Path) -> None:
    (folder / "b" / "001.png").write_bytes(b"<html>")
    with pytest.raises(UserError, match=r"b/001\.png"):
        extract(resnet, FolderImages(folder), SMALL)


# The cache


def test_an_unreadable_image_is_left_out(resnet: Backbone, folder: Path, tmp_path: Path) -> None:
    whole = FolderImages(folder)
    everything = extract(resnet, whole, SMALL)
    broken = 57
    Path(whole.where(broken)).write_bytes(b"")
    for _ in range(2):  # extracted, then from the disk
        found = cached_features(tmp_path / "cache", resnet, FolderImages(folder), SMALL)
        kept = [i for i in range(len(whole)) if i != broken]
        assert found.ids.tolist() == kept
        assert torch.allclose(found.values, everything[kept], atol=1e-5)
        assert list(found.unreadable) == [broken]


def test_files_of_the_same_size_written_anew_or_renamed_are_not_answered_from_the_cache(
    resnet: Backbone, tmp_path: Path
) -> None:
    paths = [tmp_path / "photos" / "a" / f"{i:03}.bmp" for i in range(80)]
    paths[0].parent.mkdir(parents=True)
    for i, path in enumerate(paths):
        Image.fromarray(photograph(16, 20) // (1 + i % 4)).save(path)
        os.utime(path, ns=(10**18, 10**18))

    def look() -> Tensor:
        return cached_features(
            tmp_path / "cache", resnet, FolderImages(tmp_path / "photos"), SMALL, progress=False
        ).values

    before = look()
    paths[5].rename(tmp_path / "aside")
    paths[6].rename(paths[5])
    (tmp_path / "aside").rename(paths[6])
    order = list(range(80))
    order[5], order[6] = 6, 5
    assert torch.equal(look(), before[order])
    for path in paths:
        head = path.read_bytes()[:54]
        path.write_bytes(head + bytes(path.stat().st_size - len(head)))
    assert (look().std(dim=0) < 1e-5).all()  # all black


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with every pass over a data set."""
    seen: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        seen.append("pass")
        return extract(*args, **kwargs)

    monkeypatch.setattr("adasim.eval.features.extract", counted)
    return seen


def test_three_evaluations_cost_one_pass(resnet: Backbone, tmp_path: Path, passes: list[str]) -> None:
    images = synthetic(40, 16)
    for transform in (SMALL, SMALL.for_fewshot(), SMALL.bilinear()):  # equal for images of this very size
        values = cached_features(tmp_path, resnet, images, transform).values
        assert torch.equal(values, cached_features(tmp_path, resnet, images, SMALL).values)
    assert len(passes) == 1


def test_other_weights_data_transform_or_kind_cost_another_pass(tmp_path: Path, passes: list[str]) -> None:
    torch.manual_seed(0)
    backbone = build_backbone(ModelConfig(name="vit_mini", patch_size=4), 16, student=False)
    images = synthetic(40, 16)
    other = ArrayImages("synthetic-train", images.images.clone(), images.labels)
    other.images[7, 0, 3, 3] ^= 1
    for given, transform in ((images, SMALL), (other, SMALL), (images, replace(SMALL, mean=(0.4,)))):
        cached_features(tmp_path, backbone, given, transform)
    cached_features(tmp_path, backbone, images, SMALL, kind="linear-dino")
    with torch.no_grad():
        backbone.net.get_parameter("norm.bias")[0] += 1e-3
    cached_features(tmp_path, backbone, images, SMALL)
    assert len(passes) == 5


@pytest.mark.parametrize(
    "damaged",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-1] + bytes([whole[-1] ^ 4]),
        lambda whole: b"",
        lambda whole: b"\xff" * 8 + b"{}" + bytes(64),  # hostile
    ],
)
def test_a_damaged_file_is_made_anew(
    resnet: Backbone, tmp_path: Path, passes: list[str], damaged: Callable[[bytes], bytes]
) -> None:
    images = synthetic(40, 16)
    first = cached_features(tmp_path, resnet, images, SMALL).values
    [file] = tmp_path.iterdir()
    file.write_bytes(damaged(file.read_bytes()))
    for _ in range(2):
        assert torch.equal(cached_features(tmp_path, resnet, images, SMALL).values, first)
    assert len(passes) == 2


def test_a_place_that_cannot_be_written_costs_a_pass_and_nothing_else(
    resnet: Backbone, tmp_path: Path, passes: list[str]
) -> None:
    (tmp_path / "taken").write_text("a file")
    for _ in range(2):
        cached_features(tmp_path / "taken", resnet, synthetic(8, 16), SMALL)
    assert len(passes) == 2
