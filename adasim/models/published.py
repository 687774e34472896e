"""A folder that describes a model in config.json, as timm's `local-dir:` and transformers' `AutoModel` read it.

It is somebody else's, and data: it may name a model, known arguments and a transform, and nothing in it is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from adasim.models.files import checked_transform, parsed
from adasim.models.transforms import EvalTransform
from adasim.util.errors import UserError

CONFIG_FILE, PROCESSOR_FILE = "config.json", "preprocessor_config.json"
WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")
_LARGEST = 1 << 24  # bytes of a config.json: the names of 21,000 classes may be in it

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


class Description(NamedTuple):
    """Which model, as timm or adasim names it ("" if neither does), its arguments for timm, and its transform."""

    name: str
    arguments: dict[str, Any]
    transform: EvalTransform | None


def is_published(folder: Path) -> bool:
    """Whether the folder's config.json describes a model, and not a run."""
    config = _read(folder / CONFIG_FILE)
    return "architecture" in config or "model_type" in config


def read_description(folder: Path) -> Description:
    """What config.json says, and preprocessor_config.json of transformers."""
    path, beside = folder / CONFIG_FILE, folder / PROCESSOR_FILE
    config, processor = _read(path), _read(beside)
    if "architecture" not in config:
        return Description(_of_transformers(config), {}, _processed(processor, beside))
    name, arguments = config["architecture"], config.get("model_args") or {}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise UserError(f"{path} has a damaged description of its model. Export it again.")
    # timm's older files have it at the top; transformers' wrapper of timm's models, beside.
    said = config.get("pretrained_cfg") or processor.get("pretrained_cfg") or config
    transform = _transform(said, path) if isinstance(said, dict) and "mean" in said else None
    return Description(name.removeprefix("adasim_").removesuffix("_3x3"), arguments, transform)


def _of_transformers(config: dict[str, Any]) -> str:
    """The name of a ViT or ResNet of transformers; its defaults are those of ViT-B and ResNet-50."""
    if config.get("model_type") == "vit" and config.get("hidden_act", "gelu") == "gelu":
        usual = {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
        }
        shape = tuple(config.get(key, value) for key, value in usual.items())
        return _VITS.get(shape, "") if config.get("qkv_bias", True) is True else ""
    if config.get("model_type") == "resnet" and config.get("hidden_act", "relu") == "relu":
        elsewhere = config.get("downsample_in_first_stage") or config.get("downsample_in_bottleneck")
        depths = config.get("depths", [3, 4, 6, 3])
        if isinstance(depths, list) and not elsewhere:
            return _RESNETS.get((config.get("layer_type", "bottleneck"), *depths), "")
    return ""


def _transform(said: dict[str, Any], path: Path) -> EvalTransform:
    """A `pretrained_cfg` of timm, which may leave away what is usual, and have much more."""
    return checked_transform(
        {
            "input_size": said.get("input_size", [3, 224, 224]),
            "mean": said["mean"],
            "std": said.get("std"),
            "interpolation": "bilinear" if said.get("interpolation") == "bilinear" else "bicubic",
            "crop_pct": said.get("crop_pct") or 0.875,
            **({"crop_mode": "squash"} if said.get("crop_mode") == "squash" else {}),
        },
        path,
    )


def _processed(said: dict[str, Any], path: Path) -> EvalTransform | None:
    """An image processor of transformers, under timm's names."""
    size, crop = (_sides(said.get(key)) for key in ("size", "crop_size"))
    edge = size.get("shortest_edge") or size.get("height")
    if "image_mean" not in said or not isinstance(edge, int):
        return None
    kept = crop.get("height", edge) if said.get("do_center_crop") else edge
    share = said.get("crop_pct")  # the processor of ConvNeXt, which ResNets have too: `edge` is what is kept
    if share is None and isinstance(kept, int):
        share = kept / (edge + 0.5)  # timm divides again and truncates
    return checked_transform(
        {
            "input_size": [3, kept, kept],
            "mean": said["image_mean"],
            "std": said.get("image_std"),
            "interpolation": "bicubic" if said.get("resample") == 3 else "bilinear",
            "crop_pct": share,
            **({} if "shortest_edge" in size else {"crop_mode": "squash"}),
        },
        path,
    )


def _sides(value: Any) -> dict[str, Any]:
    """{"height": 224, ...} or {"shortest_edge": 224}; older files have a number for a square."""
    return value if isinstance(value, dict) else {} if value is None else {"height": value}


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file() or path.stat().st_size > _LARGEST:
        return {}
    found = parsed(path.read_bytes())
    return found if isinstance(found, dict) else {}
