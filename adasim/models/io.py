"""Our file of an encoder: safetensors (nothing to unpickle), with four notes in its header.

adasim           the model's description, from which `load_backbone` builds it
pretrained_cfg   how images are resized, cropped and normalised, under timm's names
load             the lines of Python that load the file with timm alone
sha256           of the tensors and the other notes
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import safetensors
import safetensors.torch
import timm
import torch
from torch import Tensor

from adasim.models.backbone import Backbone, from_spec, is_timm
from adasim.models.transform import EvalTransform
from adasim.util.errors import UserError
from adasim.util.files import atomic_write

BACKBONE_FILE = "backbone.safetensors"
"""Name of the encoder in a run folder."""
SNAPSHOTS = "encoders"
"""Folder of a run with its encoders of earlier epochs."""

_SPEC, _TRANSFORM, _LOAD, _HASH = "adasim", "pretrained_cfg", "load", "sha256"
# All that a description may pass on to timm: its other arguments could fetch or unpickle weights.
_ARGUMENTS = {
    *("img_size", "dynamic_img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads"),
    *("layers", "channels", "stem_type", "stem_width", "stem"),
}  # fmt: skip


def save_backbone(path: str | Path, backbone: Backbone, transform: EvalTransform | None = None) -> None:
    """Write the encoder's weights, description and transform (its own by default), whole or not at all."""
    atomic_write(Path(path), backbone_bytes(backbone, transform))


def backbone_bytes(backbone: Backbone, transform: EvalTransform | None = None) -> bytes:
    """The content of the file that `save_backbone` writes: equal encoders have equal files."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in backbone.net.state_dict().items()}
    notes = {
        "format": "pt",
        _SPEC: json.dumps(backbone.spec),
        _TRANSFORM: json.dumps((transform or backbone.transform).to_timm()),
        _LOAD: _lines(backbone.spec),
    }
    notes[_HASH] = _content_hash(notes, tensors)
    return _in_order(safetensors.torch.save(tensors, notes))


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
    if not path.is_file():
        raise UserError(missing(path))
    data = path.read_bytes()  # in one go: a run may replace the file at any moment
    try:
        tensors = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}). {again(path)}") from error
    notes = _header(data).get("__metadata__", {})
    if not notes.keys() & {_SPEC, _HASH}:
        raise UserError(f"{path} does not say which model it holds; it was not written by adasim.")
    if notes.get(_HASH) != _content_hash(notes, tensors):
        raise UserError(f"{path} is damaged: its SHA-256 differs. {again(path)}")

    spec = json.loads(notes[_SPEC])
    if surplus := sorted(spec["kwargs"].keys() - _ARGUMENTS):
        raise UserError(f"{path} passes {surplus[0]!r} to timm, which adasim never writes.")
    if not is_timm(spec["timm"]):
        raise UserError(
            f"{path} holds a {spec['timm']!r}, which this timm ({timm.__version__}) does not have."
        )
    try:
        backbone = from_spec(spec)
        backbone.net.load_state_dict(tensors)
    except (RuntimeError, TypeError) as error:
        reason = shorten(str(error), 200)
        raise UserError(
            f"{path} does not fit {spec['timm']} of this timm ({timm.__version__}): {reason}"
        ) from error
    backbone.transform = EvalTransform.from_timm(json.loads(notes[_TRANSFORM]))
    return backbone.eval()


def snapshot_file(run: Path, epoch: int) -> Path:
    """Where a run keeps its encoder as of the end of an epoch, counted from 1."""
    return run / SNAPSHOTS / f"epoch-{epoch:04d}.safetensors"


def snapshot_epoch(path: Path) -> int | None:
    """The epoch of a run's snapshot, by its name and place; None of any other file."""
    named = re.fullmatch(r"epoch-([0-9]{4,})\.safetensors", path.name)
    folder = path.absolute().parent
    in_run = folder.name == SNAPSHOTS and (folder.parent / "config.json").is_file()
    return int(named[1]) if named and in_run else None


def snapshots(run: Path) -> dict[int, Path]:
    """The snapshots of a run by their epochs, ascending."""
    found = ((snapshot_epoch(path), path) for path in (run / SNAPSHOTS).glob("*"))
    return dict(sorted((epoch, path) for epoch, path in found if epoch is not None))


def is_ours(path: Path) -> bool:
    """Whether `save_backbone` wrote this file; what lies in its place in a run is meant to be one."""
    if not path.is_file() or _run_of(path) is not None:
        return path.is_file()
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return _SPEC in (file.metadata() or {})
    except (safetensors.SafetensorError, OSError):
        return False


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
