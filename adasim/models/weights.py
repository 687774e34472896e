"""Weights that somebody has trained, from wherever they are: what MODEL and `--model.init` may name.

    runs/photos                       a run, or its backbone.safetensors
    resnet50:weights.pth              a model's name and a file of its weights (.safetensors, .pth, .pt, .bin)
    exported/                         a folder with config.json, as timm, transformers and `adasim export` write
    hf-hub:timm/resnet50.a1_in1k      the same on the Hugging Face hub
    vit_small_patch16_224.dino        one of timm's pretrained models

Of a file that is called as its model is, such as resnet50.safetensors, the name need not be said. A run that starts
from weights (`start_from`) has new heads.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import huggingface_hub
import huggingface_hub.constants
import safetensors
import safetensors.torch
import timm
import timm.data
import torch
from torch import Tensor, nn

from adasim.config import ModelConfig
from adasim.models.backbone import (
    RESNETS,
    VITS,
    Backbone,
    build_backbone,
    configuration,
    is_timm,
    nearest_models,
)
from adasim.models.io import BACKBONE_FILE, is_ours, load_backbone, missing
from adasim.models.published import (
    CONFIG_FILE,
    PROCESSOR_FILE,
    WEIGHTS_FILES,
    is_published,
    is_torchvision_vit,
    read_description,
    timm_names,
)
from adasim.models.transform import EvalTransform
from adasim.util.errors import UserError

# DINO's checkpoints hold both networks, and training scripts name what they save: whose weights are the encoder's.
_NETWORKS = ("teacher", "student", "state_dict", "model")
_FILES = (".safetensors", ".pth", ".pt", ".bin")
_HUB = ("hf-hub:", "hf_hub:")
_TORCHVISION = EvalTransform.of_size(224).bilinear()  # for its ViTs of 224 pixels
_PROGRAMS = {".onnx": "ONNX", ".pt2": "torch.export"}
_HEADS = ("head", "head_dist", "fc", "classifier", "projector", "predictor")


class Weights(NamedTuple):
    """An encoder's weights, and what their source says about it."""

    tensors: dict[str, Tensor]  # by timm's names, where known; a classifier may be among them
    model: ModelConfig | None = None  # whose they are (name, patch size, stem); None: the source does not say
    transform: EvalTransform | None = None  # what the encoder expects to be done to an image; None: unknown


def parse_source(source: str) -> tuple[str, Path | None]:
    """What a person has named: one of timm's or adasim's models, a path, or both ("" or None is what is not named).

    What exists is a path, also with a colon in it; what else stands before a colon is a model's name.
    """
    path = Path(source).expanduser()
    if path.exists():
        return "", path
    name, colon, file = source.partition(":")
    if colon and os.sep not in name and not source.startswith(_HUB):
        return "" if name == "local-dir" else name, Path(file).expanduser()  # timm's word for a folder
    is_path = not source.startswith(_HUB) and (os.sep in source or path.suffix in (*_FILES, *_PROGRAMS))
    return ("", path) if is_path else (source, None)


def read_weights(source: str) -> Weights:
    """The weights that a person names with MODEL or `--model.init`."""
    name, path = parse_source(source)
    if path is None:
        return _read_folder(_fetched(name)) if name.startswith(_HUB) else _of_timm(name)
    if name:
        return _read_named(name, path)
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise UserError(f"No backbone at {path}: there is no such file or folder. Check its spelling.")
    _refuse_program(path)
    if is_ours(path):
        return _of_ours(path)
    if path.name in WEIGHTS_FILES and is_published(path.parent):
        return _described(path)
    says = timm.is_model_pretrained(path.stem) or ("." not in path.stem and _is_model(path.stem))
    return _read_named(path.stem, path) if says else Weights(timm_names(_tensors(path)))


def start_from(backbones: Iterable[Backbone], weights: Weights, source: str) -> None:
    """Load the weights into every one of the encoders; a ViT's position grid is interpolated to its own size.

    Raises:
        UserError: the weights are another architecture's. Nothing has been loaded then.
    """
    for backbone in backbones:
        net: Any = backbone.net
        own, tensors = net.state_dict(), _fitted(weights.tensors, net)
        classifier = (getattr(net, "pretrained_cfg", None) or {}).get("classifier") or ()  # as timm calls it
        names = (classifier,) if isinstance(classifier, str) else classifier
        heads = tuple(f"{head}." for head in (*_HEADS, *names))
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
    backbone = build_backbone(weights.model, side, student=False)
    start_from([backbone], weights, source)
    backbone.transform = transform
    return backbone.eval()


def _read_folder(folder: Path) -> Weights:
    if (folder / BACKBONE_FILE).is_file():
        return _of_ours(folder / BACKBONE_FILE)
    for suffix in _PROGRAMS:
        _refuse_program(folder / f"model{suffix}")
    if not is_published(folder):
        if (folder / CONFIG_FILE).is_file():  # a run
            raise UserError(missing(folder / BACKBONE_FILE))
        raise UserError(
            f"{folder} is a folder without {BACKBONE_FILE}, and without a {CONFIG_FILE} of timm's or transformers'. "
            f"Name a run, or a file of weights."
        )
    for name in WEIGHTS_FILES:
        if (folder / name).is_file():
            return _described(folder / name)
    raise UserError(f"{folder} has no {' and no '.join(WEIGHTS_FILES)}. Put the model's weights there.")


