"""`adasim apply`: a folder of images, cleaned by the verdicts of the explorer's page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from adasim.cli.options import Command, check_file, check_images, read_options
from adasim.tools.outputs import check_folder
from adasim.util.errors import UserError
from adasim.util.files import write_errors
from adasim.util.terminal import say


@dataclass(kw_only=True)
class ApplyArguments(Command):
    """Write a folder of images anew: without those that you left out on the page of `adasim explore`, and with the
    labels that you corrected.

    adasim apply verdicts.csv --data photos/ --out photos-clean/

    The folder itself is not changed."""

    verdicts: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="VERDICTS.csv")]
    """Verdicts, exported from the page."""
    data: str
    """The folder that was explored."""
    out: Path
    """The folder to write, which may not exist yet."""
    copy: bool = False
    """Copy the files; else OUT holds symbolic links to them."""


def main(arguments: Sequence[str]) -> None:
    """`adasim apply ...`"""
    asked = read_options(ApplyArguments, arguments, "apply")
    check_file(asked.verdicts, "VERDICTS.csv")
    check_images(asked.data)
    if not os.path.isdir(asked.data):
        raise UserError(
            f"{asked.data} is no folder of image files, and only such folders are written anew. Leave images of "
            f"other sources out with --exclude {asked.verdicts}."
        )
    out = Path(os.path.abspath(asked.out))
    check_folder(out)
    if os.path.lexists(out) and not (out.is_dir() and not out.is_symlink() and not any(out.iterdir())):
        raise UserError(f"{asked.out} is there already. Choose an --out that does not exist yet.")
    if out.resolve().is_relative_to(Path(asked.data).resolve()):
        raise UserError(
            f"--out {asked.out} lies within {asked.data}, where it would be more images. Choose another."
        )

    from adasim.explore.apply import apply

    with write_errors(out, "or choose another place"):
        done = apply(asked.verdicts, asked.data, out, copy=asked.copy)
    say(f"{asked.out}: {done}")
