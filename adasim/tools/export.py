"""`export`: an encoder for other libraries, with its transform and a model card, in a folder of its own.

One function for each format writes its files, and checks that they give the encoder's own features.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from adasim.eval.encoder import Encoder, open_encoder
from adasim.eval.evaluation import Say
from adasim.models import PIXELS, Backbone
from adasim.models.transform import EvalTransform
from adasim.tools.card import hf_file, model_card, timm_file, transform_file
from adasim.tools.outputs import (
    CONFIG_FILE,
    HF_FILE,
    ONNX_FILE,
    PT2_FILE,
    TIMM_FILE,
    TRANSFORM_FILE,
    WEIGHTS_FILE,
    check_export_folder,
    export_folder,
    missing,
)
from adasim.util.errors import UserError, suggest
from adasim.util.files import remove, sync, temporary_name, write_errors

TOLERANCE = 1e-4
"""By how much a feature of an exported encoder may differ, for features of the size 1 and above in proportion."""


def export(
    model: str | Path | Backbone,
    to: str,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    say: Say = lambda sentence: None,
) -> Path:
    """Write an encoder for another library; returns the folder. What was written is loaded and compared first.

    Args:
        model: what the command line calls MODEL (docs/use.md), or an encoder that is loaded.
        to: `timm` (for timm.create_model), `hf` (AutoModel.from_pretrained of transformers), `onnx`, or `pt2`
            (torch.export).
        out: the folder to make; by default beside the run, as runs/photos-onnx.
        overwrite: if `out` is an earlier export, replace it. Anything else is refused.
        say: is called with sentences for a person.

    >>> folder = export("runs/photos", "onnx")           # doctest: +SKIP
    """
    if to not in FORMATS:
        raise UserError(f"Unknown format {to!r}. {suggest(to, FORMATS)}")
    encoder = open_encoder(model)
    if encoder.backbone.spec["name"] == PIXELS:
        raise UserError("pixels are no encoder: there are no weights to export. Name a run, or a model.")
    folder = Path(out) if out is not None else _default_folder(encoder, model, to)
    check_export_folder(folder, overwrite)
    if encoder.note:
        say(encoder.note)
    subject = Subject.of(encoder.backbone, encoder.transform)
    temporary = temporary_name(folder)
    try:
        with write_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            sentence = _write(subject, to, temporary)
            (temporary / "README.md").write_text(model_card(encoder, subject, to), encoding="utf-8")
            for path in (*temporary.iterdir(), temporary):
                sync(path)
            _put_in_place(temporary, folder)
    finally:
        remove(temporary)
    if sentence:
        say(sentence)
    return folder


def _default_folder(encoder: Encoder, model: object, to: str) -> Path:
    """Beside the run or the file; in this folder for a model that is known by its name."""
    if encoder.run is not None:
        folder = export_folder(encoder.run, to)
        return folder if encoder.epoch is None else folder.with_name(f"{encoder.name}-{to}")
    beside = Path(model).parent if isinstance(model, str | Path) and Path(model).exists() else Path()
    return beside / f"{encoder.name}-{to}"


def _put_in_place(new: Path, folder: Path) -> None:
    """Let the finished folder take its name; what stood there goes only then."""
    old = temporary_name(folder)
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(new, folder)
    except OSError:
        if old.exists():
            os.rename(old, folder)
        raise
    sync(folder.parent)
    remove(old)


# ---- what is exported, and how ----


@dataclass(frozen=True)
class Subject:
    """What is exported."""

    net: nn.Module
    """A timm model on the CPU, in evaluation mode."""
    name: str
    architecture: str
    """timm's name."""
    arguments: dict[str, Any]
    """For timm.create_model, without `num_classes`, which is 0."""
    stem: str | None
    """How the stem of a ResNet was changed; None if timm's arguments say everything."""
    transform: EvalTransform
    dim: int

    @classmethod
    def of(cls, backbone: Backbone, transform: EvalTransform) -> Subject:
        spec = backbone.spec
        arguments = dict(spec.get("kwargs", {}))
        arguments.pop("num_classes", None)
        stem = arguments.pop("stem", None)
        net = backbone.net.cpu().eval()
        return cls(net, spec["name"], spec["timm"], arguments, stem, transform, backbone.dim)

    @property
    def timm_name(self) -> str:
        """The name for timm.create_model."""
        if self.stem is None:
            return self.architecture
        return f"adasim_{self.name}" + ("_3x3" if self.stem == "3x3" else "")

    @property
    def metadata(self) -> dict[str, Any]:
        """The transform under timm's names, for a format's metadata."""
        return {"crop_mode": "center"} | self.transform.to_timm()

    def example(self, count: int = 2) -> Tensor:
        """Normalised pixels of no image in particular, always the same."""
        size = self.transform.size
        generator = torch.Generator().manual_seed(0)
        return torch.randn(count, self.arguments.get("in_chans", 3), size, size, generator=generator)


