"""Where a figure may be written: asked before any work, and without torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from adasim.tools.outputs import check_folder
from adasim.util.errors import UserError

NAME, FORMATS = "curves", ("png", "svg", "pdf")
MARK = "adasim plot"
"""What tells our own figures from other files."""


def outputs(runs: Sequence[Path], out: Path | None) -> list[Path]:
    """The files to write. Refuses, before any work, what cannot be written or would replace something else."""
    if out is None:
        out = runs[0] if len(runs) == 1 else Path()
    files = [out]
    if out.is_dir():
        files = [out / f"{NAME}.{kind}" for kind in ("png", "svg")]
    elif out.suffix.lower()[1:] not in FORMATS:
        raise UserError(f"--out {out} must end in .png, .svg or .pdf, or be a folder that is there.")
    for file in files:
        check_folder(file)
        if os.path.lexists(file) and not _is_ours(file):
            raise UserError(f"{file} is no figure of adasim plot, and is not replaced. Choose another --out.")
    return files


def _is_ours(file: Path) -> bool:
    try:
        return file.is_file() and MARK.encode() in file.read_bytes()
    except OSError:
        return False
