"""A configuration holds only what its annotations allow, whoever wrote it: Python, a recipe or a saved file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adasim.api import pretrain
from adasim.config import Config, DataConfig, OptimConfig, ViewsConfig
from adasim.options import NearestSettings, SimSiamSettings
from adasim.recipes import RECIPES
from adasim.registry import PAIRS
from adasim.runs.folder import RunFolder
from adasim.util.errors import UserError

WRONG: list[tuple[str, Any, str]] = [
    ("pairs", "adsim", "'adsim' is unknown. Did you mean adasim?"),
    ("precision", 16, "16 is unknown. Did you mean fp16"),
    ("optim.name", "adam", "'adam' is unknown. Did you mean adamw?"),
    ("views.interpolation", None, "None is unknown."),
    ("epochs", "100", "'100' must be a whole number."),
    ("epochs", 1.5, "1.5 must be a whole number."),
    ("epochs", True, "True must be a whole number."),
    ("epochs", 0, "0 must be at least 1."),
    ("micro_batch", 0, "0 must be at least 1."),
    ("data.workers", "some", "'some' must be a whole number or auto."),
    ("data.workers", -1, "-1 must be at least 0."),
    ("compile", 1, "1 must be True or False."),
    ("device", 0, "0 must be text."),
    ("data", "photos", "'photos' must be a DataConfig."),
    ("views", None, "None must be a ViewsConfig."),
    ("data.max_unreadable", 2, "2 must be between 0 and 1."),
    ("optim.lr", float("nan"), "nan is not finite"),
    ("optim.lr", [0.1], "[0.1] must be a number."),
    ("optim.lr", 0, "0 must be at least"),
    ("neighbors.tau", 1e-9, "1e-09 must be 0 (standard pairs), or 1e-6 or more."),
    ("dino.norm_last_layer", "False", "'False' must be True or False."),
    ("dino.out_dim", 1, "1 must be between 2 and 1048576."),
    ("views.scale", [0.4], "(0.4,) has 1 values; give 2 numbers."),
    ("views.scale", 0.4, "0.4 must be several values: 2 numbers."),
    ("views.scale", [0.9, 0.4], "(0.9, 0.4) must satisfy"),
    ("views.mean", [0.5, 0.5], "(0.5, 0.5) must be one value, or three"),
    ("views.std", [0.5, 0.0, 0.5], "0.0 must be between 0.001 and 1"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), WRONG)
def test_a_wrong_value_is_refused_by_its_name_in_python_and_in_a_saved_file(
    name: str, value: Any, sentence: str, tmp_path: Path
) -> None:
    RunFolder.create(tmp_path / "run", Config(), {"fingerprint": "", "listing": []}).close()
    file = tmp_path / "run" / "config.json"
    saved = json.loads(file.read_text())
    *section, field = name.split(".")
    (saved[section[0]] if section else saved)[field] = value
    file.write_text(json.dumps(saved))
    with pytest.raises(UserError) as refused:
        RunFolder.open(tmp_path / "run", lock=False)
    assert str(refused.value).startswith(f"{file}: {name}={sentence}")
    config = Config()
    owner = getattr(config, section[0].replace("dino", "settings")) if section else config
    setattr(owner, field, value)
    with pytest.raises(UserError) as refused:
        config.check_values()
    assert str(refused.value).startswith(f"{name}={sentence}")


def test_an_unknown_method_is_answered_with_the_nearest_name_or_with_all() -> None:
    with pytest.raises(UserError, match="Choose one of dino, nnclr, simsiam"):
        Config(method="byol")
    with pytest.raises(UserError, match="Did you mean simsiam"):
        Config(method="SimSiam")


def test_an_unknown_field_of_a_saved_configuration_is_named() -> None:
    saved = Config().to_dict()
    saved["optim"]["momentum"] = 0.9
    with pytest.raises(UserError, match=r"Unknown field optim\.momentum"):
        Config.from_dict(saved)


@pytest.mark.parametrize("other", [{"settings": SimSiamSettings()}, {"pair_settings": NearestSettings()}])
def test_settings_of_another_method_or_policy_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"takes .* not (SimSiam|Nearest)Settings"):
        replace(Config(), **other)


def test_numbers_lists_and_paths_become_what_json_can_hold() -> None:
    epochs: Any = np.int64(3)
    scale: Any = [np.float32(0.5), 1]
    source: Any = Path("my/photos")
    config = Config(
        epochs=epochs,
        views=ViewsConfig(scale=scale),
        optim=OptimConfig(lr=1),
        data=DataConfig(source=source),
    )
    assert (config.epochs, config.views.scale, config.optim.lr) == (3, (0.5, 1), 1)
    assert config.data.source == "my/photos"
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_name_assigned_after_construction_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = RECIPES["demo"]()
    config.optim.name = "adam"  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"optim\.name='adam'"):
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
        Config(views=ViewsConfig(size=32, local_crops=2, local_size=96))
