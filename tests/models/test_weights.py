"""Weights that others trained: every form in which people have them gives the features of their model."""

import argparse
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
import torchvision
from helpers import hub_cache
from pretrainings import Small
from torch import Tensor, nn

from adasim.api import pretrain
from adasim.config import ModelConfig
from adasim.models import (
    BACKBONE_FILE,
    Backbone,
    EvalTransform,
    Weights,
    build_backbone,
    build_from,
    load_backbone,
    parse_source,
    read_weights,
    save_backbone,
    start_from,
)
from adasim.models.backbone import RESNETS, VITS, configuration
from adasim.util.errors import UserError

LITE = "tf_efficientnet_lite0"


def trained(name: str, **kwargs: Any) -> Any:
    """A model of timm with weights, and statistics of batch norm, that no other has."""
    torch.manual_seed(1)
    net: Any = timm.create_model(name, pretrained=False, **kwargs)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)  # type: ignore[arg-type]
    return net.eval()


def features(source: str | Path, size: int) -> tuple[Tensor, Tensor]:
    """Normalised pixels of no image, and what the encoder of `source` makes of them."""
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return x, build_from(read_weights(str(source)), str(source), size)(x)


def check_features(source: str | Path, net: Any) -> None:
    """The source's encoder gives the features of timm's model."""
    x, found = features(source, 64)
    with torch.no_grad():
        torch.testing.assert_close(found, net.forward_head(net.forward_features(x), pre_logits=True))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_name_and_a_plain_file_give_the_models_features_and_the_transform_that_timm_knows(
    suffix: str, tmp_path: Path
) -> None:
    net = trained(LITE)
    path = tmp_path / f"some: weights{suffix}"  # a colon is allowed
    saved = safetensors.torch.save_file if suffix == ".safetensors" else torch.save
    saved(net.state_dict(), path)
    check_features(f"{LITE}:{path}", net)
    weights = read_weights(f"{LITE}:{path}")
    assert weights.model == ModelConfig(name=LITE)
    assert weights.transform == EvalTransform(224, 256, (0.5,) * 3, (0.5,) * 3)
    assert read_weights(str(path)).model is None  # which exists, and does not say
    named = path.rename(tmp_path / f"{LITE}{suffix}")
    assert read_weights(str(named))[1:] == weights[1:]


@pytest.mark.parametrize(
    "name", ["efficientnet_b0", "mobilenetv3_small_050", "densenet121", "deit_tiny_distilled_patch16_224"]
)
def test_a_classifier_is_left_out_under_whichever_name_timm_has_for_it(name: str) -> None:
    weights = trained(name).state_dict()
    here = build_backbone(ModelConfig(name=name), 224, student=False)
    start_from([here], Weights(weights), "weights.pth")
    extra = next(iter(here.net.state_dict()))
    with pytest.raises(UserError, match=rf"{extra} is absent there"):
        start_from([here], Weights({n: t for n, t in weights.items() if n != extra}), "weights.pth")
    with pytest.raises(UserError, match=r"surplus\.weight is \(3,\) there and absent here"):
        start_from([here], Weights(weights | {"surplus.weight": torch.ones(3)}), "weights.pth")


def test_a_model_that_timm_builds_for_one_size_is_built_for_the_size_asked_for(tmp_path: Path) -> None:
    """With its positions interpolated as timm does it."""
    torch.save(trained("deit_tiny_patch16_224").state_dict(), tmp_path / "w.pth")
    overlay = {"file": str(tmp_path / "w.pth"), "url": ""}
    theirs: Any = timm.create_model(
        "deit_tiny_patch16_224", pretrained=True, pretrained_cfg_overlay=overlay, num_classes=0, img_size=96
    )
    x, found = features(f"deit_tiny_patch16_224:{tmp_path / 'w.pth'}", 96)
    with torch.no_grad():
        torch.testing.assert_close(found, theirs.eval()(x))


# Other libraries' names


