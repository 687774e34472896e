"""A backbone as a file: safetensors (nothing to unpickle) with the model's description in the header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import timm

from adasim.errors import UserError
from adasim.files import atomic_write
from adasim.models.backbones import Backbone, from_spec

BACKBONE_FILE = "backbone.safetensors"
"""Name of the encoder in a run folder."""

_HEADER = "adasim"
# All that a description may pass on to timm: its other arguments could fetch or unpickle weights.
_KWARGS = {
    *("img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads"),
    *("dynamic_img_size", "layers", "channels", "stem_type", "stem_width"),
}
_FIELDS = {"name", "timm", "kwargs", "stem", "dim", "image_size", "channels"}


def save_backbone(path: str | Path, backbone: Backbone) -> None:
    """Write the encoder's weights, with `spec` as JSON in the header, whole or not at all."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in backbone.net.state_dict().items()}
    header = {"format": "pt", _HEADER: json.dumps(backbone.spec)}
    atomic_write(Path(path), _in_order(safetensors.torch.save(tensors, header)))


def _in_order(data: bytes) -> bytes:
    """The same safetensors file with a sorted header, so that equal encoders are equal files.

    safetensors writes the entries of `__metadata__` in an order that changes from process to process.
    """
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the tensors behind it stay aligned
    return b"".join([len(header).to_bytes(8, "little"), header, memoryview(data)[8 + size :]])


def load_backbone(path: str | Path) -> Backbone:
    """Load an encoder written by a run, in evaluation mode.

    Args:
        path: a run folder, or a .safetensors file written by `save_backbone`.

    >>> backbone = load_backbone("runs/demo")  # doctest: +SKIP
    >>> backbone(images).shape  # (B, D)       # doctest: +SKIP
    """
    path = Path(path)
    if path.is_dir():
        path = path / BACKBONE_FILE
    if not path.is_file():
        raise UserError(f"No backbone at {path}. Give a run folder that holds {BACKBONE_FILE}, or that file.")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(_HEADER)
            if header is None:
                raise UserError(f"{path} does not say which model it holds; it was not written by adasim.")
            backbone = from_spec(_checked(header, path))
            expected = {name: list(tensor.shape) for name, tensor in backbone.net.state_dict().items()}
            found = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            for name in sorted(expected.keys() | found.keys()):
                if expected.get(name) != found.get(name):
                    raise UserError(
                        f"{path} does not fit its own description: {name} has shape "
                        f"{found.get(name, 'none')}, {backbone.spec['name']} needs "
                        f"{expected.get(name, 'none')}. Export it again."
                    )
            backbone.net.load_state_dict({name: file.get_tensor(name) for name in found})
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}). Export it again.") from error
    return backbone.eval()


def _checked(header: str, path: Path) -> dict[str, Any]:
    """The description in a file's header, refused unless it is one that `save_backbone` can have written."""
    try:
        spec = json.loads(header)
    except ValueError:
        spec = None
    if not isinstance(spec, dict) or set(spec) != _FIELDS or not isinstance(spec["kwargs"], dict):
        raise UserError(f"{path} has a damaged description of its model. Export it again.")
    if spec["stem"] not in ("timm", "no_pool", "3x3") or (
        spec["stem"] != "timm" and "resnet" not in spec["timm"]
    ):
        raise UserError(
            f"{path} has a stem {spec['stem']!r} that {spec['timm']} cannot have. Export it again."
        )
    name, extra = str(spec["timm"]), sorted(set(spec["kwargs"]) - _KWARGS)
    if ":" in name or not timm.is_model(name.split(".")[0]):
        raise UserError(
            f"{path} names the model {name!r}, which this timm ({timm.__version__}) does not have."
        )
    if extra:
        raise UserError(f"{path} passes {extra[0]!r} to timm, which adasim never writes. Export it again.")
    return spec
