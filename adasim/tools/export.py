"""`export`: an encoder for other libraries, with its transform and a model card, in a folder of its own.

One function for each format writes its files and loads them again; what is loaded must give the encoder's own
features. Texts and Python files that travel along, and that need no adasim, are in templates/.
"""

from __future__ import annotations

import io
import json
import logging
import os
import runpy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from pprint import pformat
from string import Template
from typing import Any

import numpy as np
import safetensors.torch
import timm
import torch
from torch import Tensor

from adasim import __version__
from adasim.eval.encoder import Encoder, open_encoder
from adasim.eval.evaluation import Say
from adasim.eval.features import weights_hash
from adasim.eval.results import COMPARED, NAMES, Result, column_order, read_results
from adasim.eval.splits import data_name
from adasim.models import PIXELS, Backbone, parse_source
from adasim.models.transform import EvalTransform
from adasim.runs.folder import read_json
from adasim.runs.metrics import read_metrics
from adasim.tools.outputs import check_export_folder, export_folder, missing
from adasim.util.errors import UserError, suggest
from adasim.util.files import remove, sync, temporary_name, write_errors
from adasim.util.terminal import printable

TOLERANCE = 1e-4
"""By how much a feature of an exported encoder may differ, for features of the size 1 and above in proportion."""
_WEIGHTS, _TIMM_FILE, _HF_FILE = "model.safetensors", "adasim_model.py", "modeling_adasim.py"


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
    subject = Subject(encoder.backbone, encoder.transform)
    write, library = FORMATS[to]
    temporary = temporary_name(folder)
    try:
        with write_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            (temporary / "transform.py").write_text(transform_file(subject.transform))
            try:
                _check(subject, write(subject, temporary), library, say)
            except (UserError, OSError):
                raise
            except Exception as error:  # of whatever kind: other libraries meet a net they do not expect
                reason = next(iter(str(error).splitlines()), "") or type(error).__name__
                sentence = f"{subject.name} cannot be exported to {to}: {reason} Choose another --to."
                raise UserError(sentence) from error
            (temporary / "README.md").write_text(model_card(encoder, subject, to), encoding="utf-8")
            for path in (*temporary.iterdir(), temporary):
                sync(path)
            old = temporary_name(folder)  # what stood there goes only when the new folder is whole
            if folder.exists():
                os.rename(folder, old)
            os.rename(temporary, folder)
            remove(old)
            sync(folder.parent)
    finally:
        remove(temporary)
    if subject.stem and to in ("timm", "hf"):
        say(f"{library} has no argument for the stem of {subject.name}: README.md shows how it is loaded.")
    return folder


def _default_folder(encoder: Encoder, model: object, to: str) -> Path:
    """Beside the run or the file; in this folder for a model that is known by its name."""
    if encoder.run is not None:
        folder = export_folder(encoder.run, to)
        return folder if encoder.epoch is None else folder.with_name(f"{encoder.name}-{to}")
    beside = Path(model).parent if isinstance(model, str | Path) and Path(model).exists() else Path()
    return beside / f"{encoder.name}-{to}"


