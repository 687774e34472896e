"""The model card of an exported encoder: what it is, what it was trained on, how well it does, how to load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adasim import __version__
from adasim.eval.encoder import Encoder
from adasim.eval.features import weights_hash
from adasim.eval.results import NAMES, column_order, read_results
from adasim.eval.splits import data_name
from adasim.models import parse_source
from adasim.runs.metrics import read_metrics
from adasim.tools.formats import Subject
from adasim.util.errors import UserError
from adasim.util.terminal import printable

_METHODS = {"dino": "DINO", "simsiam": "SimSiam"}
_PAIRS = {
    "adasim": "AdaSim pairs: the second view is of an image drawn from the neighbours found so far",
    "standard": "standard pairs: both views are of one image",
    "nearest": "nearest-neighbour pairs: the second view is of the most similar other image",
    "oracle": "pairs of one class, by labels",
}
_LIBRARIES = {"timm": "timm", "hf": "transformers", "onnx": "onnx", "pt2": "pytorch"}


def model_card(encoder: Encoder, subject: Subject, to: str) -> str:
    """README.md, as Markdown with the header that model hubs read."""
    parts = [
        _header(to),
        f"# {printable(encoder.name)}\n\nAn image encoder: {subject.transform.size} x {subject.transform.size} "
        f"pixels in, a feature of {subject.dim} numbers out. The network is {_network(subject)}. Written by "
        f"`adasim export` of version {__version__}.",
        f"## Training\n\n{_training(encoder)}",
        f"## Figures\n\n{_figures(encoder)}",
        f"## Loading it\n\n{_loading(subject, to)}",
        f"## What is done to an image\n\n{_transform(subject, to)}",
    ]
    return "\n\n".join(parts) + "\n"


def _header(to: str) -> str:
    lines = [f"library_name: {_LIBRARIES[to]}", "pipeline_tag: image-feature-extraction"]
    return "\n".join(["---", *lines, "tags: [self-supervised, adasim]", "---"])


def _network(subject: Subject) -> str:
    stems = {
        "no_pool": ", without the max-pooling of its stem",
        "3x3": ", with a 3x3 convolution of stride 1 as its stem and no max-pooling",
    }
    own = subject.architecture
    name = f"timm's `{own}`" if subject.name == own else f"`{subject.name}`, built from timm's `{own}`"
    return name + stems.get(subject.stem or "", "")


def _beginning(init: str) -> list[str]:
    """A sentence on the weights that the run began with, by name and not by path."""
    if not init:
        return []
    name, path = parse_source(init)
    words = ":".join(part for part in (name, "" if path is None else path.name) if part)
    return [
        f"It began with the weights of `{printable(words)}`, which somebody has trained on other images, perhaps "
        f"with labels. Their licence holds for these weights, too."
    ]


def _training(encoder: Encoder) -> str:
    run = encoder.run
    config = {} if run is None else _json(run / "config.json")
    if run is None or not config:
        return f"Where the weights come from: {encoder.origin}. No run folder was at hand that says more."
    method, pairs, epochs = str(config["method"]), str(config["pairs"]), config["epochs"]
    data = config["data"]["source"]
    count = _count(_json(run / "data.json"))
    images = f"{count:,} images" if count else "images"
    blind = "" if pairs == "oracle" else "without looking at labels, "
    sentences = [
        f"Trained on {images} of `{printable(data_name(data))}` {blind}by "
        f"{_METHODS.get(method, method)} ({config.get('recipe', 'custom')} recipe) with "
        f"{_PAIRS.get(pairs, f'{pairs} pairs')}.",
        *_beginning(str(config["model"].get("init", ""))),
        _progress(run, int(epochs)),
        f"Batches of {config['batch_size']} images, views of {config['views']['size']} pixels, "
        f"{config['optim']['name']} with a peak learning rate of {config['optim']['lr']:g} per 256 images, "
        f"random seed {config['seed']}.",
    ]
    if pairs in ("adasim", "nearest"):
        neighbours = config["neighbors"]
        sentences.append(
            f"Neighbours: a window of {neighbours['window']} epochs, support K = {neighbours['k']}, temperature "
            f"{neighbours['tau']:g} (AdaSim, ICCV 2023, arXiv 2303.13606)."
        )
    versions = _json(run / "versions.json")
    if versions.get("torch"):
        sentences.append(f"Made with torch {versions['torch']} and timm {versions.get('timm')}.")
    return " ".join(sentences)


def _progress(run: Path, epochs: int) -> str:
    done = [line["epoch"] + 1 for line in read_metrics(run) if "epoch_loss" in line]
    if not done:
        return f"The run is planned for {epochs} epochs; none is complete yet in its metrics."
    return (
        f"{epochs} epochs."
        if done[-1] >= epochs
        else f"{done[-1]} of the {epochs} planned epochs are complete."
    )


def _figures(encoder: Encoder) -> str:
    """The newest figure of each kind, of these very weights alone."""
    try:
        results = read_results(encoder.run) if encoder.run is not None else []
    except UserError:  # nothing was measured yet
        results = []
    weights = weights_hash(encoder.backbone)
    mine = [result for result in results if result.model.get("weights") == weights]
    newest = {result.column: result for result in mine}
    older = len(results) - len(mine)
    lines = [
        f"- {NAMES.get(result.protocol, result.protocol)}{f' ({result.setting})' if result.setting else ''} on "
        f"{printable(result.data['name'])}: {result.value:.2f}"
        for result in sorted(newest.values(), key=lambda result: column_order(result.protocol))
    ]
    if not lines:
        text = "Nothing was measured of these weights yet; `adasim eval` does."
    else:
        text = "Accuracies and IoU in percent, measured by `adasim eval`:\n\n" + "\n".join(lines)
    if older:
        text += f"\n\nFigures of the run that are of other weights, and left out here: {older}."
    return text


def _loading(subject: Subject, to: str) -> str:
    call, note = _lines(subject, to)
    code = f"```python\nfrom transform import transform\n\n{call}\n```"
    return f"In this folder, for one photo:\n\n{code}" + (f"\n\n{note}" if note else "")


def _lines(subject: Subject, to: str) -> tuple[str, str]:
    """Python that computes one photo's features, and a sentence about it."""
    pixels = 'pixels = transform("photo.jpg")[None]  # (1, 3, size, size)'
    if to == "timm":
        if subject.stem is None:
            arguments = "".join(f", {name}={value!r}" for name, value in subject.arguments.items())
            create = (
                f'timm.create_model("{subject.architecture}", checkpoint_path="model.safetensors", '
                f"num_classes=0{arguments})"
            )
            note = (
                "Or all at once, arguments included, with timm 1.0.29 or newer: "
                '`timm.create_model("local-dir:FOLDER", pretrained=True)`.'
            )
            return f"import timm\n\n{pixels}\nnet = {create}\nfeatures = net.eval()(pixels)", note
        create = f'timm.create_model("{subject.timm_name}", checkpoint_path="model.safetensors")'
        note = "timm has no argument for this stem, so `adasim_model.py` makes the network known to it."
        return (
            f"import timm\nimport adasim_model\n\n{pixels}\nnet = {create}\nfeatures = net.eval()(pixels)",
            note,
        )
    if to == "hf":
        remote = "" if subject.stem is None else ", trust_remote_code=True"
        note = (
            "`AutoImageProcessor.from_pretrained` loads the transform, too."
            if subject.stem is None
            else "This stem cannot be expressed without code of its own, which stands in `modeling_adasim.py`."
        )
        load = f'net = AutoModel.from_pretrained("."{remote}).eval()'
        run = "features = net(pixel_values=pixels).pooler_output"
        return f"from transformers import AutoModel\n\n{pixels}\n{load}\n{run}", note
    if to == "onnx":
        lines = 'session = onnxruntime.InferenceSession("model.onnx")'
        run = 'features = session.run(["features"], {"pixels": pixels.numpy()})[0]'
        return f"import onnxruntime\n\n{pixels}\n{lines}\n{run}", "Any number of images may be in a batch."
    lines = 'net = torch.export.load("model.pt2").module()\nfeatures = net(pixels)'
    return f"import torch\n\n{pixels}\n{lines}", "Any number of images may be in a batch."


