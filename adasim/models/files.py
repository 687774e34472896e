"""A backbone as a file: safetensors (nothing to unpickle), with four notes in its header.

adasim           the model's description, from which `load_backbone` builds it
pretrained_cfg   how images are resized, cropped and normalised, under timm's names
load             the lines of Python that load the file with timm alone
sha256           of the tensors and the other notes; files of earlier versions have none
"""

from __future__ import annotations

import hashlib
import json
import shlex
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import timm
import torch
from torch import Tensor

from adasim.config import Config
from adasim.models.backbones import Backbone, from_spec
from adasim.models.transforms import EvalTransform
from adasim.util.errors import UserError
from adasim.util.fields import fit
from adasim.util.files import atomic_write

BACKBONE_FILE = "backbone.safetensors"
"""Name of the encoder in a run folder."""

_HEADER, _TRANSFORM, _LOAD, _HASH = "adasim", "pretrained_cfg", "load", "sha256"
_FIELDS = {"name": str, "timm": str, "kwargs": dict, "dim": int, "image_size": int, "channels": int}
# All that a description may pass on to timm: its other arguments could fetch or unpickle weights.
_KWARGS: dict[str, Any] = {
    **dict.fromkeys(("img_size", "patch_size", "in_chans", "num_classes"), int),
    **dict.fromkeys(("embed_dim", "depth", "num_heads", "stem_width"), int),
    **dict.fromkeys(("layers", "channels"), tuple[int, ...]),
    "dynamic_img_size": bool,
    "stem_type": str,
    "stem": Literal["no_pool", "3x3"],
}
_COMPUTED = 1 << 28  # values that a model may compute for itself
_TRANSFORM_FIELDS: dict[str, Any] = {
    "input_size": tuple[int, int, int],
    "mean": tuple[float, float, float],
    "std": tuple[float, float, float],
    "interpolation": Literal["bilinear", "bicubic"],
    "crop_pct": float,
}


def save_backbone(path: str | Path, backbone: Backbone, transform: EvalTransform | None = None) -> None:
    """Write the encoder's weights, description and transform (its own by default), whole or not at all."""
    atomic_write(Path(path), backbone_bytes(backbone, transform))