def test_torchvisions_vit_has_the_same_features_and_imagenets_normalisation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = torchvision.models.VisionTransformer(32, 8, 12, 3, 192, 768, num_classes=5).eval()
    nn.init.normal_(theirs.class_token)
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    theirs.heads = nn.Identity()
    x = torch.randn(2, 3, 32, 32)
    weights = read_weights(f"vit_tiny:{tmp_path / 'w.pth'}")
    assert weights.model == ModelConfig(name="vit_tiny", patch_size=8)
    assert weights.transform == EvalTransform.of_size(224).bilinear()
    here = build_backbone(weights.model, 32, student=False).eval()
    start_from([here], weights, "w.pth")
    with torch.no_grad():
        torch.testing.assert_close(here(x), theirs(x), atol=1e-4, rtol=1e-4)


def test_torchvisions_resnet_of_an_old_version_has_the_same_features(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = torchvision.models.resnet18().eval()
    tensors = {n: t for n, t in theirs.state_dict().items() if not n.endswith("num_batches_tracked")}
    torch.save(tensors, tmp_path / "resnet18.pth")
    theirs.fc = nn.Identity()
    x, found = features(tmp_path / "resnet18.pth", 64)
    with torch.no_grad():
        torch.testing.assert_close(found, theirs(x))


def vit(kind: str) -> Any:
    import transformers

    shape: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3}
    shape |= {"intermediate_size": 384, "image_size": 32, "patch_size": 8}
    return getattr(transformers, kind)(transformers.ViTConfig(**shape))


def resnet(kind: str) -> Any:
    import transformers

    sizes: dict[str, Any] = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
    return getattr(transformers, kind)(transformers.ResNetConfig(**sizes, layer_type="basic"))


@pytest.mark.parametrize("build", [vit, resnet])
@pytest.mark.parametrize("kind", ["Model", "ForImageClassification"])
@pytest.mark.parametrize("layout", ["folder", "state_dict"])
def test_transformers_vits_and_resnets_have_the_same_features(
    build: Callable[[str], Any], kind: str, layout: str, tmp_path: Path
) -> None:
    """Under the names of their files and, which differ since version 5, those that the models have in memory."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = build(f"{'ViT' if build is vit else 'ResNet'}{kind}").eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.05)
    name = "vit_mini" if build is vit else "resnet18"
    source = str(tmp_path)
    if layout == "folder":
        theirs.save_pretrained(tmp_path)
        processor = {"image_mean": [0.4] * 3, "image_std": [0.3] * 3, "resample": 2, "size": {"height": 32}}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    else:
        torch.save(theirs.state_dict(), tmp_path / "w.pth")
        source = f"{name}:{tmp_path / 'w.pth'}"
    weights = read_weights(source)
    assert weights.model == ModelConfig(name=name, patch_size=8 if build is vit else 16)
    if layout == "folder":
        assert weights.transform == EvalTransform(32, 32, (0.4,) * 3, (0.3,) * 3, "bilinear", squash=True)
    here = build_backbone(weights.model, 32, student=False).eval()
    start_from([here], weights, source)
    x = torch.randn(2, 3, 32, 32)
    encoder = getattr(theirs, theirs.base_model_prefix, theirs)
    with torch.no_grad():
        last = encoder(pixel_values=x)
        expected = last.last_hidden_state[:, 0] if build is vit else last.pooler_output.flatten(1)
        torch.testing.assert_close(here(x), expected, atol=1e-4, rtol=1e-4)


def test_transformers_wrapper_of_a_timm_model_is_that_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.TimmWrapperConfig(architecture="resnet18", num_labels=3)
    theirs = transformers.TimmWrapperForImageClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    cfg = {"input_size": [3, 96, 96], "mean": [0.1] * 3, "std": [0.2] * 3, "crop_pct": 1.0}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"pretrained_cfg": cfg}))
    check_features(tmp_path, theirs.timm_model)
    assert read_weights(str(tmp_path)).transform == EvalTransform(96, 96, (0.1,) * 3, (0.2,) * 3)


def test_a_vit_of_transformers_that_timm_would_compute_otherwise_is_not_guessed(tmp_path: Path) -> None:
    for wrong in ({"num_attention_heads": 6}, {"hidden_act": "relu"}, {"qkv_bias": False}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", **wrong}))
        torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
        weights = read_weights(str(tmp_path))
        assert weights.model is None
        with pytest.raises(UserError, match="does not say which model its weights are of"):
            build_from(weights, str(tmp_path))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"size": {"height": 224, "width": 224}, "resample": 2}, (224, 224, "bilinear", True)),
        ({"size": 384}, (384, 384, "bicubic", True)),
        ({"size": {"shortest_edge": 256}, "crop_size": {"height": 224}}, (224, 256, "bicubic", False)),
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, (224, 256, "bicubic", False)),
    ],
)
def test_an_image_processor_of_transformers_gives_the_transform(
    said: dict[str, Any], expected: tuple[int, int, Any, bool], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "resnet"}))
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    said = {"resample": 3, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2] * 3, **said}
    if "crop_size" in said:
        said["do_center_crop"] = True
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    size, resize, *how = expected
    found = read_weights(str(tmp_path)).transform
    assert found == EvalTransform(size, resize, (0.5, 0.4, 0.3), (0.2,) * 3, *how)


# Folders and the hub


def published(folder: Path, net: Any, **more: Any) -> Path:
    """As timm's `save_for_hf` writes it."""
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(net.state_dict(), folder / "model.safetensors")
    cfg = {"input_size": [3, 96, 96], "mean": [0.1] * 3, "std": [0.2] * 3, "crop_pct": 1.0, "tag": "mine"}
    config = {"architecture": "resnet18", "num_classes": 1000, "pretrained_cfg": cfg, **more}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_of_timm_and_its_file_give_the_models_features(tmp_path: Path) -> None:
    net = trained("resnet18")
    folder = published(tmp_path / "mine", net)
    for source in (str(folder), f"local-dir:{folder}", str(folder / "model.safetensors")):
        check_features(source, net)
        assert read_weights(source).model == ModelConfig(name="resnet18")
        assert read_weights(source).transform == EvalTransform(96, 96, (0.1,) * 3, (0.2,) * 3)


