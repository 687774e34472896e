"""Encoders: timm models behind one contract, a pooled feature for the memory and patch features beside it.

`Backbone.net` is a timm model and `Backbone.spec` says which: timm.create_model(spec["timm"], **spec["kwargs"]).
ResNets for small images have another stem, for which timm has no argument. Their kwargs have the entry `stem`, so
that timm refuses them instead of building another net: `no_pool` is without max-pooling, and `3x3` has a first
convolution of stride 1 as well. How a file's weights load without adasim is written in the file: see
`adasim.models.io`.

`resnet_tiny` is timm's ResNet class with one BasicBlock per stage, 16 to 128 channels wide, behind timm's
deep stem (three 3x3 convolutions, the first with stride 2) and with `stem="no_pool"`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

import timm
import torch
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from adasim.config import ModelConfig
from adasim.models.transform import EvalTransform
from adasim.util.errors import UserError, suggest

# LayerNorm eps 1e-6, qkv bias, GELU, MLP ratio 4 and no LayerScale are timm's own for these names.
VITS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit_mini": ("vit_tiny_patch16_224", {"embed_dim": 96, "depth": 4, "num_heads": 3}),
    "vit_tiny": ("vit_tiny_patch16_224", {}),
    "vit_small": ("vit_small_patch16_224", {}),
    "vit_base": ("vit_base_patch16_224", {}),
}
RESNETS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet_tiny": (
        "resnet18",
        {"layers": [1, 1, 1, 1], "channels": [16, 32, 64, 128], "stem_type": "deep", "stem_width": 8},
    ),
    "resnet18": ("resnet18", {}),
    "resnet50": ("resnet50", {}),
}
PIXELS = "pixels"
"""The name of the MODEL that is no encoder: raw pixels, which every trained one has to beat."""


class Backbone(nn.Module):
    """A timm model without its classifier.

    Attributes:
        net: the timm model; its state_dict is what is exported.
        dim: D, width of the pooled feature.
        spec: JSON-able description from which `from_spec` rebuilds the model.
        transform: what the encoder expects to be done to an image; a callable.
        freeze_norm: whether batch norms stay in evaluation mode while the rest trains.
    """

    freeze_norm = False

    def __init__(self, net: nn.Module, spec: dict[str, Any], transform: EvalTransform | None = None) -> None:
        super().__init__()
        self.net = net
        self.spec = spec
        self.dim: int = spec["dim"]
        self.transform = transform or EvalTransform.of_size(spec.get("image_size", 224))

    @property
    def device(self) -> torch.device:
        """Where the weights are; raw pixels have none, and are taken where they come from."""
        return next(self.parameters(), torch.empty(0)).device

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.freeze_norm:
            for layer in self.modules():
                if isinstance(layer, _BatchNorm):
                    layer.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Pooled feature (B, D) of images (B, C, H, W): a ViT's CLS after the final norm, a ResNet's mean."""
        return self.net(x)

    def tokens(self, x: Tensor, n_blocks: int = 1) -> list[tuple[Tensor | None, Tensor]]:
        """CLS (B, D) or None, and patches (B, D, h, w), of each of the last `n_blocks` blocks in order.

        Each passes through the final norm. A convolutional net has one entry, its last feature map, no CLS.
        """
        name = self.spec["name"]
        if not isinstance(self.net, VisionTransformer):
            if n_blocks != 1:
                raise UserError(f"n_blocks={n_blocks} needs a ViT; {name} has its last feature map only.")
            features = self.net.forward_features(x)  # type: ignore[operator]
            if features.ndim != 4:
                raise UserError(f"{name} has no feature map; choose a ViT or a convolutional net.")
            last_channels = getattr(self.net, "output_fmt", "NCHW") == "NHWC"
            return [(None, features.permute(0, 3, 1, 2) if last_channels else features)]
        depth = len(self.net.blocks)
        if not 1 <= n_blocks <= depth:
            raise UserError(f"n_blocks={n_blocks} must be between 1 and the {depth} blocks of {name}.")
        blocks: list[Any] = self.net.forward_intermediates(  # type: ignore[assignment]
            x, indices=n_blocks, norm=True, return_prefix_tokens=True, intermediates_only=True
        )
        if self.net.num_prefix_tokens == 0:
            return [(None, patches) for patches in blocks]
        has_cls = self.net.cls_token is not None  # the prefix may also be registers alone
        return [(prefix[:, 0] if has_cls else None, patches) for patches, prefix in blocks]


def build_backbone(config: ModelConfig, image_size: int, channels: int = 3, *, student: bool) -> Backbone:
    """A freshly initialised encoder for square images of `image_size` pixels.

    Args:
        config: name, patch size, stem, drop path.
        image_size: side of the images; a ViT's position grid is laid out for it and interpolated for others.
        channels: channels of the images.
        student: whether stochastic depth is in force; a teacher has none. ResNets never have it (as in DINO,
            where the setting is inert for them).
    """
    spec = _describe(config, image_size, channels)
    extra: dict[str, Any] = {}
    if config.name in RESNETS:
        extra["zero_init_last"] = config.zero_init_residual
    elif student and config.drop_path > 0:
        extra["drop_path_rate"] = config.drop_path
    try:
        backbone = from_spec(spec, **extra)
    except TypeError as error:  # an architecture without this argument
        option = "model.drop_path=0" if "drop_path_rate" in str(error) else "another model"
        raise UserError(f"timm cannot build {spec['name']} ({error}). Choose {option}.") from error
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(f"timm cannot build {spec['name']} for this image size: {error}.") from error
    if config.name in VITS:
        # timm starts CLS at 1e-6 and all else as DINO does; DINO's bounds of +-2 make this a plain normal.
        nn.init.trunc_normal_(backbone.net.cls_token, std=0.02)  # type: ignore[arg-type]
    backbone.freeze_norm = config.freeze_norm
    return backbone.train()


