"""Models as other libraries publish them: their config.json, and their names for weights.

A folder with a config.json, as timm's `local-dir:` and transformers' `AutoModel` read it, may name a model, known
arguments and a transform; nothing in it is run. torchvision's ResNets have timm's own names for weights; its ViTs,
and the ViTs and ResNets of transformers (up to version 4 and since), have a table each.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adasim.models.transform import EvalTransform
from adasim.util.errors import UserError

CONFIG_FILE, PROCESSOR_FILE = "config.json", "preprocessor_config.json"
WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")
_LARGEST = 4096  # side in pixels of the images that a description may ask for: positions take memory

_VITS = {  # of transformers: width, blocks, heads, hidden width
    (96, 4, 3, 384): "vit_mini",
    (192, 12, 3, 768): "vit_tiny",
    (384, 12, 6, 1536): "vit_small",
    (768, 12, 12, 3072): "vit_base",
    (1024, 24, 16, 4096): "vit_large_patch16_224",
}
_RESNETS = {
    ("basic", 2, 2, 2, 2): "resnet18",
    ("basic", 3, 4, 6, 3): "resnet34",
    ("bottleneck", 3, 4, 6, 3): "resnet50",
    ("bottleneck", 3, 4, 23, 3): "resnet101",
    ("bottleneck", 3, 8, 36, 3): "resnet152",
}


def is_published(folder: Path) -> bool:
    """Whether the folder's config.json describes a model, and not a run."""
    config = _read(folder / CONFIG_FILE)
    return "architecture" in config or "model_type" in config


def read_description(folder: Path) -> tuple[str, dict[str, Any], EvalTransform | None]:
    """What config.json says, and preprocessor_config.json beside it.

    Which model, as timm or adasim names it ("" if neither does), its arguments for timm, and its transform.
    """
    config, processor = _read(folder / CONFIG_FILE), _read(folder / PROCESSOR_FILE)
    try:
        if "architecture" not in config:
            return _of_transformers(config), {}, _of_processor(processor)
        name = config["architecture"].removeprefix("adasim_").removesuffix("_3x3")
        # timm's older files have it at the top; transformers' wrapper of timm's models, beside.
        said = config.get("pretrained_cfg") or processor.get("pretrained_cfg") or config
        return name, dict(config.get("model_args") or {}), _transform(said) if "mean" in said else None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        path = folder / CONFIG_FILE
        raise UserError(f"{path} has a damaged description of its model: {error}. Export it again.") from None


def _of_transformers(config: dict[str, Any]) -> str:
    """The name of a ViT or ResNet of transformers; its defaults are those of ViT-B and ResNet-50."""
    if config.get("model_type") == "vit" and config.get("hidden_act", "gelu") == "gelu":
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        shape = tuple(config.get(name, usual) for name, usual in zip(names, (768, 12, 12, 3072), strict=True))
        return _VITS.get(shape, "") if config.get("qkv_bias", True) is True else ""
    if config.get("model_type") == "resnet" and config.get("hidden_act", "relu") == "relu":
        if config.get("downsample_in_first_stage") or config.get("downsample_in_bottleneck"):
            return ""
        return _RESNETS.get((config.get("layer_type", "bottleneck"), *config.get("depths", [3, 4, 6, 3])), "")
    return ""


def _of_processor(said: dict[str, Any]) -> EvalTransform | None:
    """The transform of an image processor of transformers."""
    size, crop = (
        value if isinstance(value, dict) else {"height": value} if value else {}  # older files have a number
        for value in (said.get("size"), said.get("crop_size"))
    )
    edge = size.get("shortest_edge") or size.get("height")
    if "image_mean" not in said or edge is None:
        return None
    side = crop.get("height", edge) if said.get("do_center_crop") else edge
    wanted = {
        "input_size": [3, side, side],
        "mean": said["image_mean"],
        "std": said["image_std"],
        "interpolation": "bicubic" if said.get("resample") == 3 else "bilinear",
        # The processor of ConvNeXt, which ResNets have too, says it. Else: timm divides again and truncates.
        "crop_pct": said.get("crop_pct") or side / (edge + 0.5),
        "crop_mode": "center" if "shortest_edge" in size else "squash",
    }
    return _transform(wanted)


