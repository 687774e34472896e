"""What several commands ask alike. Nothing here imports torch: help and refusals are quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from adasim.options import Flag
from adasim.runs.checks import require_run
from adasim.util.errors import UserError
from adasim.util.paths import check_file, check_images, check_model

MODEL = (
    "A run folder, a timm model name, NAME:FILE (a model's name and a file of its weights), a folder with "
    "config.json (of adasim export, timm or transformers), hf-hub:OWNER/NAME, backbone.safetensors, or pixels (raw)."
)
"""What every command takes; docs/use.md has it as a table."""
Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL", help=MODEL)]


@dataclass(kw_only=True)
class Reading:
    """How images are read and where the encoder runs."""

    split: Literal["train", "test"] = "train"
    """Which part of a folder that is divided into train/ and test/ (or val/)."""
    size: int | None = None
    """Side in pixels of what the encoder sees; its own by default."""
    device: str = "auto"
    """Where the encoder runs: auto, cpu, cuda, ..."""
    workers: int = 2
    """Processes that read images from files."""
    exclude: Path | None = None
    """Leave out the images that this file rejects: verdicts exported from the page of `adasim explore`."""
    no_cache: Flag = False
    """Make features anew and keep none: an interrupted pass begins again."""
    # Only for the help: `load_plugins` has taken the option out before the others are read.
    plugin: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """Python files that register methods or kinds of data of your own (docs/extending.md)."""


def check_sources(asked: Any, question: str) -> None:
    """Of `explore` and `gallery`: exactly one of a run, an encoder and features, images for the latter two, and all
    of them there."""
    given = [name for name in ("run", "backbone", "features") if getattr(asked, name) is not None]
    if len(given) != 1:
        raise UserError(
            f"{question} Name a run folder, or --backbone NAME --data FOLDER, or --features FILE.npz --data FOLDER"
            + (", one of them alone." if given else ".")
        )
    if asked.run is not None:
        require_run(asked.run)
    elif asked.data is None:
        raise UserError(f"--{given[0]} needs --data: which images?")
    check_model(asked.backbone or "")
    check_file(asked.features, "--features")
    check_images(asked.data)