def from_spec(spec: dict[str, Any], **extra: Any) -> Backbone:
    """The model that `spec` describes, with fresh weights; `extra` goes to timm but not into the spec."""
    kwargs = dict(spec["kwargs"])
    stem = kwargs.pop("stem", None)
    net: Any = timm.create_model(spec["timm"], pretrained=False, **kwargs, **extra)
    if stem is not None:
        net.maxpool = nn.Identity()
    if stem == "3x3":
        net.conv1 = nn.Conv2d(kwargs.get("in_chans", 3), net.bn1.num_features, 3, 1, 1, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    dim = getattr(net, "head_hidden_size", None) or net.num_features
    return Backbone(net, spec | {"dim": dim})


def check_patches(config: ModelConfig, name: str, size: int) -> None:
    """Refuse views, called `name` in the configuration, that a ViT's patches do not divide."""
    if config.name in VITS and size % config.patch_size:
        raise UserError(
            f"model.patch_size={config.patch_size} does not divide {name}={size}. "
            f"Choose --model.patch-size or --{name.replace('_', '-')} so that it does."
        )


def is_timm(name: str) -> bool:
    """Whether timm has this architecture, which may have a tag: resnet50.a1_in1k."""
    return ":" not in name and timm.is_model(name.split(".")[0])  # "hf-hub:..." would go to the network


def nearest_models(name: str) -> str:
    """A sentence for somebody who has mistyped a model's name."""
    ours = [*VITS, *RESNETS]
    return suggest(name, [*ours, *timm.list_models()], otherwise=ours)


def configuration(
    name: str, arguments: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> ModelConfig | None:
    """Name, patch size and stem of an encoder that a model's name and arguments for timm describe, and its weights.

    adasim's own names come first, also for timm's models that are the same: those ViTs take views of any size.
    None if a configuration cannot say it.
    """
    # What the images say, or the weights.
    sizes = ("img_size", "dynamic_img_size", "patch_size", "in_chans", "num_classes")
    special = {key: value for key, value in arguments.items() if key not in sizes}
    plain = re.sub(r"(patch)\d+_\d+$", r"\g<1>16_224", name.split(".")[0])
    own = [
        known
        for known, (base, kwargs) in (VITS | RESNETS).items()
        if (base == plain and kwargs == special) or (known == name and special in ({}, kwargs))
    ]
    if not own:
        is_plain = is_timm(name) and not special and "patch_size" not in arguments
        return ModelConfig(name=name) if is_plain else None
    model = ModelConfig(name=own[0])
    first = tensors.get("patch_embed.proj.weight" if model.name in VITS else "conv1.weight", torch.empty(0))
    if model.name in VITS and first.ndim == 4:
        model.patch_size = first.shape[-1]
    model.small_stem = model.name in RESNETS and first.ndim == 4 and first.shape[-1] == 3
    return model


def _describe(config: ModelConfig, image_size: int, channels: int) -> dict[str, Any]:
    """The spec of `config`'s encoder, without the width that only the built model knows."""
    name, stem = config.name, None
    if name in VITS:
        check_patches(config, "views.size", image_size)
        timm_name, kwargs = VITS[name]
        kwargs = kwargs | {"patch_size": config.patch_size, "img_size": image_size, "dynamic_img_size": True}
    elif name in RESNETS:
        timm_name, kwargs = RESNETS[name]
        stem = "3x3" if config.small_stem else "no_pool" if name == "resnet_tiny" else None
    elif is_timm(name):
        defaults = timm.get_pretrained_cfg(name.split(".")[0])
        timm_name, kwargs = name, {"img_size": image_size} if defaults and defaults.fixed_input_size else {}
    else:
        raise UserError(f"Unknown model.name={name!r}. {nearest_models(name)}")
    if config.small_stem and name not in RESNETS:
        raise UserError(f"model.small_stem is for {', '.join(RESNETS)}; {name} has no such stem.")
    kwargs = kwargs | {"in_chans": channels, "num_classes": 0} | ({} if stem is None else {"stem": stem})
    spec = {"name": name, "timm": timm_name, "kwargs": kwargs}
    return spec | {"image_size": image_size, "channels": channels}


class _Pixels(nn.Module):
    """Images (B, C, H, W) as features (B, C * H * W), less each image's own mean: else all would point the same way,
    and a vote by cosine would hardly tell them apart."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return x - x.mean(1, keepdim=True)

    forward_features = forward


def pixels(size: int | None = None) -> Backbone:
    """Images of 32 x 32 pixels, or of another size, as features."""
    side = size or 32
    spec = {"name": PIXELS, "dim": 3 * side * side, "image_size": side}
    return Backbone(_Pixels(), spec, EvalTransform.of_size(side, (0.5,) * 3, (0.5,) * 3)).eval()