def backbone_bytes(backbone: Backbone, transform: EvalTransform | None = None) -> bytes:
    """The content of the file that `save_backbone` writes: equal encoders have equal files."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in backbone.net.state_dict().items()}
    header = {
        "format": "pt",
        _HEADER: json.dumps(backbone.spec),
        _TRANSFORM: json.dumps((transform or backbone.transform).to_timm()),
        _LOAD: _lines(backbone.spec),
    }
    header[_HASH] = _content_hash(header, tensors)
    return _in_order(safetensors.torch.save(tensors, header))


def _content_hash(notes: dict[str, str], tensors: Mapping[str, Tensor]) -> str:
    others = {name: note for name, note in notes.items() if name != _HASH}
    return hash_tensors(tensors, json.dumps(others, sort_keys=True))


def hash_tensors(tensors: Mapping[str, Tensor], about: str = "") -> str:
    """SHA-256 over `about`, then name, type, shape and values of each tensor, in the order of their names."""
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(as_bytes(tensor))
    return digest.hexdigest()


def as_bytes(tensor: Tensor) -> memoryview:
    """A tensor's values, for a hash."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _in_order(data: bytes) -> bytes:
    """The same safetensors file with a sorted header, so that equal encoders are equal files.

    safetensors writes the entries of `__metadata__` in an order that changes from process to process.
    """
    header = json.dumps(_header(data), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the tensors behind it stay aligned
    tensors = memoryview(data)[8 + int.from_bytes(data[:8], "little") :]
    return b"".join([len(header).to_bytes(8, "little"), header, tensors])


def _header(data: bytes) -> dict[str, Any]:
    """The header of a safetensors file."""
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def load_backbone(path: str | Path) -> Backbone:
    """Load an encoder written by a run, in evaluation mode.

    Args:
        path: a run folder, or a .safetensors file written by `save_backbone`.

    >>> encoder = load_backbone("runs/demo")                    # doctest: +SKIP
    >>> image = encoder.transform(Image.open("photo.jpg"))      # doctest: +SKIP
    >>> encoder(image[None])                                    # doctest: +SKIP
    """
    path = Path(path)
    if path.is_dir():
        path = path / BACKBONE_FILE
    backbone, transform = read_backbone(path)
    if transform is None:
        warnings.warn(
            f"{path} was written before encoders kept their normalisation; encoder.transform is ImageNet's. If the "
            f"run had other --views.mean and --views.std, set encoder.transform to EvalTransform.for_run(config).",
            stacklevel=2,
        )
    return backbone


def is_ours(path: Path) -> bool:
    """Whether `save_backbone` wrote this file; what lies in its place in a run is meant to be one."""
    if not path.is_file() or _run_of(path) is not None:
        return path.is_file()
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return _HEADER in (file.metadata() or {})
    except (safetensors.SafetensorError, OSError):
        return False


def read_backbone(path: Path) -> tuple[Backbone, EvalTransform | None]:
    """The encoder of a file in evaluation mode, and its transform, None where neither file nor run says."""
    if not path.is_file():
        raise UserError(missing(path))
    data = path.read_bytes()  # in one go: a run may replace the file at any moment
    try:
        tensors = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}). {again(path)}") from error
    notes = _header(data).get("__metadata__", {})
    if _HASH in notes and notes[_HASH] != _content_hash(notes, tensors):
        raise UserError(f"{path} is damaged: its SHA-256 differs. {again(path)}")
    if _HEADER not in notes:
        raise UserError(f"{path} does not say which model it holds; it was not written by adasim.")
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    backbone = _built(_checked(notes[_HEADER], path), found, path)
    backbone.net.load_state_dict(tensors)
    if _TRANSFORM in notes:
        transform: EvalTransform | None = checked_transform(parsed(notes[_TRANSFORM]), path)
    else:
        transform = _transform_of_run(path.parent)
    backbone.transform = transform or backbone.transform
    return backbone.eval(), transform


def missing(path: Path) -> str:
    """What to do where there is no encoder at `path`, which may be its place in a run."""
    run = _run_of(path)
    if run is None:
        return f"No backbone at {path}. Give a run folder that holds {BACKBONE_FILE}, or that file."
    if any((run / "checkpoints").glob("step-*")):  # a run writes its encoder before each checkpoint
        return f"{run} has lost its {BACKBONE_FILE}. {again(path)}"
    return f"{run} has no {BACKBONE_FILE} yet. Let the run save once."


def again(path: Path) -> str:
    """How to get a damaged file again."""
    run = _run_of(path)
    if run is None:
        return "Copy or export it again."
    return f"To write it again from the newest checkpoint: adasim pretrain --resume {shlex.quote(str(run))}"


def _run_of(path: Path) -> Path | None:
    """The run whose encoder belongs at this path."""
    run = path.parent
    there = (run / "config.json").is_file() and (run / "checkpoints").is_dir()
    return run if there and path.name == BACKBONE_FILE else None


