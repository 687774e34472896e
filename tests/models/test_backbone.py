"""Encoders: widths, layouts, initialisation, tokens, and that timm and torchvision agree with them."""

import json

import pytest
import torch
import torchvision
from torch import nn

from adasim.config import ModelConfig
from adasim.models import build_backbone
from adasim.util.errors import UserError


def build(name, size=32, channels=3, student=False, **kwargs):
    return build_backbone(ModelConfig(name=name, **kwargs), size, channels, student=student)


@pytest.mark.parametrize(
    ("name", "size", "channels", "kwargs", "dim"),
    [
        ("vit_tiny", 64, 3, {"patch_size": 16}, 192),
        ("vit_small", 32, 3, {"patch_size": 8}, 384),
        ("vit_mini", 32, 1, {"patch_size": 4}, 96),
        ("resnet18", 32, 3, {"small_stem": True}, 512),
        ("resnet18", 64, 1, {}, 512),
        ("resnet50", 64, 3, {}, 2048),
        ("resnet_tiny", 32, 1, {}, 128),
        ("resnet_tiny", 32, 3, {"small_stem": True}, 128),
        ("mobilenetv3_small_050", 64, 3, {}, 1024),
        ("convnext_atto", 64, 1, {}, 320),
        ("deit_tiny_patch16_224", 64, 3, {}, 192),
    ],
)
def test_pooled_feature_has_the_declared_width_and_the_spec_is_json(name, size, channels, kwargs, dim):
    backbone = build(name, size, channels, **kwargs).eval()
    assert backbone.dim == dim
    with torch.no_grad():
        assert backbone(torch.randn(2, channels, size, size)).shape == (2, dim)
    assert json.loads(json.dumps(backbone.spec)) == backbone.spec


@pytest.mark.parametrize(
    ("name", "width", "heads", "millions"), [("small", 384, 6, 21), ("base", 768, 12, 85)]
)
def test_vit_has_the_papers_shape(name, width, heads, millions):
    net = build(f"vit_{name}", 224).net
    assert len(net.blocks) == 12
    assert net.embed_dim == width
    assert net.blocks[0].attn.num_heads == heads
    assert net.blocks[0].attn.scale == (width // heads) ** -0.5
    assert net.blocks[0].mlp.fc1.out_features == 4 * width
    assert net.pos_embed.shape == (1, 197, width)
    assert int(sum(p.numel() for p in net.parameters()) / 1e6) == millions
    norms = [m for m in net.modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 25
    assert all(m.eps == 1e-6 for m in norms)


def test_vit_starts_as_dino_does():
    torch.manual_seed(0)
    net = build("vit_small", 224).net
    for tensor in (net.cls_token, net.pos_embed, net.blocks[3].attn.qkv.weight, net.blocks[5].mlp.fc2.weight):
        assert tensor.std().item() == pytest.approx(0.02, rel=0.15)
    assert net.blocks[0].attn.qkv.bias.abs().max() == 0
    assert net.blocks[0].norm1.weight.eq(1).all()
    # The patch convolution keeps torch's default: uniform within 1/sqrt(fan in).
    bound = (3 * 16 * 16) ** -0.5
    assert net.patch_embed.proj.weight.abs().max() <= bound
    assert net.patch_embed.proj.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_feature_of_a_vit_is_the_cls_token_after_the_final_norm():
    backbone = build("vit_mini", patch_size=4).eval()
    net, x = backbone.net, torch.randn(3, 3, 32, 32)
    patches = net.patch_embed.proj(x).flatten(2).transpose(1, 2)  # (B, 64, D)
    tokens = torch.cat([net.cls_token.expand(3, -1, -1), patches], dim=1) + net.pos_embed
    for block in net.blocks:
        tokens = block(tokens)
    torch.testing.assert_close(backbone(x), net.norm(tokens)[:, 0])


def test_only_the_student_drops_paths_linearly_over_the_blocks():
    student = build("vit_mini", student=True, patch_size=4, drop_path=0.3).net
    teacher = build("vit_mini", student=False, patch_size=4, drop_path=0.3).net
    rates = [getattr(block.drop_path2, "drop_prob", 0.0) for block in student.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert not any(type(m).__name__ == "DropPath" for m in teacher.modules())
    resnet = build("resnet_tiny", student=True, drop_path=0.3).net
    assert not any(type(m).__name__ == "DropPath" for m in resnet.modules())


def test_tokens_of_a_vit_are_the_last_blocks_through_the_final_norm():
    backbone = build("vit_mini", 32, patch_size=4).eval()
    x = torch.randn(2, 3, 32, 32)
    blocks = backbone.tokens(x, 3)
    assert [(c.shape, p.shape) for c, p in blocks] == [((2, 96), (2, 96, 8, 8))] * 3
    torch.testing.assert_close(blocks[-1][0], backbone(x))
    normed = backbone.net.forward_features(x)[:, 1:]  # (B, 64, D)
    torch.testing.assert_close(blocks[-1][1], normed.transpose(1, 2).reshape(2, 96, 8, 8))
    # An untrained final norm leaves mean 0 in earlier blocks, too.
    torch.testing.assert_close(blocks[0][0].mean(1), torch.zeros(2), atol=1e-5, rtol=0)
    with pytest.raises(UserError, match="4 blocks"):
        backbone.tokens(x, 5)
    larger = torch.randn(1, 3, 48, 48)
    assert backbone(larger).shape == (1, 96)
    assert backbone.tokens(larger)[0][1].shape == (1, 96, 12, 12)


def test_tokens_of_a_resnet_are_its_last_feature_map():
    backbone = build("resnet_tiny", 32).eval()
    x = torch.randn(2, 3, 32, 32)
    ((cls, patches),) = backbone.tokens(x)
    assert cls is None
    assert patches.shape == (2, 128, 2, 2)  # stride 2 in the stem, 8 in the stages
    torch.testing.assert_close(patches.mean((2, 3)), backbone(x))
    with pytest.raises(UserError, match="needs a ViT"):
        backbone.tokens(x, 2)


def test_resnet50_equals_torchvisions():
    ours, theirs = build("resnet50", 224), torchvision.models.resnet50()
    theirs.fc = nn.Identity()
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    ours.net.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(x))  # train mode: batch statistics
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize("zero", [False, True])
def test_residual_branches_start_at_zero_only_on_request(zero):
    net = build("resnet50", zero_init_residual=zero).net
    assert all(block.bn3.weight.eq(0 if zero else 1).all() for block in net.layer2)


def test_small_stem_keeps_the_resolution():
    net = build("resnet18", 32, small_stem=True).net
    assert net.layer1(net.maxpool(net.act1(net.bn1(net.conv1(torch.randn(1, 3, 32, 32)))))).shape[-1] == 32


@pytest.mark.parametrize(
    ("name", "size", "kwargs", "words"),
    [
        ("vit_tiny", 32, {"small_stem": True}, "small_stem"),
        ("resent50", 32, {}, "resnet50"),
        ("hf-hub:timm/resnet18.a1_in1k", 32, {}, "Unknown"),
        ("vit_small", 40, {}, "patch_size=16 does not divide"),
        ("vgg11", 32, {"student": True, "drop_path": 0.1}, "drop_path"),
    ],
)
def test_what_cannot_be_built_is_refused(name, size, kwargs, words):
    with pytest.raises(UserError, match=words):
        build(name, size, **kwargs)
