"""What is measured: the encoder of a run, of a file, or of timm, with the view of images that it expects."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import timm

from adasim import seeding
from adasim.config import ModelConfig
from adasim.errors import UserError
from adasim.eval.features import default_folder
from adasim.models import BACKBONE_FILE, Backbone, build_backbone, load_backbone
from adasim.models.transforms import EvalTransform
from adasim.runs.folder import RunFolder


@dataclass
class Subject:
    """An encoder to measure."""

    name: str
    backbone: Backbone
    transform: EvalTransform
    """What is done to an image before the encoder sees it: the encoder's own, unless another size was asked for."""
    origin: str
    """In words, where the weights come from."""
    run: Path | None = None
    """The run folder, which keeps features and results."""
    source: str | None = None
    """The data the run was pretrained on."""
    method: Any = "dino"
    """Whose linear protocol applies."""
    note: str | None = None
    """A sentence on what had to be assumed."""

    @property
    def features_folder(self) -> Path:
        return default_folder() if self.run is None else self.run / "features"

    @property
    def results_file(self) -> Path | None:
        return None if self.run is None else self.run / "results.jsonl"


def open_subject(model: str, *, random_weights: bool = False, size: int | None = None) -> Subject:
    """The encoder that a person names.

    Args:
        model: a run folder, a `backbone.safetensors`, or a model name of timm or adasim.
        random_weights: measure an untrained model of that name.
        size: side in pixels of what the encoder sees, instead of its own.
    """
    path = Path(model)
    if path.exists() or os.sep in model or path.suffix == ".safetensors":
        if random_weights:
            raise UserError(f"--random-weights is for a model's name; {model} has weights of its own.")
        subject = _from_path(path)
    else:
        subject = _from_name(model, random_weights, size)
    if size is not None and size != subject.transform.size:
        own = subject.transform
        subject.transform = replace(
            EvalTransform.of_size(size, own.mean, own.std), interpolation=own.interpolation
        )
    return subject


def _from_path(path: Path) -> Subject:
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and not (path / BACKBONE_FILE).is_file():
        RunFolder.open(path, lock=False)  # says so if it is no run at all
        raise UserError(f"{path} has no {BACKBONE_FILE} yet. Let its first epoch end, then measure it.")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        backbone = load_backbone(path)
    if not (folder / "config.json").is_file():
        note = str(said[0].message) if said else None
        return Subject(path.stem, backbone, backbone.transform, "a file without its run", note=note)
    config = RunFolder.open(folder, lock=False).config
    return Subject(
        name=folder.resolve().name,
        backbone=backbone,
        transform=backbone.transform,
        origin=f"{config.method}, {config.pairs} pairs",
        run=folder,
        source=config.data.source,
        method=config.method,
    )


def _from_name(name: str, random_weights: bool, size: int | None) -> Subject:
    pretrained = ":" not in name and timm.is_model_pretrained(name)
    if not random_weights and pretrained:
        net = _download(name, size)
        spec = {"name": name, "timm": name, "image_size": net.pretrained_cfg["input_size"][-1]}
        width = getattr(net, "head_hidden_size", None) or net.num_features
        backbone = Backbone(net, spec | {"dim": width}, EvalTransform.for_timm(net)).eval()
        return Subject(name, backbone, backbone.transform, "timm's pretrained weights")
    try:
        with seeding.seeded(seeding.key(0, "random weights")):
            side = size or 224
            backbone = build_backbone(ModelConfig(name=name, drop_path=0.0), side, student=False).eval()
    except UserError as error:
        raise UserError(f"{name} is no run folder and no file. {error}") from None
    if not random_weights:
        raise UserError(
            f"There are no trained weights called {name}. Name a run folder, or measure an untrained encoder "
            f"with --random-weights."
        )
    transform = EvalTransform.for_timm(backbone.net) if pretrained else EvalTransform.of_size(side)
    return Subject(name, backbone, transform, "random weights, untrained")


def _download(name: str, size: int | None) -> Any:
    """A timm model with its weights, from the local cache or the network."""
    defaults = timm.get_pretrained_cfg(name)
    fixed = size is not None and defaults is not None and defaults.fixed_input_size
    kwargs: dict[str, Any] = (
        {"img_size": size} if fixed else {}
    )  # timm interpolates a ViT's positions as it loads them
    try:
        with _no_long_wait():
            return timm.create_model(name, pretrained=True, num_classes=0, **kwargs)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"The weights of {name} are not on this machine and cannot be fetched ({reason}). Connect to the "
            f"network once, or measure an untrained encoder with --random-weights."
        ) from None


@contextmanager
def _no_long_wait() -> Iterator[None]:
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
