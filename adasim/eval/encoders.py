"""What is measured: the encoder of a run, of a file, or of timm, with the view of images that it expects."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import timm

from adasim import seeding
from adasim.config import ModelConfig
from adasim.errors import UserError
from adasim.eval.features import default_folder, require_size
from adasim.eval.results import RESULTS_FILE
from adasim.fields import at_least
from adasim.models import BACKBONE_FILE, Backbone, build_backbone, load_backbone
from adasim.models.transforms import EvalTransform
from adasim.registry import METHODS, PAIRS
from adasim.runs.folder import RunFolder, check_source

_USUAL_SIZE = 224  # of a model that is known by its name alone


@dataclass
class Encoder:
    """An encoder to measure, and where it comes from."""

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
    method: str | None = None
    """The method that the run was pretrained with."""
    named: bool = False
    """Whether it is known by a model's name."""
    usual_size: int = 0
    """Side in pixels of what it sees where nobody asks for another."""
    resized: bool = False
    """Whether another size was asked for than the encoder's own."""
    note: str | None = None
    """A sentence on what had to be assumed."""

    def __post_init__(self) -> None:
        self.usual_size = self.usual_size or self.transform.size

    @property
    def features_folder(self) -> Path:
        return default_folder() if self.run is None else self.run / "features"

    @property
    def results_file(self) -> Path | None:
        return None if self.run is None else self.run / RESULTS_FILE

    def own_source(self) -> str | None:
        """The images that the run was trained on, if this is a run; a sentence if they are not found from here."""
        if self.run is not None and self.source is not None:
            check_source(self.run, self.source)
        return self.source


def open_encoder(
    model: str | Path | Backbone,
    *,
    random_weights: bool = False,
    size: int | None = None,
    named_size: int | None = None,
) -> Encoder:
    """The encoder that a person names.

    Args:
        model: a run folder, a `backbone.safetensors`, a model name of timm or adasim, or an encoder that is
            loaded already.
        random_weights: measure an untrained model of that name.
        size: side in pixels of what the encoder sees, instead of its own.
        named_size: the same for a model that is known by its name, where `size` does not say.
    """
    if size is not None:
        at_least("size", size, 1)
    path = Path(model) if isinstance(model, str | Path) else None
    stored = path is not None and (path.exists() or os.sep in str(model) or path.suffix == ".safetensors")
    if random_weights and (stored or path is None):
        what = str(path) if stored else "an encoder that is loaded"
        raise UserError(f"--random-weights is for a model's name; {what} has weights of its own.")
    if isinstance(model, Backbone):
        encoder = Encoder(str(model.spec["name"]), model, model.transform, "an encoder in memory")
    elif path is None:
        raise UserError(
            f"{type(model).__name__} is no encoder. Give a run folder, a backbone.safetensors, a timm model name, "
            f"or what adasim.load_backbone returns."
        )
    elif stored:
        encoder = _from_path(path)
    else:
        size = size or named_size
        encoder = _from_name(str(model), random_weights, size)
        encoder.usual_size = named_size or encoder.usual_size
    encoder.resized = size is not None
    if size is not None:
        require_size(encoder.backbone, size)
    if size is not None and size != encoder.transform.size:
        encoder.transform = encoder.transform.at(size)
    return encoder


def _from_path(path: Path) -> Encoder:
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and not (path / BACKBONE_FILE).is_file():
        RunFolder.open(path, lock=False)  # says so if it is no run at all
        raise UserError(f"{path} has no {BACKBONE_FILE} yet. Let its first epoch end, then measure it.")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        backbone = load_backbone(path)
    is_run = (path.is_dir() or path.name == BACKBONE_FILE) and (folder / "config.json").is_file()
    if not is_run:  # another file in a run folder, such as a copy of an earlier epoch, has figures of its own
        note = str(said[0].message) if said else None
        return Encoder(path.stem, backbone, backbone.transform, "a file without its run", note=note)
    method, pairs, source = _pretraining(folder)
    return Encoder(
        name=folder.resolve().name,
        backbone=backbone,
        transform=backbone.transform,
        origin=f"{method}, {pairs} pairs",
        run=folder,
        source=source,
        method=method,
    )


def _pretraining(run: Path) -> tuple[str, str, str]:
    """Method, pairs and data of a run. Those of a plug-in need not be loaded: their settings are not asked for."""
    try:
        config = RunFolder.open(run, lock=False).config
    except UserError:
        with suppress(OSError, ValueError, KeyError, TypeError):
            saved = json.loads((run / "config.json").read_bytes())
            method, pairs, source = str(saved["method"]), str(saved["pairs"]), str(saved["data"]["source"])
            if method not in METHODS or pairs not in PAIRS:
                return method, pairs, source
        raise
    return config.method, config.pairs, config.data.source


def _from_name(name: str, random_weights: bool, size: int | None) -> Encoder:
    pretrained = ":" not in name and timm.is_model_pretrained(name)
    if not random_weights and pretrained:
        net = _download(name, size)
        spec = {"name": name, "timm": name, "image_size": net.pretrained_cfg["input_size"][-1]}
        width = getattr(net, "head_hidden_size", None) or net.num_features
        backbone = Backbone(net, spec | {"dim": width}, EvalTransform.for_timm(net)).eval()
        return Encoder(name, backbone, backbone.transform, "timm's pretrained weights", named=True)
    try:
        with seeding.seeded(seeding.key(0, "random weights")):
            model = ModelConfig(name=name, drop_path=0.0)
            backbone = build_backbone(model, size or _USUAL_SIZE, student=False).eval()
    except UserError as error:
        raise UserError(f"{name} is no run folder and no file. {error}") from None
    if not random_weights:
        raise UserError(
            f"There are no trained weights called {name}. Name a run folder, or measure an untrained encoder "
            f"with --random-weights."
        )
    transform = EvalTransform.for_timm(backbone.net) if pretrained else EvalTransform.of_size(_USUAL_SIZE)
    return Encoder(name, backbone, transform, "random weights, untrained", named=True)


def _download(name: str, size: int | None) -> Any:
    """A timm model with its weights, from the local cache or the network."""
    defaults = timm.get_pretrained_cfg(name)
    fixed = size is not None and defaults is not None and defaults.fixed_input_size
    # timm interpolates a ViT's positions as it loads them.
    kwargs: dict[str, Any] = {"img_size": size} if fixed else {}
    try:
        with _no_long_wait():
            return timm.create_model(name, pretrained=True, num_classes=0, **kwargs)
    except Exception as error:  # the hub's own errors derive from nothing narrower
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
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
