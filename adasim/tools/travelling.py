"""Small Python files that travel with an exported encoder and need no adasim: its transform, and its changed stem.

timm has no argument for the stem of ResNets for small images (`adasim.models.backbones`). A file that makes such a
net known to timm goes along, or one for Hugging Face's transformers, which calls that "remote code".
"""

from __future__ import annotations

from pprint import pformat
from typing import Any

from adasim.models.transforms import EvalTransform

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
    """What `adasim.models.backbones.edit_stem` does, as lines of code."""
    lines = ["net.maxpool = torch.nn.Identity()"]
    if stem == "3x3":
        channels = arguments.get("in_chans", 3)
        lines.append(f"net.conv1 = torch.nn.Conv2d({channels}, net.bn1.num_features, 3, 1, 1, bias=False)")
    return "\n".join(indent + line for line in lines)