def _transform(said: dict[str, Any]) -> EvalTransform:
    """Of a `pretrained_cfg` of timm, which may leave away what is usual, and have much more."""
    said = {"input_size": (3, 224, 224), "crop_pct": None, "interpolation": "bicubic"} | said
    mean, std = (tuple(map(float, said[name])) for name in ("mean", "std"))
    side, share = said["input_size"][-1], 0.875 if said["crop_pct"] is None else said["crop_pct"]
    if not (len(mean) == len(std) == 3 and min(std) > 0 and 0 < share <= 1 and 0 < side <= _LARGEST):
        raise ValueError(
            f"{mean=}, {std=}, crop_pct={share} for {side} pixels is an impossible normalisation"
        )
    return EvalTransform.from_timm(said | {"mean": mean, "std": std, "crop_pct": share})


def _read(path: Path) -> dict[str, Any]:
    """A description that somebody wrote; empty if it is none."""
    if not path.is_file():  # a pipe would be waited for
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


# Weights under other names.

_WRAPPERS = ("module.", "backbone.", "encoder.", "net.", "_orig_mod.", "timm_model.", "vit.", "resnet.")
_Table = tuple[tuple[str, str], ...]

_TORCHVISION_VIT: _Table = (
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.(?:linear_1|0)\.", ".mlp.fc1."),
    (r"\.mlp\.(?:linear_2|3)\.", ".mlp.fc2."),
    (r"^encoder\.ln\.", "norm."),
    (r"^heads\.(?:head\.)?", "head."),
)
_TRANSFORMERS_VIT: _Table = (
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^(?:encoder\.layer|layers)\.(\d+)\.", r"blocks.\1."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.(?:attention\.)?([qkv])(?:uery|ey|alue|_proj)\.", r".attn.\1."),
    (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"^layernorm\.", "norm."),
    (r"^(?:pooler|classifier)\.", "head."),
)
_TRANSFORMERS_RESNET: _Table = (
    (r"^embedder\.embedder\.convolution\.", "conv1."),
    (r"^embedder\.embedder\.normalization\.", "bn1."),
    *((rf"^encoder\.stages\.{i}\.layers\.(\d+)\.", rf"layer{i + 1}.\1.") for i in range(4)),
    *((rf"\.layer\.{i}\.convolution\.", f".conv{i + 1}.") for i in range(3)),
    *((rf"\.layer\.{i}\.normalization\.", f".bn{i + 1}.") for i in range(3)),
    (r"\.shortcut\.convolution\.", ".downsample.0."),
    (r"\.shortcut\.normalization\.", ".downsample.1."),
    (r"^classifier\.1\.", "fc."),
)
_TABLES: dict[str, _Table] = {
    "conv_proj.weight": _TORCHVISION_VIT,
    "embeddings.patch_embeddings.projection.weight": _TRANSFORMERS_VIT,
    "embedder.embedder.convolution.weight": _TRANSFORMERS_RESNET,
}
"""By a name that no other library gives."""


def timm_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The encoder's tensors under timm's names, without what wrapped it; what lies beside it, a head, is left out."""
    while True:
        table = next((table for name, table in _TABLES.items() if name in tensors), None)
        if table is not None:
            return _joined({_renamed(name, table): tensor for name, tensor in tensors.items()})
        wrapper = next((w for w in _WRAPPERS if any(name.startswith(w) for name in tensors)), None)
        if wrapper is None:
            return tensors
        tensors = {n.removeprefix(wrapper): t for n, t in tensors.items() if n.startswith(wrapper)}


def is_torchvision_vit(tensors: dict[str, Tensor]) -> bool:
    """Whether torchvision trained this ViT, on images normalised as ImageNet's, as most of timm's ViTs were not."""
    return any(name.endswith("conv_proj.weight") for name in tensors)


def _renamed(name: str, table: _Table) -> str:
    for pattern, replacement in table:
        name = re.sub(pattern, replacement, name)
    return name


def _joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values of an attention, where they are three layers, as timm's one."""
    for name in [name for name in tensors if ".attn.q." in name]:
        parts = [name.replace(".attn.q.", f".attn.{part}.") for part in "qkv"]
        if all(part in tensors for part in parts):
            tensors[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat([tensors.pop(part) for part in parts])
    return tensors
