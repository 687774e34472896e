"""Start from weights that somebody has trained: an earlier run, a published file, or a timm model by its name.

    adasim pretrain dino-vit-s16 --model.init vit_small_patch16_224.dino --data PHOTOS
    adasim pretrain dino-vit-s16 --model.init dino_deitsmall16_pretrain.pth --data PHOTOS
    adasim pretrain desk-resnet --model.init runs/earlier --data PHOTOS

Only the encoder starts from them; the heads are new.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import timm
import torch
from timm.models import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor

from adasim.errors import UserError
from adasim.models.backbones import Backbone
from adasim.models.files import BACKBONE_FILE

# DINO's checkpoints hold both networks, and training scripts wrap them: whose weights are the encoder's, best first.
_NETWORKS = ("teacher", "student", "state_dict", "model")
_WRAPPERS = ("module.", "backbone.", "encoder.", "net.", "_orig_mod.")
_CLASSIFIERS = ("head.", "fc.", "projector.", "predictor.")


class Weights(NamedTuple):
    """An encoder's tensors by timm's names, and the mean and std that its images had, where that is known."""

    tensors: dict[str, Tensor]
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


def read_weights(source: str) -> Weights:
    """The weights that `--model.init` names: a run folder, a file, or a timm model with pretrained weights."""
    path = Path(source).expanduser()
    if path.is_dir():
        path = path / BACKBONE_FILE
        if not path.is_file():
            raise UserError(
                f"model.init={source} is a folder without {BACKBONE_FILE}. Name a run, or a file."
            )
    if path.is_file():
        return _from_safetensors(path) if path.suffix == ".safetensors" else _from_pickle(path)
    if not timm.is_model(source.split(".")[0]):
        raise UserError(
            f"model.init={source} is neither a file, a run folder nor a timm model. Check its spelling."
        )
    return _from_timm(source)


def start_from(backbones: Iterable[Backbone], weights: Weights, source: str) -> None:
    """Load the weights into every one of the encoders; a ViT's position grid is interpolated to its own size.

    Raises:
        UserError: the weights are another architecture's. Nothing has been loaded then.
    """
    for backbone in backbones:
        net = backbone.net
        tensors = weights.tensors
        if isinstance(net, VisionTransformer):
            tensors = checkpoint_filter_fn(tensors, net, interpolation="bicubic", antialias=True)
        own = net.state_dict()
        tensors = {n: t for n, t in tensors.items() if n in own or not n.startswith(_CLASSIFIERS)}
        for name in [*own, *(name for name in tensors if name not in own)]:
            here, there = (tuple(x[name].shape) if name in x else "absent" for x in (own, tensors))
            if here != there:
                raise UserError(
                    f"model.init={source} does not fit {backbone.spec['name']}: {name} is {there} there and {here} "
                    f"here. Choose the --model.name (and --model.patch-size) that the weights are of."
                )
        net.load_state_dict(tensors)


def _from_safetensors(path: Path) -> Weights:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            note = (file.metadata() or {}).get("pretrained_cfg")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise UserError(f"model.init={path} is not a whole safetensors file ({error}).") from error
    try:
        transform: Any = json.loads(note) if note else {}
        return Weights(_unwrapped(tensors), tuple(transform["mean"]), tuple(transform["std"]))
    except (ValueError, KeyError, TypeError):
        return Weights(_unwrapped(tensors))


def _from_pickle(path: Path) -> Weights:
    """A .pth or .pt file of tensors, and of the options that DINO saves beside them; torch refuses anything in it
    that could run."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch meets any bytes here, and raises nearly anything
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            reason = f"it holds {found[1]}, which is not safe to load: save the model's state_dict alone"
        else:
            reason = str(error) if isinstance(error, OSError) else "it is damaged, or not made by torch.save"
        raise UserError(f"model.init={path} cannot be read as a file of weights ({reason}).") from None
    for name in _NETWORKS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
            break
    if not isinstance(content, Mapping) or not all(isinstance(one, Tensor) for one in content.values()):
        raise UserError(f"model.init={path} does not hold a model's weights by their names.")
    return Weights(_unwrapped(dict(content)))


def _from_timm(name: str) -> Weights:
    try:
        net: Any = timm.create_model(name, pretrained=True, num_classes=0)
    # No such weights, no network, a damaged download: timm and its hub raise as they like.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"timm has no weights for model.init={name} within reach ({reason[:150]}). Check the name and the "
            f"network, or give a file."
        ) from None
    return Weights(net.state_dict(), tuple(net.pretrained_cfg["mean"]), tuple(net.pretrained_cfg["std"]))


def _unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names without what wrapped the encoder; where something did, what lies beside it (a head) is left out."""
    while True:
        wrapper = next((w for w in _WRAPPERS if any(name.startswith(w) for name in tensors)), None)
        if wrapper is None:
            return tensors
        tensors = {n.removeprefix(wrapper): t for n, t in tensors.items() if n.startswith(wrapper)}