def _refuse_program(path: Path) -> None:
    if path.suffix in _PROGRAMS and path.is_file():
        raise UserError(
            f"{path} is a program of {_PROGRAMS[path.suffix]}, whose weights cannot be taken out. Give the run that "
            f"it was exported from, or export that run --to timm."
        )


def _of_ours(path: Path) -> Weights:
    backbone = load_backbone(path)
    tensors = backbone.net.state_dict()
    return Weights(tensors, configuration(backbone.spec["name"], {}, tensors), backbone.transform)


def _described(path: Path) -> Weights:
    """A file beside the config.json that describes it."""
    tensors = timm_names(_tensors(path))
    name, arguments, transform = read_description(path.parent)
    return Weights(tensors, configuration(name, arguments, tensors), transform)


def _read_named(name: str, path: Path) -> Weights:
    """A file of weights of the model `name`."""
    if not _is_model(name):
        raise UserError(f"{name!r} in {name}:{path} is not a model of timm or adasim. {nearest_models(name)}")
    if path.is_dir():
        path = next((path / file for file in WEIGHTS_FILES if (path / file).is_file()), path)
    if not path.is_file():
        raise UserError(f"{name}:{path} names no file of weights. Check its spelling.")
    tensors = _tensors(path)
    transform = _TORCHVISION if is_torchvision_vit(tensors) else _transform_of(name)
    tensors = timm_names(tensors)
    return Weights(tensors, configuration(name, {}, tensors), transform)


def _is_model(name: str) -> bool:
    return name in VITS or name in RESNETS or is_timm(name)


def _transform_of(name: str) -> EvalTransform | None:
    """What timm says that the weights of this name expect."""
    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError as error:  # an unknown tag
        raise UserError(f"{error} Leave the tag away, or give one that timm has.") from None
    if config is None:
        return None
    return EvalTransform.from_timm(timm.data.resolve_data_config({}, pretrained_cfg=config.to_dict()))


def _of_timm(name: str) -> Weights:
    """timm's pretrained weights, from the local cache or the network."""
    if not _is_model(name):
        raise UserError(
            f"{name} is no run folder and no file, and not a model of timm. {nearest_models(name)}"
        )
    if not timm.is_model_pretrained(name):
        raise UserError(
            f"There are no trained weights called {name}. Name a run folder, or a file of its weights as {name}:FILE."
        )
    try:
        with no_long_wait():
            net: Any = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as error:  # the hub's own errors derive from nothing narrower
        raise _unreachable(name, error) from None
    tensors = net.state_dict()
    return Weights(tensors, configuration(name, {}, tensors), EvalTransform.for_timm(net))


def _fetched(name: str) -> Path:
    """The folder of a model on the Hugging Face hub, in the local cache."""
    repository, _, revision = name.partition(":")[2].partition("@")
    try:
        with no_long_wait():
            for weights in WEIGHTS_FILES:
                patterns = [CONFIG_FILE, PROCESSOR_FILE, weights]
                fetched = huggingface_hub.snapshot_download(
                    repository, revision=revision or None, allow_patterns=patterns
                )
                if Path(fetched, weights).is_file():
                    break
    except Exception as error:  # the hub's own errors derive from nothing narrower
        raise _unreachable(name, error) from None
    return Path(fetched)


def _unreachable(name: str, error: Exception) -> UserError:
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    return UserError(
        f"The weights of {name} are not on this machine and cannot be fetched ({shorten(reason, 150)}). Connect to "
        f"the network once, or give a file of weights as NAME:FILE."
    )


def _tensors(path: Path) -> dict[str, Tensor]:
    """What is in a file of weights, by its own names; nothing in it can run."""
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(path)
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"{path} is not a whole safetensors file ({error}).") from None
    try:
        # argparse's are the options that DINO saves beside weights.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch meets any bytes here, and raises nearly anything
        if unsafe := re.search(r"GLOBAL (\S+)", str(error)):
            reason = f"it holds {unsafe[1]}, which is not safe to load: save the model's state_dict alone"
        else:
            reason = str(error) if isinstance(error, OSError) else "it is damaged, or not made by torch.save"
        raise UserError(f"{path} cannot be read as a file of weights ({reason}).") from None
    if isinstance(content, Mapping):
        content = next((content[n] for n in _NETWORKS if isinstance(content.get(n), Mapping)), content)
    if not isinstance(content, Mapping) or not all(isinstance(one, Tensor) for one in content.values()):
        raise UserError(f"{path} does not hold a model's weights by their names.")
    return dict(content)


@contextmanager
def no_long_wait() -> Iterator[None]:
    """Without a network the hub would try again for a minute; look at its local cache alone then."""
    constants: Any = huggingface_hub.constants
    before = constants.HF_HUB_OFFLINE
    proxies = any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    if not (before or proxies):
        try:
            socket.create_connection(("huggingface.co", 443), timeout=3).close()
        except OSError:
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _fitted(tensors: dict[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """What timm does with a file of weights before it loads it: positions interpolated, older names replaced."""
    for kind in type(net).__mro__:
        fit: Any = getattr(sys.modules[kind.__module__], "checkpoint_filter_fn", None)
        if fit is not None:
            with suppress(Exception):  # made for its own model's weights; others are refused by their names
                return fit(dict(tensors), net)
    return tensors
