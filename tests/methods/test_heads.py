"""Heads against formulas written out from the papers."""

import math

import torch
from torch import nn

from adasim.methods import DinoSettings
from adasim.methods.dino import DinoHead
from adasim.methods.simsiam import Predictor, Projector


def dino_head(**settings):
    sizes = {"out_dim": 7, "hidden_dim": 16, "bottleneck_dim": 4, "norm_last_layer": False}
    return DinoHead(8, DinoSettings(**sizes | settings))


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def test_dino_head_is_mlp_then_unit_vector_then_weight_normed_prototypes():
    torch.manual_seed(0)
    head = dino_head()
    with torch.no_grad():
        head.last_layer.weight_g.uniform_(0.5, 2)
        for p in head.mlp.parameters():
            p.normal_()
    x = torch.randn(5, 8)
    first, second, third = (m for m in head.mlp if isinstance(m, nn.Linear))
    h = gelu(x @ first.weight.T + first.bias)
    h = gelu(h @ second.weight.T + second.bias)
    h = h @ third.weight.T + third.bias
    v, g = head.last_layer.weight_v, head.last_layer.weight_g
    expected = torch.empty(5, 7)
    for b in range(5):
        unit = h[b] / h[b].norm()
        for k in range(7):
            expected[b, k] = g[k, 0] * (v[k] / v[k].norm()) @ unit
    torch.testing.assert_close(head(x), expected)


def test_dino_head_starts_as_published():
    torch.manual_seed(0)
    head = dino_head(out_dim=1024, hidden_dim=512, bottleneck_dim=256)
    for layer in head.mlp:
        if isinstance(layer, nn.Linear):
            assert abs(layer.weight.std().item() - 0.02) < 1e-3
            assert layer.bias.abs().max() == 0
    assert head.last_layer.weight_g.eq(1).all()
    assert head.last_layer.weight_g.requires_grad
    assert head.last_layer.weight_v.abs().max() <= 256**-0.5  # nn.Linear's default bound
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in head.modules())


def test_norm_last_layer_freezes_the_gain_alone():
    head = dino_head(norm_last_layer=True)
    head(torch.randn(3, 8)).sum().backward()
    assert head.last_layer.weight_g.grad is None
    assert head.last_layer.weight_v.grad is not None


def test_projector_and_predictor_are_simsiams():
    projector, predictor = Projector(20, 12), Predictor(12, 3)
    assert [type(m).__name__ for m in projector] == [
        *("Linear", "BatchNorm1d", "ReLU") * 2,
        "Linear",
        "BatchNorm1d",
    ]
    assert [m.bias is not None for m in projector if isinstance(m, nn.Linear)] == [False, False, True]
    assert not projector[6].bias.requires_grad
    assert projector[7].weight is None  # no affine part
    assert [type(m).__name__ for m in predictor] == ["Linear", "BatchNorm1d", "ReLU", "Linear"]
    assert predictor[0].bias is None
    assert predictor[3].bias is not None
    z = projector(torch.randn(64, 20))
    torch.testing.assert_close(z.mean(0), torch.zeros(12), atol=1e-5, rtol=0)
    assert predictor(z).shape == (64, 12)