def to_timm(subject: Subject, folder: Path) -> str:
    """A folder for timm.create_model."""
    _write_config(subject, folder, {})
    if subject.stem is None:
        made = timm.create_model(
            subject.architecture,
            checkpoint_path=str(folder / WEIGHTS_FILE),
            num_classes=0,
            **subject.arguments,
        )
        _check(subject, made.eval(), "timm")
        return ""
    code, registered = timm_file(
        subject.timm_name, subject.architecture, subject.arguments | {"num_classes": 0}, subject.stem
    )
    (folder / TIMM_FILE).write_text(code)  # tried out before it has a place in timm
    with _imported(folder / TIMM_FILE) as module:
        net = getattr(module, subject.timm_name)()
        timm.models.load_checkpoint(net, str(folder / WEIGHTS_FILE))
        _check(subject, net.eval(), "timm")
    (folder / TIMM_FILE).write_text(code + registered)
    return (
        f"timm has no argument for the stem of {subject.name}: {TIMM_FILE} makes it known to timm, and is imported "
        f"first (README.md shows how)."
    )


def to_hf(subject: Subject, folder: Path) -> str:
    """A folder for AutoModel.from_pretrained."""
    if subject.stem is None:
        # Read by transformers' TimmWrapperModel and by timm.
        _write_config(subject, folder, {"model_type": "timm_wrapper", "architectures": ["TimmWrapperModel"]})
        if find_spec("transformers") is None:
            return _untried("transformers")
        from transformers import AutoModel

        with _quiet():
            made = AutoModel.from_pretrained(folder).eval()
        _check(subject, lambda pixels: made(pixel_values=pixels).pooler_output, "transformers")
        return ""
    classes = {"AutoConfig": f"{HF_FILE[:-3]}.AdasimConfig", "AutoModel": f"{HF_FILE[:-3]}.AdasimModel"}
    # A model_type of its own: transformers would build timm's stem without a word where it knows the type.
    _write_config(
        subject, folder, {"model_type": "adasim", "architectures": ["AdasimModel"], "auto_map": classes}
    )
    processor = {"image_processor_type": "TimmWrapperImageProcessor", "pretrained_cfg": subject.metadata}
    _write_json(folder / "preprocessor_config.json", processor | {"architecture": subject.architecture})
    (folder / HF_FILE).write_text(hf_file(subject.architecture, subject.arguments, subject.stem))
    sentence = (
        f"transformers cannot express the stem of {subject.name} by itself: {HF_FILE} does, and "
        f"AutoModel.from_pretrained needs trust_remote_code=True."
    )
    if find_spec("transformers") is None:
        return f"{sentence} {_untried('transformers')}"
    # Not by AutoModel: it would copy the file into the user's cache.
    with _imported(folder / HF_FILE) as module, _quiet():
        made = module.AdasimModel.from_pretrained(folder).eval()
        _check(subject, lambda pixels: made(pixel_values=pixels).pooler_output, "transformers")
    return sentence


