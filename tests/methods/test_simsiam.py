"""SimSiam against the formula, its stop-gradient, and what does not move."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from adasim.config import Config, ModelConfig, NeighborsConfig, OptimConfig, ViewsConfig
from adasim.methods import EncodedView, Method, Nnclr, SimSiam, SimSiamSettings, build_method
from adasim.options import NearestSettings
from adasim.recipes import simsiam_resnet50
from adasim.registry import PAIRS
from adasim.train.loop import set_schedules
from adasim.train.state import build_optimizer
from adasim.util.errors import UserError


def simsiam(kind: type[Any] = SimSiam) -> Any:
    torch.manual_seed(0)
    model = ModelConfig(name="resnet_tiny", drop_path=0.0)
    return kind(model, kind.Settings(proj_dim=16, pred_dim=4), 32, 1)


def views(batch=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(batch, 1, 32, 32, generator=generator) for _ in range(2)]


def test_loss_is_the_symmetric_negative_cosine_and_no_gradient_reaches_the_target():
    p1, p2, z1, z2 = (torch.randn(3, 5, requires_grad=True) for _ in range(4))
    step = simsiam().loss([EncodedView(p1, p1, z1, p1), EncodedView(p2, p2, z2, p2)], epoch=0)
    total = 0.0
    for b in range(3):
        total += (p1[b] @ z2[b] / (p1[b].norm() * z2[b].norm())).item()
        total += (p2[b] @ z1[b] / (p2[b].norm() * z1[b].norm())).item()
    assert step.loss.item() == pytest.approx(-0.5 * total / 3, rel=1e-5)
    step.loss.backward()
    assert z1.grad is z2.grad is None
    assert p1.grad is not None
    assert p2.grad is not None


def test_a_cached_neighbours_projection_is_the_target_of_both_views():
    method, pair = simsiam().train(), views()
    cached = torch.nn.functional.normalize(torch.randn(6, method.feature_dim), dim=1)
    length = method.encode(pair[0]).feature.norm(dim=1, keepdim=True)
    z = method.projector(cached * length)
    p1, p2 = (method.predictor(method.projector(method.encoder(view))) for view in pair)
    expected = -sum(torch.cosine_similarity(p, z).mean() for p in (p1, p2)) / 2
    step = method(pair, epoch=0, neighbours=cached)
    torch.testing.assert_close(step.loss, expected, rtol=1e-5, atol=1e-5)
    step.loss.backward()
    assert method.encoder.net.layer4[0].conv1.weight.grad.abs().sum() > 0


def test_a_method_without_targets_of_features_has_no_latent_neighbours(monkeypatch):
    config = Config(method="nnclr", pairs="nearest", pair_settings=NearestSettings(space="latent"))
    with pytest.raises(UserError, match=r"--nearest\.space image"):
        Nnclr.check(config)
    Nnclr.check(replace(config, pair_settings=None))
    monkeypatch.setattr(PAIRS["adasim"], "latent", True)  # as a policy of one's own may say
    with pytest.raises(UserError, match="pairs=adasim in latent space"):
        Nnclr.check(Config(method="nnclr", pairs="adasim"))


@pytest.mark.parametrize("kind", [SimSiam, Nnclr])
def test_gradient_reaches_the_encoder_through_the_predictor_alone(kind):
    method = simsiam(kind)
    step = method(views(), epoch=0)
    step.loss.backward()
    assert not step.feature.requires_grad
    assert method.encoder.net.layer4[0].conv1.weight.grad.abs().sum() > 0
    with torch.no_grad():
        method.predictor[3].weight.zero_()  # a predictor that ignores its input cuts the only path
    method.zero_grad()
    method(views(), epoch=0).loss.backward()
    assert method.projector[0].weight.grad.abs().sum() == 0


def test_each_view_has_a_forward_pass_and_batch_statistics_of_its_own():
    method = simsiam().train()
    pair = views()
    twin = copy.deepcopy(method)
    assert torch.equal(method(pair, epoch=0).feature, twin.encoder(pair[0]).detach())
    twin.encoder(pair[1])
    assert torch.equal(method.encoder.net.bn1.running_mean, twin.encoder.net.bn1.running_mean)
    assert method.eval_encoder is method.encoder
    assert method.feature_dim == 128


def test_spread_of_a_collapsed_projection_is_zero():
    same = torch.ones(4, 5)
    step = simsiam().loss([EncodedView(same, same, same, same)] * 2, epoch=0)
    assert step.loss.item() == pytest.approx(-1)
    assert step.diagnostics["feature_spread"].item() == pytest.approx(0, abs=1e-6)
    assert step.diagnostics["projection_spread"].item() == pytest.approx(0, abs=1e-6)


def small_config():
    settings = SimSiamSettings(proj_dim=16, pred_dim=4)
    return replace(simsiam_resnet50(), model=ModelConfig(name="resnet_tiny"), settings=settings)


def test_frozen_bias_does_not_move_and_all_else_does():
    config = small_config()
    method = build_method(config, 32, 1)
    optimizer = build_optimizer(method, config)
    before = {name: p.detach().clone() for name, p in method.named_parameters()}
    for step in range(2):
        set_schedules(optimizer, config, step, 10)
        optimizer.zero_grad()
        method(views(), 0).loss.backward()
        method.before_optimizer(0)
        optimizer.step()
        method.after_step(step, 1000)
    still = [name for name, p in method.named_parameters() if torch.equal(p, before[name])]
    assert still == ["projector.6.bias"]


def test_every_parameter_decays_and_the_predictor_keeps_its_rate():
    config = small_config()
    method = build_method(config, 32, 1)
    assert isinstance(method, SimSiam)
    groups = method.param_groups(config.optim)
    assert [(g["decay"], g["fixed_lr"]) for g in groups] == [(True, False), (True, True)]
    assert {id(p) for p in groups[1]["params"]} == {id(p) for p in method.predictor.parameters()}
    learnable = sum(p.requires_grad for p in method.parameters())
    assert sum(len(g["params"]) for g in groups) == learnable
    config.settings.fix_pred_lr = False
    assert not any(g["fixed_lr"] for g in build_method(config, 32, 1).param_groups(config.optim))
    assert not all(g["decay"] for g in method.param_groups(OptimConfig(decay_all=False)))


def test_local_crops_are_refused():
    config = Config(method="simsiam", views=ViewsConfig(local_crops=2))
    with pytest.raises(UserError, match="local_crops=2"):
        build_method(config, 32)


def test_a_method_with_a_forward_alone_cannot_draw_partners_within_a_step():
    class Whole(SimSiam):
        encode, predict, loss = Method.encode, Method.predict, Method.loss

    config = Config(neighbors=NeighborsConfig(timing="current"))
    with pytest.raises(UserError, match="timing previous"):
        Whole.check(config)
    Whole.check(replace(config, pairs="standard"))
    with pytest.raises(UserError, match=r"view=mean is not known"):
        SimSiam.check(replace(config, neighbors=NeighborsConfig(timing="current", view="mean")))
    SimSiam.check(config)
