"""What goes along with an exported encoder: its model card, and small Python files that need no adasim.

The card says what the encoder is, what it was trained on, how well it does, and how to load it. The Python files are
its transform, and its changed stem, if it has one: timm has no argument for the stem of ResNets for small images
(`adasim.models.backbone`), so that a file makes such a net known to timm, or to Hugging Face's transformers, which
calls that "remote code".
"""

from __future__ import annotations

import json
from pathlib import Path
from pprint import pformat
from typing import TYPE_CHECKING, Any

from adasim import __version__
from adasim.eval.encoder import Encoder
from adasim.eval.features import weights_hash
from adasim.eval.results import COMPARED, NAMES, Result, column_order, read_results
from adasim.eval.splits import data_name
from adasim.models import parse_source
from adasim.models.transform import EvalTransform
from adasim.runs.metrics import read_metrics
from adasim.util.errors import UserError
from adasim.util.terminal import printable

if TYPE_CHECKING:
    from adasim.tools.export import Subject

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
        f"---\nlibrary_name: {_LIBRARIES[to]}\npipeline_tag: image-feature-extraction\n"
        f"tags: [self-supervised, adasim]\n---",
        f"# {printable(encoder.name)}\n\nAn image encoder: {subject.transform.size} x {subject.transform.size} "
        f"pixels in, a feature of {subject.dim} numbers out. The network is {_network(subject)}. Written by "
        f"`adasim export` of version {__version__}.",
        f"## Training\n\n{_training(encoder)}",
        f"## Figures\n\n{_figures(encoder)}",
        f"## Loading it\n\n{_loading(subject, to)}",
        f"## What is done to an image\n\n{_transform(subject, to)}",
    ]
    return "\n\n".join(parts) + "\n"


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
    count = _json(run / "data.json").get("images")
    images = f"{count:,} images" if isinstance(count, int) else "images"
    blind = "" if pairs == "oracle" else "without looking at labels, "
    sentences = [
        f"Trained on {images} of `{printable(data_name(data))}` {blind}by "
        f"{_METHODS.get(method, method)} ({config.get('recipe', 'custom')} recipe) with "
        f"{_PAIRS.get(pairs, f'{pairs} pairs')}.",
        *_beginning(str(config["model"].get("init", ""))),
        _progress(run, int(epochs)) if encoder.epoch is None else f"As of epoch {encoder.epoch} of {epochs}.",
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
        f"{printable(result.data['name'])}: {result.value:.2f}{_beside(result)}"
        for result in sorted(newest.values(), key=lambda result: column_order(result.protocol))
    ]
    if not lines:
        text = "Nothing was measured of these weights yet; `adasim eval` does."
    else:
        text = "Accuracies and IoU in percent, measured by `adasim eval`:\n\n" + "\n".join(lines)
    if older:
        text += f"\n\nFigures of the run that are of other weights, and left out here: {older}."
    return text


def _beside(result: Result) -> str:
    others = ", ".join(f"{name} {value:.2f}" for name, value in result.metrics.get(COMPARED, {}).items())
    return f" ({others})" if others else ""


def _loading(subject: Subject, to: str) -> str:
    """Python that computes one photo's features, and a sentence about it."""
    own = subject.stem is not None
    note = "Any number of images may be in a batch."
    if to == "timm":
        library = "import timm" + ("\nimport adasim_model" if own else "")
        arguments = "".join(f", {name}={value!r}" for name, value in subject.arguments.items())
        arguments = "" if own else f", num_classes=0{arguments}"
        lines = (
            f'net = timm.create_model("{subject.timm_name}", checkpoint_path="model.safetensors"{arguments})\n'
            f"features = net.eval()(pixels)"
        )
        note = (
            "timm has no argument for this stem, so `adasim_model.py` makes the network known to it."
            if own
            else "Or all at once, arguments included, with timm 1.0.29 or newer: "
            '`timm.create_model("local-dir:FOLDER", pretrained=True)`.'
        )
    elif to == "hf":
        library = "from transformers import AutoModel"
        remote = ", trust_remote_code=True" if own else ""
        lines = (
            f'net = AutoModel.from_pretrained("."{remote}).eval()\n'
            f"features = net(pixel_values=pixels).pooler_output"
        )
        note = (
            "This stem cannot be expressed without code of its own, which stands in `modeling_adasim.py`."
            if own
            else "`AutoImageProcessor.from_pretrained` loads the transform, too."
        )
    elif to == "onnx":
        library = "import onnxruntime"
        lines = (
            'session = onnxruntime.InferenceSession("model.onnx")\n'
            'features = session.run(["features"], {"pixels": pixels.numpy()})[0]'
        )
    else:
        library = "import torch"
        lines = 'net = torch.export.load("model.pt2").module()\nfeatures = net(pixels)'
    pixels = 'pixels = transform("photo.jpg")[None]  # (1, 3, size, size)'
    code = f"```python\nfrom transform import transform\n\n{library}\n\n{pixels}\n{lines}\n```"
    return f"In this folder, for one photo:\n\n{code}\n\n{note}"


def _transform(subject: Subject, to: str) -> str:
    own = subject.transform
    where = {
        "onnx": "in the file's metadata under `pretrained_cfg`",
        "pt2": "in the file's extra file `pretrained_cfg.json`",
    }.get(to, "in `config.json` under `pretrained_cfg`")
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


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# ---- Python files ----

