"""What every command that writes something asks: is there room for it, and is what it takes installed?"""

from __future__ import annotations

import os
from pathlib import Path

from adasim.errors import UserError


def check_output(out: Path, overwrite: bool) -> None:
    """Refuse, before any work, a file that is there already, or one that cannot be written."""
    if out.is_dir():
        raise UserError(f"--out {out} is a folder. Name a file.")
    check_folder(out)
    if os.path.lexists(out) and not overwrite:
        raise UserError(f"{out} is there already. Replace it with --overwrite, or choose another --out.")


def check_folder(out: Path) -> None:
    """Refuse a file whose folder is not there, or may not be written to."""
    if not out.parent.is_dir():
        raise UserError(
            f"There is no folder {out.parent} for --out {out}. Make it first, or choose another --out."
        )
    if not os.access(out.parent, os.W_OK):
        raise UserError(
            f"--out {out} cannot be written: no permission in {out.parent}. Choose another --out."
        )


def missing(package: str, wanted: str, extra: str, otherwise: str = "") -> UserError:
    """The sentence for an optional package that is not installed."""
    way_out = f" {otherwise}" if otherwise else ""
    return UserError(
        f"{wanted} needs {package}, which is not installed: pip install 'adasim[{extra}]'.{way_out}"
    )
