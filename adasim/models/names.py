"""Other people's names for the weights of ResNets and ViTs, as timm calls them.

torchvision's ResNets have timm's own names; its ViTs, and the ViTs and ResNets of Hugging Face's transformers (up to
version 4 and since), have a table each. What wraps an encoder in a training script is taken off first.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

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