def _transform(subject: Subject, to: str) -> str:
    own = subject.transform
    where = {
        "timm": "in `config.json` under `pretrained_cfg`",
        "hf": "in `config.json` under `pretrained_cfg`",
        "onnx": "in the file's metadata under `pretrained_cfg`",
        "pt2": "in the file's extra file `pretrained_cfg.json`",
    }[to]
    named = own.to_timm()
    sides = "both sides are" if own.squash else "the shorter side is"
    resized = f"{sides} resized to {own.resize} pixels ({own.interpolation}, antialiased), the centre of "
    text = (
        f"Upright RGB; {resized}{own.size} x {own.size} is cut out, values are divided by 255, less the mean "
        f"{_numbers(named['mean'])}, divided by {_numbers(named['std'])}. `transform.py` does it; the same numbers "
        f"stand {where}."
    )
    if to in ("timm", "hf"):
        text += (
            " The library's own version of it resizes with PIL, which rounds a few pixels in a thousand to the "
            "neighbouring 8-bit level: features then differ in the third or fourth decimal."
        )
    return text


def _numbers(values: list[float]) -> str:
    return "(" + ", ".join(f"{value:g}" for value in values) + ")"


def _count(facts: dict[str, Any]) -> int:
    """How many images a run's record is of; 0 where it does not say. Records before 0.3 tell of files alone."""
    count, times = facts.get("images"), facts.get("times")
    return count if isinstance(count, int) else len(times) if isinstance(times, list) else 0


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