def test_a_model_of_the_hub_is_read_as_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a cache that stands for a download."""
    net = trained("resnet18")
    published(hub_cache(monkeypatch, tmp_path, "somebody/birds"), net)
    check_features("hf-hub:somebody/birds", net)
    with pytest.raises(UserError, match="weights of hf-hub:somebody/bees are not on this machine"):
        read_weights("hf-hub:somebody/bees")


@pytest.mark.parametrize(
    ("name", "kwargs", "patch"),
    [("vit_mini", {"patch_size": 4}, 4), ("resnet18", {"small_stem": True}, 16), ("resnet_tiny", {}, 16)],
)
def test_a_run_says_which_encoder_it_has(
    tmp_path: Path, name: str, kwargs: dict[str, Any], patch: int
) -> None:
    model = ModelConfig(name=name, **kwargs)
    transform = EvalTransform.of_size(32, (0.5,) * 3, (0.25,) * 3)
    save_backbone(tmp_path / BACKBONE_FILE, build_backbone(model, 32, student=True), transform)
    weights = read_weights(str(tmp_path))
    assert weights.model == model
    assert weights.transform == transform


def test_timms_models_that_have_a_name_of_ours_are_the_same_nets() -> None:
    """So that weights of vit_small_patch8_224 may be called vit_small's, which takes views of any size."""
    ours = []
    for name in timm.list_models(["vit_*_patch*", "resnet*"]):
        model = configuration(name, {}, {})
        if model is None or model.name == name or model.name not in (VITS | RESNETS):
            continue
        with torch.device("meta"):
            theirs: Any = timm.create_model(name, num_classes=0, dynamic_img_size=True)
            model = configuration(name, {}, theirs.state_dict())
            assert model is not None
            here = build_backbone(model, theirs.patch_embed.img_size[0], student=False)
        assert str(here.net) == str(theirs)
        ours.append(name)
    assert "vit_small_patch8_224" in ours


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architecture": "hf-hub:evil/model"}, "does not say which model"),
        ({"model_args": {"checkpoint_path": "x"}}, "does not say which model"),
        ({"architecture": 3}, "damaged description"),
        ({"model_args": [1]}, "damaged description"),
        ({"architecture": "convnext_atto"}, "does not fit convnext_atto"),
        ({"pretrained_cfg": {"mean": 3}}, "damaged description"),
        ({"pretrained_cfg": {"mean": [0] * 3, "std": [0] * 3}}, "impossible normalisation"),
        (
            {"pretrained_cfg": {"mean": [0] * 3, "std": [1] * 3, "input_size": [3, 1, 60000]}},
            "impossible normalisation",
        ),
    ],
)
def test_somebodys_config_is_data_and_bounded(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet18", **config}))
    tensors = {"patch_embed.proj.weight": torch.zeros(768, 3, 16, 16)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=words):
        build_from(read_weights(str(tmp_path)), str(tmp_path))


def test_what_cannot_be_a_source_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pth")
    (tmp_path / "model.onnx").write_bytes(b"")
    for run in ("run", "lost"):
        (tmp_path / run / "checkpoints").mkdir(parents=True)
        (tmp_path / run / "config.json").write_text("{}")
    (tmp_path / "lost" / "checkpoints" / "step-000000009").mkdir()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for source, words in {
        "resent50:w.pth": "'resent50' in resent50:w.pth is not a model of timm or adasim. Did you mean",
        "resnet50:nothing.pth": "resnet50:nothing.pth names no file of weights",
        "resnet50.made_up:w.pth": "Invalid pretrained tag",
        "nowhere/run": "No backbone at nowhere/run",
        "vit_small": "There are no trained weights called vit_small",
        "model.onnx": "is a program of ONNX, whose weights cannot be taken out. Give the run",
        ".": "is a program of ONNX",
        "run": "run has no backbone.safetensors yet. Let the run save once.",
        "lost": "lost has lost its backbone.safetensors. To write it again from the newest checkpoint: adasim "
        "pretrain --resume lost",
        "empty": "empty is a folder without backbone.safetensors",
        "nothing_here": "nothing_here is no run folder and no file, and not a model of timm",
    }.items():
        with pytest.raises(UserError) as error:
            read_weights(source)
        assert words in str(error.value), source


def test_what_exists_is_a_path_also_with_a_colon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_source("resnet50:a.pth") == ("resnet50", Path("a.pth"))
    Path("resnet50:a.pth").write_bytes(b"")
    assert parse_source("resnet50:a.pth") == ("", Path("resnet50:a.pth"))
    assert parse_source("resnet50.a1_in1k") == ("resnet50.a1_in1k", None)
    assert parse_source("hf-hub:a/b") == ("hf-hub:a/b", None)


# Starting from weights

VIT = ModelConfig(name="vit_mini", patch_size=8)
Layout = Callable[[dict[str, Tensor], Path], Path]


def fresh(size: int = 16, seed: int = 0, model: ModelConfig = VIT) -> Backbone:
    torch.manual_seed(seed)
    return build_backbone(model, size, 3, student=False)


def as_run(weights: dict[str, Tensor], folder: Path) -> Path:
    save_backbone(folder / BACKBONE_FILE, fresh(seed=1))
    return folder


def as_published_checkpoint(weights: dict[str, Tensor], folder: Path) -> Path:
    """dino_deitsmall16_pretrain_full_checkpoint.pth: both networks with heads, the student within DDP."""
    other = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    content = {
        "student": {f"module.backbone.{n}": t for n, t in other.items()}
        | {"module.head.mlp.0.bias": torch.ones(2)},
        "teacher": {f"backbone.{n}": t for n, t in weights.items()} | {"head.mlp.0.bias": torch.ones(2)},
        "epoch": 800,
        "args": argparse.Namespace(arch="vit_small", lr=0.0005),
        "optimizer": {"state": {}},
    }
    torch.save(content, folder / "full.pth")
    return folder / "full.pth"


def as_safetensors(weights: dict[str, Tensor], folder: Path) -> Path:
    """As another library exports it, with a classifier."""
    content = {name: tensor.clone() for name, tensor in weights.items()} | {"head.weight": torch.ones(10, 96)}
    safetensors.torch.save_file(content, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize("layout", [as_run, as_published_checkpoint, as_safetensors])
def test_every_layout_gives_the_encoders_weights(layout: Layout, tmp_path: Path) -> None:
    trained = fresh(seed=1)
    student, teacher = fresh(seed=2), fresh(seed=3)
    source = str(layout(trained.net.state_dict(), tmp_path))
    start_from([student, teacher], read_weights(source), source)
    for name, tensor in trained.net.state_dict().items():
        assert torch.equal(student.net.state_dict()[name], tensor), name
        assert torch.equal(teacher.net.state_dict()[name], tensor), name


def test_the_position_grid_is_interpolated_to_another_size(tmp_path: Path) -> None:
    trained, larger = fresh(16, seed=1), fresh(32)
    torch.save(trained.net.state_dict(), tmp_path / "w.pth")
    start_from([larger], read_weights(str(tmp_path / "w.pth")), "w.pth")
    grid: Any = larger.net.pos_embed
    assert grid.shape == (1, 17, 96)  # CLS and 4 x 4, from 2 x 2
    assert torch.equal(grid[:, 0], trained.net.pos_embed[:, 0])  # type: ignore[index]
    assert torch.equal(larger.net.blocks[0].attn.qkv.weight, trained.net.blocks[0].attn.qkv.weight)  # type: ignore[index, union-attr]


def test_a_timm_name_loads_its_pretrained_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through timm and its hub, from a cache where random weights stand in for downloaded ones."""
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    torch.manual_seed(5)
    stand_in = timm.create_model(name, pretrained=False)
    downloaded = hub_cache(monkeypatch, tmp_path, f"timm/{name}")
    safetensors.torch.save_file(stand_in.state_dict(), downloaded / "model.safetensors")
    encoder = fresh(224, model=ModelConfig(name="vit_tiny"))
    weights = read_weights(name)
    start_from([encoder], weights, name)
    assert torch.equal(encoder.net.blocks[3].mlp.fc1.weight, stand_in.blocks[3].mlp.fc1.weight)  # type: ignore[index, union-attr]
    assert weights.model == ModelConfig(name="vit_tiny", patch_size=16)
    assert weights.transform == EvalTransform(224, 248, (0.5,) * 3, (0.5,) * 3)
    with pytest.raises(UserError, match=r"weights of vit_base_patch16_224.dino are not on this machine"):
        read_weights("vit_base_patch16_224.dino")


class Bomb:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (open, (str(self.trace), "w"))


def test_wrong_weights_are_one_sentence_and_pickled_code_is_never_run(tmp_path: Path) -> None:
    other = fresh(seed=1, model=ModelConfig(name="vit_mini", patch_size=4))
    torch.save({n: t for n, t in other.net.state_dict().items() if n != "pos_embed"}, tmp_path / "short.pth")
    torch.save(fresh(model=ModelConfig(name="resnet_tiny")).net.state_dict(), tmp_path / "resnet.pth")
    (tmp_path / "text.pth").write_text("hello")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "evil.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "bomb.pth").write_bytes(pickle.dumps({"w": Bomb(tmp_path / "exploded")}))
    (tmp_path / "cut.safetensors").write_bytes(b"\x00" * 4)
    for name, words in {
        "short.pth": "does not fit vit_mini: pos_embed is absent there",
        "resnet.pth": "does not fit vit_mini: cls_token is absent there and (1, 1, 96) here",
        "text.pth": "it is damaged, or not made by torch.save",
        "evil.pth": "torch.nn.modules.linear.Linear, which is not safe to load: save the model's state_dict",
        "bomb.pth": "cannot be read as a file of weights",
        "list.pth": "does not hold a model's weights",
        "cut.safetensors": "not a whole safetensors file",
    }.items():
        source = str(tmp_path / name)
        encoder = fresh()
        before = {n: t.clone() for n, t in encoder.net.state_dict().items()}
        with pytest.raises(UserError) as error:
            start_from([encoder], read_weights(source), source)
        assert words in str(error.value), name
        assert all(torch.equal(t, before[n]) for n, t in encoder.net.state_dict().items())
    assert not (tmp_path / "exploded").exists()


def test_a_run_starts_from_weights_and_resumes_without_them(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "earlier" / BACKBONE_FILE
    weights.parent.mkdir()
    save_backbone(weights, fresh(seed=1), EvalTransform.of_size(16))
    still = dict.fromkeys(("optim__min_lr", "optim__weight_decay", "optim__weight_decay_end"), 0.0)
    config = small(model__init=str(weights.parent), epochs=2, optim__lr=1e-12, **still)
    pretrain(config, tmp_path / "run")
    assert "starts from the weights of" in capsys.readouterr().out
    for name, tensor in load_backbone(tmp_path / "run").net.state_dict().items():
        assert torch.allclose(tensor, load_backbone(weights).net.state_dict()[name], atol=1e-6), name
    shutil.rmtree(weights.parent)
    config.epochs = 3
    pretrain(config, tmp_path / "run", resume=True)
    with pytest.raises(UserError, match="No backbone at"):
        pretrain(config, tmp_path / "other")
    assert not (tmp_path / "other").exists()
