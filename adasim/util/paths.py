"""Paths that people name: are they there? Asked before anything is opened, and without torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from adasim.registry import SOURCES
from adasim.util.errors import UserError


def is_path(source: str) -> bool:
    """Whether a source is the path of a folder or of a file, and not `KIND:...`, known or not."""
    kind, colon, _ = source.partition(":")
    if kind in SOURCES:
        return False
    return not colon or os.path.exists(source) or re.fullmatch(r"[A-Za-z][\w-]+", kind) is None


def check_path(path: str | Path, option: str) -> None:
    """Refuse a name that no file can have, and what is neither file nor folder: a pipe or /dev/zero may never end."""
    if any(len(os.fsencode(name)) > 255 for name in Path(path).parts):
        raise UserError(
            f"No file has a name as long as {str(path)[:40]}... ({len(str(path)):,}). Check {option}."
        )
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise UserError(f"{path} is a pipe or a device. Name a file, or a folder. Check {option}.")


def check_images(source: str | None, option: str = "--data") -> None:
    """Refuse a folder or a file of images that is not there; of other sources nothing is known yet."""
    if source and is_path(source):
        check_path(source, option)
        if not os.path.exists(source):
            kind = "file" if source.endswith(".npz") else "folder"
            raise UserError(f"No such {kind}: {source}. Check {option}.")


def check_model(model: str) -> None:
    """Refuse a MODEL that is written like a path and is not there; whether NAME:FILE is, is left to who opens it."""
    check_path(model if os.path.exists(model) else model.partition(":")[2] or model, "its spelling")
    like_a_path = os.sep in model or Path(model).suffix in (".safetensors", ".pth", ".pt", ".bin")
    if like_a_path and ":" not in model and not os.path.exists(model):
        raise UserError(f"No backbone at {model}: there is no such file or folder. Check its spelling.")


def check_file(file: str | Path | None, option: str) -> None:
    """Refuse a file after `option` that is not there."""
    if file:
        check_path(file, option)
        if not os.path.exists(file):
            raise UserError(f"No such file: {file}. Check {option}.")
