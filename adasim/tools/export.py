"""`export`: an encoder for other libraries, with its transform and a model card, in a folder of its own."""

from __future__ import annotations

import os
from pathlib import Path

from adasim.eval.encoder import Encoder, open_encoder
from adasim.eval.evaluation import Say
from adasim.models import PIXELS, Backbone
from adasim.registry import nearest
from adasim.tools.card import model_card
from adasim.tools.formats import FORMATS, Subject, write
from adasim.tools.outputs import check_export_folder, export_folder
from adasim.util.errors import UserError
from adasim.util.files import remove, sync, temporary_name, write_errors


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
        raise UserError(f"Unknown format {to!r}. {nearest(to, FORMATS)}")
    encoder = open_encoder(model)
    if encoder.backbone.spec["name"] == PIXELS:
        raise UserError("pixels are no encoder: there are no weights to export. Name a run, or a model.")
    folder = Path(out) if out is not None else default_folder(encoder, model, to)
    check_export_folder(folder, overwrite)
    if encoder.note:
        say(encoder.note)
    subject = Subject.of(encoder.backbone, encoder.transform)
    temporary = temporary_name(folder)
    try:
        with write_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            sentence = write(subject, to, temporary)
            (temporary / "README.md").write_text(model_card(encoder, subject, to), encoding="utf-8")
            for path in (*temporary.iterdir(), temporary):
                sync(path)
            _put_in_place(temporary, folder)
    finally:
        remove(temporary)
    if sentence:
        say(sentence)
    return folder


def default_folder(encoder: Encoder, model: object, to: str) -> Path:
    """Beside the run or the file; in this folder for a model that is known by its name."""
    if encoder.run is not None:
        return export_folder(encoder.run, to)
    beside = Path(model).parent if isinstance(model, str | Path) and Path(model).exists() else Path()
    return beside / f"{encoder.name}-{to}"


def _put_in_place(new: Path, folder: Path) -> None:
    """Let the finished folder take its name; what stood there goes only then."""
    if not folder.exists():
        os.rename(new, folder)
        return sync(folder.parent)
    old = temporary_name(folder)
    os.rename(folder, old)
    try:
        os.rename(new, folder)
    except OSError:
        os.rename(old, folder)
        raise
    sync(folder.parent)
    remove(old)
