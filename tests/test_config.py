"""A configuration holds only what its annotations allow, whoever wrote it: Python, a recipe or a saved file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adasim.api import pretrain
from adasim.config import (
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    NeighborsConfig,
    OptimConfig,
    SaveConfig,
    ViewsConfig,
)
from adasim.methods import DinoSettings, SimSiamSettings
from adasim.recipes import RECIPES
from adasim.registry import PAIRS
from adasim.runs.folder import RunFolder
from adasim.util.errors import UserError


@pytest.mark.parametrize(
    ("make", "values", "sentence"),
    [
        (Config, {"pairs": "adsim"}, "pairs='adsim' is unknown. Did you mean adasim?"),
        (Config, {"method": "byol"}, "method='byol' is unknown. Choose one of dino, nnclr, simsiam."),
        (Config, {"method": "SimSiam"}, "method='SimSiam' is unknown. Did you mean simsiam?"),
        (Config, {"precision": 16}, "precision=16 is unknown. Did you mean fp16? Choose one of fp32,"),
        (OptimConfig, {"name": "adam"}, "optim.name='adam' is unknown. Did you mean adamw?"),
        (ViewsConfig, {"interpolation": None}, "views.interpolation=None is unknown."),
        (NeighborsConfig, {"support": "top-k"}, "neighbors.support='top-k' is unknown. Did you mean topk?"),
        (Config, {"epochs": "100"}, "epochs='100' must be a whole number."),
        (Config, {"epochs": 1.5}, "epochs=1.5 must be a whole number."),
        (Config, {"epochs": True}, "epochs=True must be a whole number."),
        (Config, {"compile": "yes"}, "compile='yes' must be True or False."),
        (Config, {"compile": 1}, "compile=1 must be True or False."),
        (Config, {"device": 0}, "device=0 must be text."),
        (Config, {"data": "photos"}, "data='photos' must be a DataConfig."),
        (DataConfig, {"source": 7}, "data.source=7 must be text."),
        (DataConfig, {"max_unreadable": "1%"}, "data.max_unreadable='1%' must be a number."),
        (OptimConfig, {"lr": float("nan")}, "optim.lr=nan is not finite"),
        (OptimConfig, {"lr": [0.1]}, "optim.lr=[0.1] must be a number."),
        (ModelConfig, {"patch_size": None}, "model.patch_size=None must be a whole number."),
        (DinoSettings, {"norm_last_layer": "False"}, "dino.norm_last_layer='False' must be True or False."),
        (SimSiamSettings, {"proj_dim": 2e3}, "simsiam.proj_dim=2000.0 must be a whole number."),
        (SaveConfig, {"keep": "2"}, "save.keep='2' must be a whole number."),
        (EvalConfig, {"every": False}, "eval.every=False must be a whole number."),
        (ViewsConfig, {"scale": (0.4,)}, "views.scale=(0.4,) has 1 values; give 2 numbers."),
        (ViewsConfig, {"scale": 0.4}, "views.scale=0.4 must be several values: 2 numbers."),
        (ViewsConfig, {"scale": ("0.4", 1.0)}, "views.scale='0.4' must be a number."),
        (ViewsConfig, {"mean": (0.5, 0.5)}, "views.mean=(0.5, 0.5) must be one value, or three"),
        (ViewsConfig, {"std": (0.5, 0.0, 0.5)}, "views.std=0.0 must be between 0.001 and 1"),
    ],
)
def test_what_an_annotation_does_not_allow_is_refused_by_its_name(
    make: Any, values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as refused:
        make(**values)
    assert str(refused.value).startswith(sentence)


def test_numbers_lists_and_paths_become_what_json_can_hold() -> None:
    assert DataConfig(source=Path("my/photos")).source == "my/photos"  # type: ignore[arg-type]
    epochs: Any = np.int64(3)
    scale: Any = [np.float32(0.5), 1]
    config = Config(epochs=epochs, views=ViewsConfig(scale=scale), optim=OptimConfig(lr=1))
    assert (config.epochs, config.views.scale, config.optim.lr) == (3, (0.5, 1), 1)
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("section", "name", "value", "sentence"),
    [
        ("", "pairs", "adsim", "pairs='adsim' is unknown. Did you mean adasim?"),
        ("", "views", 3, "views=3 must be a ViewsConfig."),
        ("", "neighbors", None, "neighbors=None must be a NeighborsConfig."),
        ("views", "scale", 1, "views.scale=1 must be several values"),
        ("optim", "lr", {"peak": 1}, "optim.lr={'peak': 1} must be a number."),
        ("optim", "warmup_epochs", "10", "optim.warmup_epochs='10' must be a whole number."),
        ("optim", "momentum", 0.9, "Unknown field optim.momentum in the saved configuration."),
    ],
)
def test_a_mistyped_saved_configuration_is_one_sentence_that_names_the_file(
    tmp_path: Path, section: str, name: str, value: Any, sentence: str
) -> None:
    RunFolder.create(tmp_path / "run", Config(), {"fingerprint": "", "listing": []}).close()
    file = tmp_path / "run" / "config.json"
    saved = json.loads(file.read_text())
    (saved[section] if section else saved)[name] = value
    file.write_text(json.dumps(saved))
    with pytest.raises(UserError) as refused:
        RunFolder.open(tmp_path / "run", lock=False)
    assert str(refused.value).startswith(f"{file}: {sentence}")


def test_a_name_assigned_after_construction_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = RECIPES["demo"]()
    config.optim.name = "adam"  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"optim\.name='adam' is unknown\. Did you mean adamw"):
        pretrain(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_pair_policy_refuses_what_it_cannot_do_also_without_a_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(config: Config) -> None:
        raise UserError(f"not with {config.epochs} epochs")

    monkeypatch.setattr(PAIRS["standard"], "check", check)
    with pytest.raises(UserError, match="not with 100 epochs"):
        Config(pairs="standard", epochs=100).check(10_000, has_labels=False)


def test_the_size_of_local_views_follows_the_global_ones() -> None:
    assert [ViewsConfig(size=size).local_side for size in (224, 32, 16)] == [96, 16, 16]
    assert ViewsConfig(size=32, local_crops=2, local_size=12).local_side == 12
    with pytest.raises(UserError, match="local_size=96 is more than"):
        ViewsConfig(size=32, local_crops=2, local_size=96)