class Subject:
    """What is exported: a timm model on the CPU, in evaluation mode, and how timm would build it."""

    def __init__(self, backbone: Backbone, transform: EvalTransform) -> None:
        spec, self.transform = backbone.spec, transform
        self.net, self.dim = backbone.net.cpu().eval(), backbone.dim
        self.name, self.architecture = str(spec["name"]), str(spec["timm"])  # ours and timm's
        self.arguments: dict[str, Any] = dict(spec.get("kwargs", {}))  # for timm.create_model
        self.arguments.pop("num_classes", None)  # which is 0
        self.channels = self.arguments.get("in_chans", 3)
        # How the stem of a ResNet was changed; None if timm's arguments say everything.
        self.stem: str | None = self.arguments.pop("stem", None)
        changed = f"adasim_{self.name}" + ("_3x3" if self.stem == "3x3" else "")
        self.timm_name = changed if self.stem else self.architecture
        self.metadata = {"crop_mode": "center"} | transform.to_timm()

    def example(self, count: int = 2) -> Tensor:
        """Normalised pixels of no image in particular, always the same."""
        size, generator = self.transform.size, torch.Generator().manual_seed(0)
        return torch.randn(count, self.channels, size, size, generator=generator)

    def code(self, file: str) -> str:
        """A Python file that builds this net with its stem."""
        stem = "net.maxpool = torch.nn.Identity()"
        if self.stem == "3x3":
            stem += (
                f"; net.conv1 = torch.nn.Conv2d({self.channels}, net.bn1.num_features, 3, 1, 1, bias=False)"
            )
        arguments = pformat(self.arguments, width=100, sort_dicts=False)
        return filled(
            file, stem=stem, arguments=arguments, timm_name=self.timm_name, architecture=self.architecture
        )

    def write_weights(self, folder: Path, **more: Any) -> None:
        """The weights, and a config.json as timm writes it for the hub, with more in it."""
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.net.state_dict().items()}
        (folder / _WEIGHTS).write_bytes(safetensors.torch.save(tensors, {"format": "pt"}))
        config = {
            "architecture": self.architecture if more else self.timm_name,
            "num_classes": 0,
            "num_features": self.dim,
            "model_args": self.arguments,
            "pretrained_cfg": self.metadata | {"num_classes": 0},
            **more,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def filled(template: str, **values: Any) -> str:
    """A file of templates/ with its $names replaced."""
    text = (Path(__file__).parent / "templates" / f"{template}.txt").read_text(encoding="utf-8")
    return Template(text).substitute(values)


def transform_file(transform: EvalTransform) -> str:
    """A transform as Python code that gives the same pixels."""
    named = {name: transform.to_timm()[name] for name in ("mean", "std")}
    own = {name: getattr(transform, name) for name in ("size", "resize", "squash", "interpolation")}
    return filled("transform.py", **named, **own)


# ---- formats ----

Loaded = Callable[[Tensor], Tensor] | None
"""What was written, loaded again: from pixels to features. None where the library is not installed."""


def to_timm(subject: Subject, folder: Path) -> Loaded:
    """A folder for timm.create_model."""
    subject.write_weights(folder)
    arguments: dict[str, Any] = {"checkpoint_path": str(folder / _WEIGHTS)}
    if subject.stem is None:
        arguments |= {"num_classes": 0} | subject.arguments
    else:
        (folder / _TIMM_FILE).write_text(subject.code(_TIMM_FILE))
        with _quiet():  # which says that timm knew it already
            runpy.run_path(str(folder / _TIMM_FILE), run_name=_TIMM_FILE)
    return timm.create_model(subject.timm_name, **arguments).eval()


def to_hf(subject: Subject, folder: Path) -> Loaded:
    """A folder for AutoModel.from_pretrained."""
    if subject.stem is None:  # read by transformers' TimmWrapperModel and by timm
        subject.write_weights(folder, model_type="timm_wrapper", architectures=["TimmWrapperModel"])
    else:
        # A model_type of its own: transformers would build timm's stem without a word where it knows the type.
        classes = {name: f"{_HF_FILE[:-3]}.Adasim{name[4:]}" for name in ("AutoConfig", "AutoModel")}
        subject.write_weights(folder, model_type="adasim", architectures=["AdasimModel"], auto_map=classes)
        processor = {"image_processor_type": "TimmWrapperImageProcessor", "pretrained_cfg": subject.metadata}
        processor["architecture"] = subject.architecture
        (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
        (folder / _HF_FILE).write_text(subject.code(_HF_FILE))
    if find_spec("transformers") is None:
        return None
    import transformers

    with _quiet():
        kind: Any = transformers.AutoModel
        if subject.stem:  # which AutoModel would copy into the user's cache
            kind = runpy.run_path(str(folder / _HF_FILE), run_name=_HF_FILE)["AdasimModel"]
        model = kind.from_pretrained(folder).eval()
    return lambda pixels: model(pixel_values=pixels).pooler_output


def to_onnx(subject: Subject, folder: Path) -> Loaded:
    """An ONNX file with any number of images in a batch."""
    for package in ("onnx", "onnxscript"):
        if find_spec(package) is None:
            raise missing(package, "--to onnx", "export")
    with _quiet(), torch.no_grad():
        program: Any = torch.onnx.export(
            subject.net,
            (subject.example(),),
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
    file = folder / "model.onnx"
    file.write_bytes(model.SerializeToString())
    if find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(np.asarray(session.run(["features"], {"pixels": x.numpy()})[0]))


def to_pt2(subject: Subject, folder: Path) -> Loaded:
    """A program of torch.export with any number of images in a batch; its transform is in an extra file."""
    batch, made_of = torch.export.Dim("batch"), io.BytesIO()
    with _quiet(), torch.no_grad():
        program = torch.export.export(subject.net, (subject.example(),), dynamic_shapes=({0: batch},))
        # Not straight to the file: torch aborts the process where a disk fills.
        torch.export.save(program, made_of, extra_files={"pretrained_cfg.json": json.dumps(subject.metadata)})
        (folder / "model.pt2").write_bytes(made_of.getbuffer())
        return torch.export.load(folder / "model.pt2").module()


FORMATS: dict[str, tuple[Callable[[Subject, Path], Loaded], str]] = {
    "timm": (to_timm, "timm"),
    "hf": (to_hf, "transformers"),
    "onnx": (to_onnx, "onnxruntime"),
    "pt2": (to_pt2, "torch.export"),
}
"""Each writes its files into a folder and loads them again; and the library that it is for."""


def _check(subject: Subject, loaded: Loaded, library: str, say: Say) -> None:
    """Refuse an export whose features are not the encoder's own, for batches of one, two and three."""
    if loaded is None:
        return say(f"Not tried out: {library} is not installed (pip install 'adasim[export]').")
    for count in (1, 2, 3):
        pixels = subject.example(count)
        with torch.no_grad():
            own, theirs = subject.net(pixels), loaded(pixels)
        if not torch.allclose(own, theirs, rtol=TOLERANCE, atol=TOLERANCE):
            gap = float((own - theirs).abs().max())
            raise UserError(
                f"{subject.name} gives other features under {library} (they differ by {gap:.2g}), so nothing was "
                f"written. Choose another --to."
            )


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


# ---- the model card ----

_METHODS = {"dino": "DINO", "simsiam": "SimSiam"}
_PAIRS = {
    "adasim": "AdaSim pairs: the second view is of an image drawn from the neighbours found so far",
    "standard": "standard pairs: both views are of one image",
    "nearest": "nearest-neighbour pairs: the second view is of the most similar other image",
    "oracle": "pairs of one class, by labels",
}
_STEMS = {
    None: "",
    "no_pool": ", without the max-pooling of its stem",
    "3x3": ", with a 3x3 convolution of stride 1 as its stem and no max-pooling",
}
_BY_PIL = (
    " The library's own version of it resizes with PIL, which rounds a few pixels in a thousand to the neighbouring "
    "8-bit level: features then differ in the third or fourth decimal."
)


def model_card(encoder: Encoder, subject: Subject, to: str) -> str:
    """README.md, as Markdown with the header that model hubs read."""
    own, architecture = subject.transform, f"timm's `{subject.architecture}`"
    built = f"`{subject.name}`, built from {architecture}"
    arguments = "".join(f", {name}={value!r}" for name, value in subject.arguments.items())
    how = f"load-{to}-stem.md" if subject.stem and to in ("timm", "hf") else f"load-{to}.md"
    return filled(
        "README.md",
        library={"hf": "transformers", "pt2": "pytorch"}.get(to, to),
        name=printable(encoder.name),
        dim=subject.dim,
        network=(architecture if subject.name == subject.architecture else built) + _STEMS[subject.stem],
        version=__version__,
        training=_training(encoder),
        figures=_figures(encoder),
        loading=filled(how, timm_name=subject.timm_name, arguments=arguments).rstrip(),
        sides="both sides are" if own.squash else "the shorter side is",
        size=own.size,
        resize=own.resize,
        interpolation=own.interpolation,
        **{name: f"({', '.join(f'{x:g}' for x in subject.metadata[name])})" for name in ("mean", "std")},
        where={
            "onnx": "in the file's metadata under `pretrained_cfg`",
            "pt2": "in the file's extra file `pretrained_cfg.json`",
        }.get(to, "in `config.json` under `pretrained_cfg`"),
        other_transform=_BY_PIL if to in ("timm", "hf") else "",
    )


def _training(encoder: Encoder) -> str:
    run = encoder.run
    if run is None:
        return f"Where the weights come from: {encoder.origin}. No run folder was at hand that says more."
    config = read_json(run / "config.json")  # not a `Config`, which needs the run's plug-ins
    method, pairs, epochs, optim = config["method"], config["pairs"], config["epochs"], config["optim"]
    count = read_json(run / "data.json", vital=False).get("images")
    images = f"{count:,} images" if isinstance(count, int) else "images"
    sentences = [
        f"Trained on {images} of `{printable(data_name(config['data']['source']))}` "
        f"{'' if pairs == 'oracle' else 'without looking at labels, '}by {_METHODS.get(method, method)} "
        f"({config.get('recipe', 'custom')} recipe) with {_PAIRS.get(pairs, f'{pairs} pairs')}."
    ]
    if init := config["model"].get("init"):
        name, path = parse_source(init)
        words = ":".join(part for part in (name, path.name if path else "") if part)  # by name, not by path
        sentences.append(
            f"It began with the weights of `{printable(words)}`, which somebody has trained on other images, perhaps "
            f"with labels. Their licence holds for these weights, too."
        )
    done = max((line["epoch"] + 1 for line in read_metrics(run) if "epoch_loss" in line), default=0)
    so_far = f"{epochs} epochs." if done >= epochs else f"{done} of {epochs} epochs are complete."
    sentences.append(so_far if encoder.epoch is None else f"As of epoch {encoder.epoch} of {epochs}.")
    sentences.append(
        f"Batches of {config['batch_size']} images, views of {config['views']['size']} pixels, {optim['name']} with "
        f"a peak learning rate of {optim['lr']:g} per 256 images, random seed {config['seed']}."
    )
    if pairs in ("adasim", "nearest"):
        neighbours = config["neighbors"]
        sentences.append(
            f"Neighbours: a window of {neighbours['window']} epochs, support K = {neighbours['k']}, temperature "
            f"{neighbours['tau']:g} (AdaSim, ICCV 2023, arXiv 2303.13606)."
        )
    versions = read_json(run / "versions.json", vital=False)
    if versions.get("torch"):
        sentences.append(f"Made with torch {versions['torch']} and timm {versions.get('timm')}.")
    return " ".join(sentences)


def _figures(encoder: Encoder) -> str:
    """The newest figure of each kind, of these very weights alone."""
    file, weights = encoder.results_file, weights_hash(encoder.backbone)
    results = read_results(file.parent) if file is not None and file.is_file() else []
    mine = [result for result in results if result.model.get("weights") == weights]
    newest = {result.column: result for result in mine}
    lines = sorted(newest.values(), key=lambda result: column_order(result.protocol))
    text = "Nothing was measured of these weights yet; `adasim eval` does."
    if lines:
        figures = "\n".join(map(_figure, lines))
        text = f"Accuracies and IoU in percent, measured by `adasim eval`:\n\n{figures}"
    if older := len(results) - len(mine):
        text += f"\n\nFigures of the run that are of other weights, and left out here: {older}."
    return text


def _figure(result: Result) -> str:
    setting = f" ({result.setting})" if result.setting else ""
    others = ", ".join(f"{name} {value:.2f}" for name, value in result.metrics.get(COMPARED, {}).items())
    return (
        f"- {NAMES.get(result.protocol, result.protocol)}{setting} on {printable(result.data['name'])}: "
        f"{result.value:.2f}" + (f" ({others})" if others else "")
    )
