"""What a step needs, counted without running it, against hand counts and against steps that are run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.profiler import profile

from adasim.config import Config, ModelConfig
from adasim.methods import build_method
from adasim.recipes import get_recipe
from adasim.train.budget import Footprint


def test_operations_and_weights_are_counted_as_by_hand() -> None:
    """ViT-S/16: 12 blocks of qkv, attention, projection and MLP over 197 tokens; two views, four passes' worth."""
    T, D = 197, 384
    block = 2 * T * (3 * D * D + D * D + 8 * D * D) + 2 * 2 * T * T * D
    encoder = 12 * block + 2 * 196 * 768 * D
    head = 2 * (384 * 2048 + 2048 * 2048 + 2048 * 256 + 256 * 65536)
    by_hand = 2 * 4 * (encoder + head)  # teacher forward, student forward, twice that backward
    counted = Footprint.count(Config(model=ModelConfig(name="vit_small")))
    assert counted.flops(3) == pytest.approx(3 * by_hand, rel=0.01)
    parameters = 21_665_664 + 384 * 2048 + 2048 + 2048 * 2048 + 2048 + 2048 * 256 + 256 + 65536 * 257
    assert counted.learned == parameters  # 21.7 M as published, the head, and the gains of its last layer
    assert (
        counted.checkpoint_bytes == 16 * parameters + 4 * 65536
    )  # with the teacher, two moments, the centre


@pytest.mark.parametrize("recipe", ["desk-vit", "desk-resnet"])
def test_activations_are_what_a_forward_pass_leaves_allocated(recipe: str) -> None:
    config, images = get_recipe(recipe), 48
    method = build_method(config, config.views.size)
    with profile(profile_memory=True) as profiler:
        step = method([torch.randn(images, 3, config.views.size, config.views.size) for _ in range(2)], 0)
    held = sum(event.self_cpu_memory_usage for event in profiler.events())
    assert step.loss.requires_grad
    assert Footprint.count(config).activation_bytes(images) == pytest.approx(held, rel=0.02)


def test_sixteen_bits_take_less_and_local_crops_more() -> None:
    config = get_recipe("desk-vit")
    full = Footprint.count(config).activation_bytes(64)
    assert 0.4 * full < Footprint.count(replace(config, precision="bf16")).activation_bytes(64) < 0.8 * full
    crops = replace(config, views=replace(config.views, local_crops=4, local_size=16))
    assert 1.3 * full < Footprint.count(crops).activation_bytes(64) < 2 * full


def test_a_cpu_has_fp32_alone() -> None:
    config = replace(get_recipe("desk-vit"), precision="fp16")
    here = Footprint.count(config, device=torch.device("cpu"))
    assert here == Footprint.count(replace(config, precision="fp32"))
    assert here != Footprint.count(config)