def _built(spec: dict[str, Any], found: dict[str, list[int]], path: Path) -> Backbone:
    """The model of `spec` with fresh weights, if the tensors of the file, by name and shape, are its own.

    The description may be damaged or made up, so a model without storage is compared before memory is taken.
    """
    kwargs = spec["kwargs"]
    blocks = max(kwargs.get("depth", 0), sum(kwargs.get("layers", ())), len(kwargs.get("channels", ())))
    if blocks > len(found):
        raise UserError(
            f"{path} does not fit its own description: {spec['name']} of {blocks} blocks has more than the "
            f"file's {len(found)} tensors. {again(path)}"
        )
    try:
        with torch.device("meta"):
            bare = from_spec(spec).net
    except Exception as error:  # timm meets any values here, and raises nearly anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"{path} describes a model that cannot be built ({reason}). {again(path)}") from None
    expected = {name: list(tensor.shape) for name, tensor in bare.state_dict().items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise UserError(
                f"{path} does not fit its own description: {name} has shape {found.get(name, 'none')}, "
                f"{spec['name']} needs {expected.get(name, 'none')}. {again(path)}"
            )
    # The file lacks what can be computed: index tables.
    made = sum(buffer.numel() for buffer in bare.buffers())
    if made > _COMPUTED:
        raise UserError(
            f"{path} describes a model that would take {made:,} values beside its weights. {again(path)}"
        )
    return from_spec(spec)


def _checked(header: str, path: Path) -> dict[str, Any]:
    """The description in a file's header, refused unless it is one that `save_backbone` can have written."""
    spec = parsed(header)
    if isinstance(spec, dict) and isinstance(spec.get("kwargs"), dict) and "stem" in spec:
        stem = spec.pop("stem")  # where earlier files have it; their word for none is "timm"
        spec["kwargs"] |= {} if stem == "timm" else {"stem": stem}
    if not isinstance(spec, dict) or set(spec) != set(_FIELDS):
        raise UserError(f"{path} has a damaged description of its model. {again(path)}")
    _check_types(spec, _FIELDS, path)
    name, kwargs = spec["timm"], spec["kwargs"]
    extra = sorted(set(kwargs) - set(_KWARGS))
    if extra:
        raise UserError(f"{path} passes {extra[0]!r} to timm, which adasim never writes. {again(path)}")
    _check_types(kwargs, _KWARGS, path)
    if ":" in name or not timm.is_model(name.split(".")[0]):
        raise UserError(
            f"{path} names the model {name!r}, which this timm ({timm.__version__}) does not have."
        )
    if "stem" in kwargs and "resnet" not in name:
        raise UserError(f"{path} has a stem {kwargs['stem']!r} that {name} cannot have. {again(path)}")
    return spec


def checked_transform(values: Any, path: Path) -> EvalTransform:
    """The transform that a file gives under timm's names, refused if it is none."""
    optional = {"crop_mode": Literal["squash"]}
    if not isinstance(values, dict) or set(values) - set(optional) != set(_TRANSFORM_FIELDS):
        raise UserError(f"{path} has a damaged description of its normalisation. {again(path)}")
    _check_types(values, _TRANSFORM_FIELDS | optional, path)
    if not (
        0 < values["crop_pct"] <= 1 and min(values["std"]) > 0 and 0 < values["input_size"][-1] < 1 << 16
    ):
        raise UserError(f"{path} has an impossible normalisation: {values}. {again(path)}")
    return EvalTransform.from_timm(values)


def _transform_of_run(folder: Path) -> EvalTransform | None:
    """For files of earlier versions: what the configuration beside the file says, if it is a run's."""
    try:
        return EvalTransform.for_run(Config.from_dict(json.loads((folder / "config.json").read_bytes())))
    except (OSError, ValueError, RecursionError, TypeError, AttributeError, UserError):
        return None


def _check_types(values: dict[str, Any], annotations: dict[str, Any], path: Path) -> None:
    for name, value in values.items():
        try:
            fit(name, value, annotations[name])
        except UserError as error:
            raise UserError(f"{path} has a damaged description: {error} {again(path)}") from None


def parsed(text: str | bytes) -> Any:
    """JSON that somebody wrote; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _lines(spec: dict[str, Any]) -> str:
    """How the file loads without adasim."""
    kwargs = dict(spec["kwargs"])
    stem = kwargs.pop("stem", None)
    lines = [
        "import safetensors.torch, timm, torch",
        f"net = timm.create_model({spec['timm']!r}, **{kwargs!r})",
    ]
    if stem is not None:
        lines.append("net.maxpool = torch.nn.Identity()")
    if stem == "3x3":
        channels = kwargs.get("in_chans", 3)
        lines.append(f"net.conv1 = torch.nn.Conv2d({channels}, net.bn1.num_features, 3, 1, 1, bias=False)")
    lines.append(f"net.load_state_dict(safetensors.torch.load_file({BACKBONE_FILE!r}))")
    return "\n".join(lines)
