"""What is measured: the encoder of a run or of weights that others trained, with the view that it expects."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import timm

from adasim.config import ModelConfig
from adasim.eval.features import default_folder, require_size, weights_hash
from adasim.eval.results import COMPARED, RESULTS_FILE, read_results
from adasim.models import (
    BACKBONE_FILE,
    PIXELS,
    Backbone,
    EvalTransform,
    build_backbone,
    build_from,
    load_backbone,
    parse_source,
    pixels,
    read_weights,
)
from adasim.models.io import is_ours, snapshot_epoch
from adasim.models.published import WEIGHTS_FILES
from adasim.runs.folder import check_source
from adasim.util import seeding
from adasim.util.errors import UserError

_USUAL_SIZE = 224  # of a model that is known by its name alone


@dataclass
class Encoder:
    """An encoder to measure, and where it comes from."""

    name: str
    backbone: Backbone
    transform: EvalTransform  # before the encoder sees an image: its own, unless another size was asked for
    origin: str  # in words, where the weights come from
    run: Path | None = None  # the folder where features and results are saved
    source: str | None = None  # the data that the run was pretrained on
    method: str | None = None  # by which the run was pretrained
    epoch: int | None = None  # of the run, where this is a snapshot
    named: bool = False  # known by a model's name
    usual_size: int = 0  # side in pixels of what it sees where nobody asks for another
    resized: bool = False  # whether somebody asked for another
    note: str | None = None  # a sentence on what had to be assumed, or speaks against this encoder

    def __post_init__(self) -> None:
        self.usual_size = self.usual_size or self.transform.size

    @property
    def features_folder(self) -> Path:
        return default_folder() if self.run is None else self.run / "features"

    @property
    def results_file(self) -> Path | None:
        return None if self.run is None else self.run / RESULTS_FILE

    def own_source(self) -> str | None:
        """The images that the run was trained on, if this is a run; refuses if they are not found from here."""
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
        model: what `adasim.models.weights` lists, or an encoder that is loaded already.
        random_weights: measure an untrained model of that name.
        size: side in pixels of what the encoder sees, instead of its own.
        named_size: the same for a model that is known by its name, where `size` does not say.
    """
    if not isinstance(model, str | Path | Backbone):
        raise UserError(
            f"{type(model).__name__} is no encoder. Give a run folder, a timm model name, a file as NAME:FILE, or "
            f"what adasim.load_backbone returns."
        )
    name, path = ("", None) if isinstance(model, Backbone) else parse_source(str(model))
    if random_weights and (path or not name):
        raise UserError(
            f"--random-weights is for a model's name; {path or 'this one'} has weights of its own."
        )
    size = size or (named_size if name else None)
    if isinstance(model, Backbone):
        encoder = Encoder(str(model.spec["name"]), model, model.transform, "an encoder in memory")
    elif random_weights:
        encoder = _untrained(name, size)
    elif name == PIXELS:
        encoder = Encoder(PIXELS, pixels(size), pixels().transform, "no encoder", named=True)
    elif path is not None and is_ours(path / BACKBONE_FILE if path.is_dir() else path):
        encoder = _from_ours(path)
    else:
        encoder = _from_weights(str(model), name, path, size)
    if name:
        encoder.usual_size = named_size or encoder.usual_size
    encoder.resized = size is not None
    if size is not None:
        require_size(encoder.backbone, size)
        if size != encoder.transform.size:
            encoder.transform = encoder.transform.at(size)
    return encoder


def _from_ours(path: Path) -> Encoder:
    """The encoder of a run, or of a file that a run wrote."""
    backbone, epoch = load_backbone(path), snapshot_epoch(path)
    run = path if path.is_dir() else path.parent
    if epoch is not None:
        run = path.absolute().parent.parent
    elif not ((path.is_dir() or path.name == BACKBONE_FILE) and (run / "config.json").is_file()):
        # Another file in a run folder, such as a copy of an earlier epoch, has figures of its own.
        return Encoder(path.stem, backbone, backbone.transform, "a file without its run")
    try:  # as JSON: a method or a policy of a plug-in need not be loaded
        config = json.loads((run / "config.json").read_bytes())
        method, pairs, source = config["method"], config["pairs"], config["data"]["source"]
        assert isinstance(source, str)
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        raise UserError(
            f"{run / 'config.json'} is damaged. Restore it, or name the weights' file elsewhere."
        ) from None
    return Encoder(
        name=run.resolve().name + (f"-{path.stem}" if epoch else ""),
        backbone=backbone,
        transform=backbone.transform,
        origin=f"{method}, {pairs} pairs",
        run=run,
        source=source,
        method=method,
        note=_warning(run, weights_hash(backbone)),
        epoch=epoch,
    )


def _warning(run: Path, weights: str) -> str | None:
    """A sentence if the table at the run's end had these very weights below raw pixels."""
    for result in read_results(run) if (run / RESULTS_FILE).is_file() else ():
        raw = result.metrics.get(COMPARED, {}).get("raw pixels", 0.0)
        if result.protocol == "knn" and result.value < raw and result.model.get("weights") == weights:
            return (
                f"The table at the end of {run} had this encoder at {result.value:.1f}%, below raw pixels "
                f"({raw:.1f}%): other weights, or `{PIXELS}` as MODEL, will serve you better."
            )
    return None


def _from_weights(model: str, name: str, path: Path | None, size: int | None) -> Encoder:
    """The encoder of weights that others trained or wrote."""
    weights = read_weights(model)
    backbone = build_from(weights, model, size)
    note = None
    if weights.transform is None:
        note = (
            f"{model} does not say how its images were normalised: ImageNet's mean and std and "
            f"{backbone.transform.size} pixels are assumed (--size changes the latter)."
        )
    if path is None:
        label, origin = name.rpartition("/")[2], "pretrained weights"
    else:
        named = path.absolute().parent if path.name in WEIGHTS_FILES else path.absolute()
        label, origin = named.stem if named.is_file() else named.name, "weights of a file"
    return Encoder(label, backbone, backbone.transform, origin, named=bool(name), note=note)


def _untrained(name: str, size: int | None) -> Encoder:
    try:
        with seeding.seeded(seeding.key(0, "random weights")):
            model = ModelConfig(name=name, drop_path=0.0)
            backbone = build_backbone(model, size or _USUAL_SIZE, student=False).eval()
    except UserError as error:
        raise UserError(f"{name} is no run folder and no file. {error}") from None
    pretrained = timm.is_model_pretrained(name)
    transform = EvalTransform.for_timm(backbone.net) if pretrained else EvalTransform.of_size(_USUAL_SIZE)
    return Encoder(name, backbone, transform, "random weights, untrained", named=True)
