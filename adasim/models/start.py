"""Start from weights that somebody has trained (`adasim.models.weights` says where from), or use them as they are.

    adasim pretrain dino-vit-s16 --model.init vit_small_patch16_224.dino --data PHOTOS
    adasim pretrain dino-vit-s16 --model.init dino_deitsmall16_pretrain.pth --data PHOTOS
    adasim pretrain desk-resnet --model.init runs/earlier --data PHOTOS

Only the encoder starts from them; the heads are new.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from adasim.models.backbones import VITS, Backbone, build_backbone
from adasim.models.transforms import EvalTransform
from adasim.models.weights import Weights
from adasim.util.errors import UserError

_HEADS = ("head", "head_dist", "fc", "classifier", "projector", "predictor")


def start_from(backbones: Iterable[Backbone], weights: Weights, source: str) -> None:
    """Load the weights into every one of the encoders; a ViT's position grid is interpolated to its own size.

    Raises:
        UserError: the weights are another architecture's. Nothing has been loaded then.
    """
    for backbone in backbones:
        net = backbone.net
        own, tensors = net.state_dict(), _fitted(weights.tensors, net)
        heads = tuple(f"{head}." for head in (*_HEADS, *_classifiers(net)))
        tensors = {n: t for n, t in tensors.items() if n in own or not n.startswith(heads)}
        # Files of old versions of torch lack these counters, which nothing is computed from.
        tensors |= {n: t for n, t in own.items() if n not in tensors and n.endswith("num_batches_tracked")}
        for name in [*own, *(name for name in tensors if name not in own)]:
            here, there = (tuple(x[name].shape) if name in x else "absent" for x in (own, tensors))
            if here != there:
                said = "" if weights.model is None else f"; its source says {weights.model.name}"
                raise UserError(
                    f"{source} does not fit {backbone.spec['name']}: {name} is {there} there and {here} here. Name "
                    f"the model that the weights are of (--model.name and --model.patch-size, or NAME:FILE){said}."
                )
        net.load_state_dict(tensors)


def build_from(weights: Weights, source: str, size: int | None = None) -> Backbone:
    """The encoder that the weights are of, with them, in evaluation mode.

    Args:
        source: what the person called it, for sentences.
        size: side in pixels of the images, for models of timm that are built for one.
    """
    if weights.model is None:
        raise UserError(
            f"{source} does not say which model its weights are of, or it is one that adasim cannot build. Name it "
            f"before the file of weights, as resnet50:{source}."
        )
    transform = weights.transform or EvalTransform.of_size(224)
    side = transform.size if size is None or weights.model.name in VITS else size
    with torch.device("meta"):  # the model may be somebody else's claim: see its size before memory is taken
        bare = build_backbone(weights.model, side, student=False)
    needed = sum(parameter.numel() for parameter in bare.parameters())
    if needed > 2 * sum(tensor.numel() for tensor in weights.tensors.values()) + (1 << 24):
        raise UserError(
            f"{source} does not fit {weights.model.name}, which has {needed:,} weights. Name the model that its "
            f"weights are of, as NAME:FILE."
        )
    backbone = build_backbone(weights.model, side, student=False)
    start_from([backbone], weights, source)
    backbone.transform = transform
    return backbone.eval()


def _fitted(tensors: dict[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """What timm does with a file of weights before it loads it: positions interpolated, older names replaced."""
    for kind in type(net).__mro__:
        fit: Any = getattr(sys.modules[kind.__module__], "checkpoint_filter_fn", None)
        if fit is not None:
            with suppress(Exception):  # made for its own model's weights; others are refused by their names
                return fit(dict(tensors), net)
    return tensors


def _classifiers(net: Any) -> tuple[str, ...]:
    """What timm calls this model's classifier: one name, or several."""
    names = (getattr(net, "pretrained_cfg", None) or {}).get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)
