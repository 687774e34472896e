"""Paths that people name: are they there? Asked before anything is opened, and without torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from adasim.errors import UserError
from adasim.registry import SOURCES


def is_path(source: str) -> bool:
    """Whether a source is the path of a folder or of a file, and not `KIND:...`, known or not."""
    kind, colon, _ = source.partition(":")
    if kind in SOURCES:
        return False
    return not colon or os.path.exists(source) or re.fullmatch(r"[A-Za-z][\w-]+", kind) is None


def check_images(source: str | None, option: str = "--data") -> None:
    """Refuse a folder or a file of images that is not there; of other sources nothing is known yet."""
    if source and is_path(source) and not os.path.exists(source):
        kind = "file" if source.endswith(".npz") else "folder"
        raise UserError(f"No such {kind}: {source}. Check {option}.")


def check_model(model: str) -> None:
    """Refuse a MODEL that is written like a path and is not there; `NAME:FILE` is left to who opens it."""
    like_a_path = os.sep in model or Path(model).suffix in (".safetensors", ".pth", ".pt", ".bin")
    if like_a_path and ":" not in model and not os.path.exists(model):
        raise UserError(f"No backbone at {model}: there is no such file or folder. Check its spelling.")


def check_file(file: str | Path | None, option: str) -> None:
    """Refuse a file after `option` that is not there."""
    if file and not Path(file).exists():
        raise UserError(f"No such file: {file}. Check {option}.")
