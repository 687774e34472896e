"""Schedules against tables built as the reference describes them, and clipping against the formula."""

import math
from typing import Any

import pytest
import torch
from pretrainings import small
from torch import nn

from adasim.config import Config, OptimConfig
from adasim.methods import DinoSettings, build_method
from adasim.methods.dino import teacher_momentum, teacher_temperature
from adasim.recipes import get_recipe
from adasim.train.loop import clip_per_tensor, learn, set_schedules
from adasim.train.state import build_optimizer, build_state


def dino_config(epochs=20, batch_size=1024, **kwargs):
    return Config(epochs=epochs, batch_size=batch_size, optim=OptimConfig(**kwargs))


def table(base, final, total, warmup=0):
    """A warm-up by linspace(0, base, warmup), then half a cosine over the steps that remain."""
    ramp = torch.linspace(0, base, warmup, dtype=torch.float64).tolist()
    rest = total - warmup
    return ramp + [final + 0.5 * (base - final) * (1 + math.cos(math.pi * i / rest)) for i in range(rest)]


def test_learning_rate_warms_up_then_follows_a_cosine_every_step():
    config = dino_config(lr=5e-4, min_lr=1e-5, warmup_epochs=10)
    expected = table(5e-4 * 4, 1e-5, total=20 * 7, warmup=10 * 7)
    assert [config.learning_rate(step, 7) for step in range(140)] == pytest.approx(expected)
    assert config.learning_rate(0, 7) == 0
    assert config.learning_rate(69, 7) == config.learning_rate(70, 7) == 0.002


@pytest.mark.parametrize(
    ("recipe", "peak"),
    [("simsiam-resnet50", 0.1), ("dino-resnet50", 0.12), ("dino-vit-s16", 0.002), ("dino-vit-b16", 0.003)],
)
def test_peak_learning_rates_of_the_paper(recipe, peak):
    assert get_recipe(recipe).peak_learning_rate == pytest.approx(peak)


def test_simsiam_learning_rate_is_a_cosine_of_the_epoch():
    config = get_recipe("simsiam-resnet50")
    for epoch in (0, 1, 50, 99):
        expected = 0.1 * (1 + math.cos(math.pi * epoch / 100)) / 2
        for step in (0, 4, 9):
            assert config.learning_rate(epoch * 10 + step, 10) == pytest.approx(expected)


def test_weight_decay_follows_a_cosine_without_warm_up():
    config = dino_config(epochs=6, weight_decay=0.04, weight_decay_end=0.4)
    expected = table(0.04, 0.4, total=6 * 5)
    assert [config.weight_decay(step, 5) for step in range(30)] == pytest.approx(expected)
    assert config.weight_decay(15, 5) == pytest.approx(0.22)


def test_teacher_momentum_rises_to_one():
    assert [teacher_momentum(0.996, step, 50) for step in range(50)] == pytest.approx(table(0.996, 1, 50))
    assert teacher_momentum(0.996, 25, 50) == pytest.approx(0.998)


def test_teacher_temperature_is_a_linspace_over_epochs_then_constant():
    config = DinoSettings(teacher_temp_start=0.04, teacher_temp=0.07, teacher_temp_warmup_epochs=30)
    ramp = torch.linspace(0.04, 0.07, 30, dtype=torch.float64).tolist()
    assert [teacher_temperature(config, e) for e in range(32)] == pytest.approx([*ramp, 0.07, 0.07])
    assert teacher_temperature(DinoSettings(teacher_temp_warmup_epochs=0), 0) == 0.07
    assert teacher_temperature(DinoSettings(teacher_temp_warmup_epochs=1), 0) == 0.04


def test_schedules_are_written_into_the_groups():
    config = dino_config(lr=1e-3, warmup_epochs=0, weight_decay=0.04, weight_decay_end=0.4)
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    flags = [(True, False), (False, False), (True, True)]
    groups = [{"params": [p], "decay": d, "fixed_lr": f} for p, (d, f) in zip(parameters, flags, strict=True)]
    optimizer = torch.optim.AdamW(groups)
    set_schedules(optimizer, config, step=50, steps_per_epoch=5)
    lr, decay = config.learning_rate(50, 5), config.weight_decay(50, 5)
    assert [g["lr"] for g in optimizer.param_groups] == [lr, lr, 4e-3]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [decay, 0.0, decay]
    assert lr < 4e-3


