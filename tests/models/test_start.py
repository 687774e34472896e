"""Starting from weights: runs, files in every layout that people have, and timm models by name."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import safetensors.torch
import timm
import torch
from pretrainings import Small
from torch import Tensor

from adasim.api import pretrain
from adasim.config import ModelConfig
from adasim.models import (
    BACKBONE_FILE,
    Backbone,
    EvalTransform,
    build_backbone,
    load_backbone,
    read_weights,
    save_backbone,
    start_from,
)
from adasim.util.errors import UserError

VIT = ModelConfig(name="vit_mini", patch_size=8)
Layout = Callable[[dict[str, Tensor], Path], Path]


def fresh(size: int = 16, seed: int = 0, model: ModelConfig = VIT) -> Backbone:
    torch.manual_seed(seed)
    return build_backbone(model, size, 3, student=False)


def as_run(weights: dict[str, Tensor], folder: Path) -> Path:
    save_backbone(folder / BACKBONE_FILE, fresh(seed=1))
    return folder


def as_published_encoder(weights: dict[str, Tensor], folder: Path) -> Path:
    """dino_deitsmall16_pretrain.pth: the encoder's weights alone."""
    torch.save(weights, folder / "published.pth")
    return folder / "published.pth"


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


@pytest.mark.parametrize(
    "layout",
    [as_run, as_published_encoder, as_published_checkpoint, as_safetensors],
    ids=lambda f: f.__name__,
)
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
    folder = tmp_path / f"models--timm--{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    safetensors.torch.save_file(
        stand_in.state_dict(), folder / "snapshots" / ("0" * 40) / "model.safetensors"
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    encoder = fresh(224, model=ModelConfig(name="vit_tiny"))
    weights = read_weights(name)
    start_from([encoder], weights, name)
    assert torch.equal(encoder.net.blocks[3].mlp.fc1.weight, stand_in.blocks[3].mlp.fc1.weight)  # type: ignore[index, union-attr]
    assert weights.model == ModelConfig(name="vit_tiny", patch_size=16)
    assert weights.transform == EvalTransform(224, 248, (0.5,) * 3, (0.5,) * 3)
    with pytest.raises(UserError, match=r"weights of vit_base_patch16_224.dino are not on this machine"):
        read_weights("vit_base_patch16_224.dino")


def test_wrong_weights_are_one_sentence(tmp_path: Path) -> None:
    other = fresh(seed=1, model=ModelConfig(name="vit_mini", patch_size=4))
    torch.save({n: t for n, t in other.net.state_dict().items() if n != "pos_embed"}, tmp_path / "short.pth")
    torch.save(fresh(model=ModelConfig(name="resnet_tiny")).net.state_dict(), tmp_path / "resnet.pth")
    (tmp_path / "text.pth").write_text("hello")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "evil.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "cut.safetensors").write_bytes(b"\x00" * 4)
    for name, words in {
        "short.pth": "does not fit vit_mini: pos_embed is absent there",
        "resnet.pth": "does not fit vit_mini: cls_token is absent there and (1, 1, 96) here",
        "text.pth": "cannot be read as a file of weights (it is damaged, or not made by torch.save).",
        "evil.pth": "it holds torch.nn.modules.linear.Linear, which is not safe to load: save the model's state_dict",
        "list.pth": "does not hold a model's weights",
        "cut.safetensors": "not a whole safetensors file",
        "nothing_here": "nothing_here is no run folder and no file, and not a model of timm",
        ".": "is a folder without backbone.safetensors",
    }.items():
        source = name if name == "nothing_here" else str(tmp_path / name)
        encoder = fresh()
        before = {n: t.clone() for n, t in encoder.net.state_dict().items()}
        with pytest.raises(UserError) as error:
            start_from([encoder], read_weights(source), source)
        assert words in str(error.value), name
        assert all(torch.equal(t, before[n]) for n, t in encoder.net.state_dict().items())


def test_a_run_starts_from_weights_and_resumes_without_them(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "earlier" / BACKBONE_FILE
    weights.parent.mkdir()
    save_backbone(weights, fresh(seed=1), EvalTransform.of_size(16))
    frozen = {
        "optim__lr": 1e-12,
        "optim__min_lr": 0.0,
        "optim__weight_decay": 0.0,
        "optim__weight_decay_end": 0.0,
    }
    config = small(model__init=str(weights.parent), epochs=2, **frozen)
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
