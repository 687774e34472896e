"""Every value of the paper's recipes, written out from the reference tables."""

import json
from operator import attrgetter
from typing import Any

import pytest

from adasim.config import Config
from adasim.methods import build_method
from adasim.recipes import RECIPES, get_recipe

RECIPES_OF_THE_PAPER = ("simsiam-resnet50", "dino-resnet50", "dino-vit-s16", "dino-vit-b16")
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "method": ("simsiam", "dino", "dino", "dino"),
    "pairs": ("adasim", "adasim", "adasim", "adasim"),
    "epochs": (100, 100, 800, 800),
    "batch_size": (512, 1024, 1024, 1024),
    "seed": (..., 0, 0, 0),
    "precision": ("fp32", "fp32", "fp16", "fp32"),
    "views.interpolation": ("bilinear", "bicubic", "bicubic", "bicubic"),
    "views.jitter": ((0.4, 0.4, 0.4, 0.1), (0.4, 0.4, 0.2, 0.1), (0.4, 0.4, 0.2, 0.1), (0.4, 0.4, 0.2, 0.1)),
    "views.blur_p": ((0.5, 0.5, 0.5), (1.0, 0.1, 0.5), (1.0, 0.1, 0.5), (1.0, 0.1, 0.5)),
    "views.solarize_p": ((0.0, 0.0), (0.0, 0.2), (0.0, 0.2), (0.0, 0.2)),
    "views.size": (224, 224, 224, 224),
    "views.scale": ((0.2, 1.0), (0.14, 1.0), (0.4, 1.0), (0.25, 1.0)),
    "views.local_crops": (0, 0, 0, 0),
    "views.color": (..., 1.0, 1.0, 1.0),
    "views.blur": (..., 1.0, 1.0, 1.0),
    "views.solarize": (..., 1.0, 1.0, 1.0),
    "model.name": ("resnet50", "resnet50", "vit_small", "vit_base"),
    "model.small_stem": (False, False, False, False),
    "model.zero_init_residual": (True, False, False, False),
    "model.drop_path": (..., 0.1, 0.1, 0.1),
    "model.patch_size": (..., ..., 16, 16),
    "settings.proj_dim": (2048, ..., ..., ...),
    "settings.pred_dim": (512, ..., ..., ...),
    "settings.fix_pred_lr": (True, ..., ..., ...),
    "settings.out_dim": (..., 65536, 65536, 65536),
    "settings.hidden_dim": (..., 2048, 2048, 2048),
    "settings.bottleneck_dim": (..., 256, 256, 256),
    "settings.student_temp": (..., 0.1, 0.1, 0.1),
    "settings.teacher_temp_start": (..., 0.04, 0.04, 0.04),
    "settings.teacher_temp": (..., 0.07, 0.07, 0.07),
    "settings.teacher_momentum": (..., 0.996, 0.996, 0.996),
    "settings.center_momentum": (..., 0.9, 0.9, 0.9),
    "settings.norm_last_layer": (..., False, False, True),
    "settings.freeze_last_layer_epochs": (..., 1, 1, 3),
    "settings.teacher_temp_warmup_epochs": (..., 30, 30, 50),
    "optim.name": ("sgd", "sgd", "adamw", "adamw"),
    "optim.lr": (0.05, 0.03, 5e-4, 7.5e-4),
    "optim.min_lr": (0.0, 1e-5, 1e-5, 2e-6),
    "optim.warmup_epochs": (0, 10, 10, 10),
    "optim.lr_every": ("epoch", "step", "step", "step"),
    "optim.weight_decay": (1e-4, 1e-4, 0.04, 0.04),
    "optim.weight_decay_end": (1e-4, 1e-4, 0.4, 0.4),
    "optim.decay_all": (True, False, False, False),
    "optim.clip_grad": (0.0, 0.0, 0.0, 0.3),
    "neighbors.tau": (0.2, 0.2, 0.2, 0.2),
    "neighbors.window": (1, 1, 10, 10),
    "neighbors.k": (10, 10, 3, 3),
    "neighbors.support": (..., "topk", "topk", "topk"),
    "neighbors.timing": (..., "previous", "previous", "previous"),
}
"""A column for each of them; ... where it has no such setting, or the paper says nothing."""


@pytest.mark.parametrize("recipe", RECIPES_OF_THE_PAPER)
def test_recipe_has_the_papers_values(recipe: str) -> None:
    column = RECIPES_OF_THE_PAPER.index(recipe)
    wanted = {name: values[column] for name, values in PUBLISHED.items() if values[column] is not ...}
    config = get_recipe(recipe)
    assert {name: attrgetter(name)(config) for name in wanted} == wanted


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
