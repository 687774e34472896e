"""Every value of the paper's recipes, written out from the reference tables."""

import json
from operator import attrgetter
from typing import Any

import pytest

from adasim.config import Config
from adasim.methods import build_method
from adasim.recipes import RECIPES, get_recipe
from adasim.util.errors import UserError

DINO = {
    "method": "dino",
    "pairs": "adasim",
    "batch_size": 1024,
    "seed": 0,
    "views.interpolation": "bicubic",
    "views.jitter": (0.4, 0.4, 0.2, 0.1),
    "views.blur_p": (1.0, 0.1, 0.5),
    "views.solarize_p": (0.0, 0.2),
    "views.size": 224,
    "views.local_crops": 0,
    "views.color": 1.0,
    "views.blur": 1.0,
    "views.solarize": 1.0,
    "model.small_stem": False,
    "model.zero_init_residual": False,
    "model.drop_path": 0.1,
    "settings.out_dim": 65536,
    "settings.hidden_dim": 2048,
    "settings.bottleneck_dim": 256,
    "settings.student_temp": 0.1,
    "settings.teacher_temp_start": 0.04,
    "settings.teacher_temp": 0.07,
    "settings.teacher_momentum": 0.996,
    "settings.center_momentum": 0.9,
    "optim.warmup_epochs": 10,
    "optim.lr_every": "step",
    "optim.decay_all": False,
    "neighbors.tau": 0.2,
    "neighbors.support": "topk",
    "neighbors.timing": "previous",
}
PAPER: dict[str, dict[str, Any]] = {
    "simsiam-resnet50": {
        "method": "simsiam",
        "pairs": "adasim",
        "epochs": 100,
        "batch_size": 512,
        "precision": "fp32",
        "views.interpolation": "bilinear",
        "views.jitter": (0.4, 0.4, 0.4, 0.1),
        "views.blur_p": (0.5, 0.5, 0.5),
        "views.solarize_p": (0.0, 0.0),
        "views.size": 224,
        "views.scale": (0.2, 1.0),
        "views.local_crops": 0,
        "model.name": "resnet50",
        "model.small_stem": False,
        "model.zero_init_residual": True,
        "settings.proj_dim": 2048,
        "settings.pred_dim": 512,
        "settings.fix_pred_lr": True,
        "optim.name": "sgd",
        "optim.lr": 0.05,
        "optim.min_lr": 0.0,
        "optim.warmup_epochs": 0,
        "optim.lr_every": "epoch",
        "optim.weight_decay": 1e-4,
        "optim.weight_decay_end": 1e-4,
        "optim.decay_all": True,
        "optim.clip_grad": 0.0,
        "neighbors.tau": 0.2,
        "neighbors.window": 1,
        "neighbors.k": 10,
    },
    "dino-resnet50": DINO
    | {
        "epochs": 100,
        "precision": "fp32",
        "views.scale": (0.14, 1.0),
        "model.name": "resnet50",
        "settings.norm_last_layer": False,
        "settings.freeze_last_layer_epochs": 1,
        "settings.teacher_temp_warmup_epochs": 30,
        "optim.name": "sgd",
        "optim.lr": 0.03,
        "optim.min_lr": 1e-5,
        "optim.weight_decay": 1e-4,
        "optim.weight_decay_end": 1e-4,
        "optim.clip_grad": 0.0,
        "neighbors.window": 1,
        "neighbors.k": 10,
    },
    "dino-vit-s16": DINO
    | {
        "epochs": 800,
        "precision": "fp16",
        "views.scale": (0.4, 1.0),
        "model.name": "vit_small",
        "model.patch_size": 16,
        "settings.norm_last_layer": False,
        "settings.freeze_last_layer_epochs": 1,
        "settings.teacher_temp_warmup_epochs": 30,
        "optim.name": "adamw",
        "optim.lr": 5e-4,
        "optim.min_lr": 1e-5,
        "optim.weight_decay": 0.04,
        "optim.weight_decay_end": 0.4,
        "optim.clip_grad": 0.0,
        "neighbors.window": 10,
        "neighbors.k": 3,
    },
    "dino-vit-b16": DINO
    | {
        "epochs": 800,
        "precision": "fp32",
        "views.scale": (0.25, 1.0),
        "model.name": "vit_base",
        "model.patch_size": 16,
        "settings.norm_last_layer": True,
        "settings.freeze_last_layer_epochs": 3,
        "settings.teacher_temp_warmup_epochs": 50,
        "optim.name": "adamw",
        "optim.lr": 7.5e-4,
        "optim.min_lr": 2e-6,
        "optim.weight_decay": 0.04,
        "optim.weight_decay_end": 0.4,
        "optim.clip_grad": 0.3,
        "neighbors.window": 10,
        "neighbors.k": 3,
    },
}


@pytest.mark.parametrize("recipe", PAPER)
def test_recipe_has_the_papers_values(recipe: str) -> None:
    config = get_recipe(recipe)
    assert {field: attrgetter(field)(config) for field in PAPER[recipe]} == PAPER[recipe]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_names_itself_explains_itself_and_survives_the_round_trip(name: str) -> None:
    config = get_recipe(name)
    assert config.recipe == name
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert (RECIPES[name].__doc__ or "").splitlines()[0].endswith(".")
    config.check(num_images=1_281_167, has_labels=False)
    assert get_recipe(name) is not config


@pytest.mark.parametrize("name", ["desk-vit", "desk-resnet", "demo"])
def test_desk_recipes_are_small_enough_for_a_cpu(name: str) -> None:
    config = get_recipe(name)
    assert config.views.size == 32
    assert config.views.in_memory
    assert config.views.blur == 0
    for channels in (1, 3):
        method = build_method(config, 32, channels)
        assert sum(p.numel() for p in method.eval_encoder.parameters()) < 1e6


def test_an_unknown_recipe_is_refused_with_the_nearest_names() -> None:
    for unknown, told in {"dino-vits16": "dino-vit-s16", "zzz": "demo"}.items():
        with pytest.raises(UserError, match=told):
            get_recipe(unknown)