def to_onnx(subject: Subject, folder: Path) -> str:
    """An ONNX file with any number of images in a batch."""
    for package in ("onnx", "onnxscript"):
        if find_spec(package) is None:
            raise missing(package, "--to onnx", "export")
    example = subject.example()
    with _quiet(), torch.no_grad():
        program: Any = torch.onnx.export(
            subject.net,
            (example,),
            input_names=["pixels"],
            output_names=["features"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    model = program.model_proto
    notes = {"pretrained_cfg": json.dumps(subject.metadata), "encoder": subject.name, "producer": "adasim"}
    for key, value in notes.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    (folder / ONNX_FILE).write_bytes(model.SerializeToString())
    if find_spec("onnxruntime") is None:
        return _untried("onnxruntime")
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / ONNX_FILE), providers=["CPUExecutionProvider"])

    def run(pixels: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(session.run(["features"], {"pixels": pixels.numpy()})[0]))

    _check(subject, run, "onnxruntime")
    return ""


def to_pt2(subject: Subject, folder: Path) -> str:
    """A program of torch.export with any number of images in a batch; its transform is in an extra file."""
    path, batch = folder / PT2_FILE, torch.export.Dim("batch")
    with _quiet(), torch.no_grad():
        program = torch.export.export(subject.net, (subject.example(),), dynamic_shapes=({0: batch},))
        # Not straight to the file: torch aborts the process where a disk fills.
        made_of = io.BytesIO()
        torch.export.save(program, made_of, extra_files={"pretrained_cfg.json": json.dumps(subject.metadata)})
        path.write_bytes(made_of.getbuffer())
        made = torch.export.load(path).module()
    _check(subject, made, "torch.export")
    return ""


def _untried(library: str) -> str:
    return f"Not tried out: {library} is not installed (pip install 'adasim[export]')."


FORMATS: dict[str, Callable[[Subject, Path], str]] = {
    "timm": to_timm,
    "hf": to_hf,
    "onnx": to_onnx,
    "pt2": to_pt2,
}
"""Each writes its files into a folder and returns a sentence for the person, or an empty one."""


def _write(subject: Subject, to: str, folder: Path) -> str:
    """The files of one format and the transform; a sentence for the person, or an empty one."""
    (folder / TRANSFORM_FILE).write_text(transform_file(subject.transform))
    try:
        return FORMATS[to](subject, folder)
    except (UserError, OSError):
        raise
    except Exception as error:  # the exporters of other libraries meet any net, and raise nearly anything
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UserError(
            f"{subject.name} cannot be exported to {to}: {reason} Choose another --to."
        ) from error


def _check(subject: Subject, run: Callable[[Tensor], Tensor], library: str) -> None:
    """Refuse an export whose features are not the encoder's own, for batches of one, two and three."""
    for count in (1, 2, 3):
        pixels = subject.example(count)
        with torch.no_grad():
            own, theirs = subject.net(pixels), run(pixels)
        if not torch.allclose(own, theirs, rtol=TOLERANCE, atol=TOLERANCE):
            gap = float((own - theirs).abs().max())
            raise UserError(
                f"{subject.name} gives other features under {library} (they differ by {gap:.2g}), so nothing was "
                f"written. Choose another --to."
            )


def _write_config(subject: Subject, folder: Path, more: dict[str, Any]) -> None:
    """The weights, and a config.json as timm writes it for the hub."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in subject.net.state_dict().items()}
    (folder / WEIGHTS_FILE).write_bytes(safetensors.torch.save(tensors, {"format": "pt"}))
    config = {
        "architecture": subject.architecture if subject.stem is None or more else subject.timm_name,
        "num_classes": 0,
        "num_features": subject.dim,
        "model_args": subject.arguments,
        "pretrained_cfg": subject.metadata | {"num_classes": 0},
        **more,
    }
    _write_json(folder / CONFIG_FILE, config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


@contextmanager
def _imported(file: Path) -> Iterator[Any]:
    """A file that travels along as a module, which Python does not know afterwards."""
    module = ModuleType(f"adasim_tried_out_{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    try:
        exec(compile(file.read_text(), file, "exec"), vars(module))
        yield module
    finally:
        del sys.modules[module.__name__]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' own chatter."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # progress bars, too
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
