"""`adasim export`: the encoder for other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from adasim.cli.options import Command, Model, check_model, read_options
from adasim.tools.outputs import check_export_folder, export_folder
from adasim.util.terminal import say


@dataclass(kw_only=True)
class ExportArguments(Command):
    """Write the encoder for another library: a folder with the weights, the transform and a model card.

    adasim export runs/photos --to onnx

    timm: for timm.create_model(..., checkpoint_path=...). hf: for AutoModel.from_pretrained of transformers.
    onnx: for onnxruntime and others. pt2: for torch.export.load. What was written is loaded again and compared
    before it takes its place. README.md in the folder shows how to load it, and says what it was trained on and how
    well it does."""

    model: Model
    to: Literal["timm", "hf", "onnx", "pt2"]
    """For which library."""
    out: Path | None = None
    """The folder to make; by default beside the run: runs/photos-onnx."""
    overwrite: bool = False
    """If OUT is an earlier export, replace it. Anything else is refused."""


def main(arguments: Sequence[str]) -> None:
    """`adasim export ...`"""
    asked = read_options(ExportArguments, arguments, "export")
    check_model(asked.model)
    is_run = (Path(asked.model) / "run.json").is_file()
    if asked.out is not None or is_run:
        check_export_folder(asked.out or export_folder(Path(asked.model), asked.to), asked.overwrite)

    from adasim.tools.export import export

    folder = export(asked.model, asked.to, asked.out, overwrite=asked.overwrite, say=say)
    names = ", ".join(sorted(path.name for path in folder.iterdir()))
    say(f"{folder}: {names}. README.md shows how to load it.")
