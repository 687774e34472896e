"""Each paper recipe takes two real optimiser steps at full size: 224 pixels, 65536 prototypes."""

import gc

import pytest
import torch

from adasim.methods import Dino, build_method
from adasim.recipes import get_recipe
from adasim.train.loop import clip_per_tensor, set_schedules
from adasim.train.state import build_optimizer

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _free_memory_between_recipes():
    yield
    gc.collect()


@pytest.mark.parametrize(
    ("recipe", "width"),
    [("simsiam-resnet50", 2048), ("dino-resnet50", 2048), ("dino-vit-s16", 384), ("dino-vit-b16", 768)],
)
def test_two_steps_of_a_paper_recipe(recipe, width):
    config = get_recipe(recipe)
    method = build_method(config, config.views.size).train()
    optimizer = build_optimizer(method, config)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    steps_per_epoch = 1251
    first = config.optim.warmup_epochs * steps_per_epoch  # peak rate, last layer free
    total = config.epochs * steps_per_epoch
    exported = next(method.eval_encoder.parameters()).clone()
    for step in (first, first + 1):
        epoch = step // steps_per_epoch
        set_schedules(optimizer, config, step, steps_per_epoch)
        optimizer.zero_grad()
        result = method([torch.randn(2, 3, 224, 224) for _ in range(2)], epoch)
        assert result.loss.isfinite()
        assert result.feature.shape == (2, width)
        result.loss.backward()
        method.before_optimizer(epoch)
        clip_per_tensor(params, config.optim.clip_grad)
        optimizer.step()
        method.after_step(step, total)
    assert all(p.isfinite().all() for p in params)
    assert not torch.equal(exported, next(method.eval_encoder.parameters()))
    if isinstance(method, Dino):
        assert method.center.shape == (1, 65536)
        assert method.center.abs().max() > 0