_TRANSFORM = '''\
"""What this encoder expects to be done to an image; needs PIL and torchvision alone.

    from transform import transform
    pixels = transform("photo.jpg")     # float32 ({size}, {size}) in three channels; pixels[None] is a batch of one
"""

import torch
from PIL import Image, ImageOps
from torchvision.transforms.v2 import functional as F

SIZE = {size}  # side of the square that the encoder sees
RESIZE = {resize}  # {resized} before the centre is cut out
MEAN = {mean}
STD = {std}
INTERPOLATION = F.InterpolationMode("{interpolation}")


def transform(image):
    """A file or a PIL image of 8 bits per colour as float32 (3, SIZE, SIZE)."""
    if not isinstance(image, Image.Image):
        image = Image.open(image)
    try:
        image = ImageOps.exif_transpose(image)  # the right way up
    except Exception:  # its EXIF block is damaged: as it lies
        pass
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    pixels = F.pil_to_tensor(image.convert("RGB"))
{target}
    pixels = F.resize(pixels, target, interpolation=INTERPOLATION, antialias=True)
    pixels = F.center_crop(pixels, [SIZE, SIZE])
    return F.normalize(F.to_dtype(pixels, torch.float32, scale=True), MEAN, STD)
'''

_KEEPING_ASPECT = """\
    height, width = pixels.shape[-2:]
    short = min(height, width)
    target = [int(RESIZE * height / short), int(RESIZE * width / short)]"""
_SQUASHED = "    target = [RESIZE, RESIZE]  # whatever the aspect"

_TIMM = '''\
"""Makes this encoder known to timm, which has no argument for its stem. With this folder on Python's path:

    import timm, adasim_model
    net = timm.create_model("{name}", checkpoint_path="model.safetensors")
"""

import timm
import torch

ARGUMENTS = {arguments}


def {name}(pretrained=False, **kwargs):
    """timm's {architecture} with another stem."""
    kwargs = {{k: v for k, v in kwargs.items() if not k.startswith("pretrained_cfg") and k != "cache_dir"}}
    net = timm.create_model("{architecture}", **{{**ARGUMENTS, **kwargs}})
{edit}
    return net
'''
_REGISTERED = """

timm.models.register_model({name})
"""

_HF = '''\
"""This encoder for Hugging Face's transformers: AutoModel.from_pretrained(FOLDER, trust_remote_code=True)."""

import timm
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling


class AdasimConfig(PretrainedConfig):
    """Which timm model, and with which arguments."""

    model_type = "adasim"

    def __init__(self, architecture="{architecture}", model_args=None, **kwargs):
        super().__init__(**kwargs)
        self.architecture = architecture
        self.model_args = model_args or {{}}


class AdasimModel(PreTrainedModel):
    """timm's {architecture} with another stem; `pooler_output` is the feature."""

    config_class = AdasimConfig
    base_model_prefix = "timm_model"
    main_input_name = "pixel_values"

    def __init__(self, config):
        super().__init__(config)
        net = timm.create_model(config.architecture, num_classes=0, **config.model_args)
{edit}
        self.timm_model = net
        self.post_init()

    def _init_weights(self, module):
        """All weights come from the file."""

    def forward(self, pixel_values, **kwargs):
        last = self.timm_model.forward_features(pixel_values)
        return BaseModelOutputWithPooling(
            last_hidden_state=last, pooler_output=self.timm_model.forward_head(last)
        )
'''


def transform_file(transform: EvalTransform) -> str:
    """A transform as Python code that gives the same pixels."""
    named = transform.to_timm()
    return _TRANSFORM.format(
        size=transform.size,
        resize=transform.resize,
        resized="both sides" if transform.squash else "the shorter side",
        target=_SQUASHED if transform.squash else _KEEPING_ASPECT,
        mean=named["mean"],
        std=named["std"],
        interpolation=transform.interpolation,
    )


def timm_file(name: str, architecture: str, arguments: dict[str, Any], stem: str) -> tuple[str, str]:
    """Python code of a function `name` that builds timm's `architecture` of these arguments with another stem; and
    the end of that file, which makes the function known to timm."""
    edit = _edit(stem, arguments, "    ")
    shown = pformat(arguments, width=100, sort_dicts=False)
    code = _TIMM.format(name=name, architecture=architecture, arguments=shown, edit=edit)
    return code, _REGISTERED.format(name=name)


def hf_file(architecture: str, arguments: dict[str, Any], stem: str) -> str:
    """Python code with a class of transformers for the same net."""
    return _HF.format(architecture=architecture, edit=_edit(stem, arguments, "        "))


def _edit(stem: str, arguments: dict[str, Any], indent: str) -> str:
    """What `adasim.models.backbone.edit_stem` does, as lines of code."""
    lines = ["net.maxpool = torch.nn.Identity()"]
    if stem == "3x3":
        channels = arguments.get("in_chans", 3)
        lines.append(f"net.conv1 = torch.nn.Conv2d({channels}, net.bn1.num_features, 3, 1, 1, bias=False)")
    return "\n".join(indent + line for line in lines)