def test_clipping_is_per_tensor():
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(n)) for n in (3, 4, 5, 6)]
    scales = (0.01, 1.0, 100.0)
    before = [torch.randn(p.shape, generator=generator) * s for p, s in zip(params, scales, strict=False)]
    for p, grad in zip(params, before, strict=False):  # the last has no gradient
        p.grad = grad.clone()
    clip_per_tensor(params, 0.3)
    for p, grad in zip(params, before, strict=False):
        norm = math.sqrt(sum(x * x for x in grad.tolist()))
        factor = 0.3 / (norm + 1e-6)
        torch.testing.assert_close(p.grad, grad * factor if factor < 1 else grad)
    torch.testing.assert_close(params[0].grad, before[0], rtol=0, atol=0)  # small gradients stay as they are
    assert params[3].grad is None


def test_adamw_takes_the_steps_of_its_equations():
    """Loshchilov and Hutter, algorithm 2, in double precision; on a CPU one kernel does all of it."""
    config = get_recipe("desk-vit")
    method = build_method(config, 32, 1)
    optimizer = build_optimizer(method, config)
    group = optimizer.param_groups[0]
    group["lr"], group["weight_decay"] = 0.01, 0.3
    weight = group["params"][0]
    x, m, v = weight.detach().double().clone(), 0.0, 0.0
    generator = torch.Generator().manual_seed(0)
    for t in range(1, 6):
        weight.grad = torch.randn(weight.shape, generator=generator)
        gradient = weight.grad.double()
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        x = x - 0.01 * 0.3 * x - 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        optimizer.step()
    torch.testing.assert_close(weight.detach().double(), x, rtol=1e-5, atol=1e-6)


def test_sgd_takes_the_steps_of_its_equations_also_where_a_weight_begins_to_learn_later():
    """As DINO's last layer: v <- 0.9 v + g + decay x, x <- x - lr v, from v = 0 at the weight's first gradient."""
    config = get_recipe("desk-resnet")
    optimizer = build_optimizer(build_method(config, 32, 1), config)
    group = optimizer.param_groups[0]
    group["lr"], group["weight_decay"] = 0.01, 0.3
    early, late = group["params"][:2]
    x = {p: p.detach().double().clone() for p in (early, late)}
    v = dict.fromkeys(x, 0.0)
    generator = torch.Generator().manual_seed(0)
    for t in range(6):
        late.grad = None
        for p in (early, late) if t >= 3 else (early,):
            p.grad = torch.randn(p.shape, generator=generator)
            v[p] = 0.9 * v[p] + p.grad.double() + 0.3 * x[p]
            x[p] = x[p] - 0.01 * v[p]
        optimizer.step()
    for p in (early, late):
        torch.testing.assert_close(p.detach().double(), x[p], rtol=1e-5, atol=1e-6)


def test_a_step_clips_each_gradient_and_a_scaled_loss_changes_nothing():
    plain = {"optim__weight_decay": 0.0, "optim__weight_decay_end": 0.0, "model__drop_path": 0.0}
    config = small(
        optim__name="sgd", optim__lr=16.0, optim__warmup_epochs=0, optim__clip_grad=1e-3, **plain
    )  # a rate of 1
    views = list(torch.randn(2, 16, 3, 16, 16, generator=torch.Generator().manual_seed(0)))
    moves = []
    for scaler in (
        torch.amp.GradScaler("cpu", enabled=False),
        torch.amp.GradScaler("cpu", init_scale=1024.0),
    ):
        state = build_state(config, 48)
        state.scaler = scaler
        method: Any = state.method
        parameters = dict(method.student.named_parameters())
        before = {name: p.detach().clone() for name, p in parameters.items()}
        learn(state, state.method(views, 0).loss, config, 3)
        moves.append({name: float((p.detach() - before[name]).norm()) for name, p in parameters.items()})
    assert max(moves[0].values()) == pytest.approx(1e-3, rel=0.02)
    assert moves[1] == pytest.approx(moves[0], rel=1e-2, abs=1e-7)
