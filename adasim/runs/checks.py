"""Is it a run, and may one be made there? Asked of a folder before anything is opened, and without torch."""

from __future__ import annotations

import os
from pathlib import Path

from adasim.runs.lock import LOCK
from adasim.runs.overwrite import LISTING, check_replaceable
from adasim.util.errors import UserError
from adasim.util.files import TEMPORARY

FOLDERS = ("checkpoints", "history", "tensorboard")
UNFINISHED = {*FOLDERS, LOCK, "versions.json", "data.json", LISTING, "run.json"}
"""What a kill inside `RunFolder.create` may leave."""


def require_run(out: Path) -> None:
    """Refuse what is not the folder of a run."""
    if not (out / "config.json").is_file():
        reason = "there is no config.json in it" if out.is_dir() else "there is no such folder"
        raise UserError(
            f"{out} is not the folder of a run: {reason}. Name the --out of an earlier pretraining."
        )


def check_out(out: Path, overwrite: bool) -> None:
    """Only an absent or empty folder, or what a killed `create` left, may become a run."""
    if any("\ud800" <= character <= "\udfff" for character in str(out)):
        raise UserError(f"--out {out} is not UTF-8, as TensorBoard needs it. Choose another --out.")
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"--out {out} is a file. Choose a folder that does not exist yet.")
    names = {name for name in os.listdir(out) if not name.endswith(TEMPORARY)}
    if "config.json" in names and "versions.json" in names:
        if overwrite:
            return check_replaceable(out)
        raise UserError(
            f"{out} already holds another run. Continue it with --resume {out}, replace it with --overwrite, "
            f"or choose another --out."
        )
    if not names <= UNFINISHED:
        raise UserError(
            f"--out {out} is not empty and not a run (it holds {_few(sorted(names - UNFINISHED))}). "
            f"Choose a folder that does not exist yet."
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
