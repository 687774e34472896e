"""`adasim similar`: the nearest images of a folder, as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Column, Table
from rich.text import Text

from adasim.cli.options import Model, Reading, read_options
from adasim.tools.outputs import check_output, first_free
from adasim.util import terminal
from adasim.util.errors import UserError
from adasim.util.files import write_errors


@dataclass(kw_only=True)
class SimilarArguments(Reading):
    """The images of a folder that are most similar to one image, with their cosine similarities.

    adasim similar runs/photos cat.jpg --in photos/

    The features of the folder are made once and kept: after `adasim embed`, or another question, the answer comes at
    once."""

    model: Model
    image: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE")]
    """The image to compare with; it may lie in the folder, and is then not among the answers."""
    among: Annotated[str, tyro.conf.arg(name="in")]
    """The images to search: a folder of images, an .npz file, hf:NAME or synthetic[:COUNT]."""
    k: Annotated[int, tyro.conf.arg(aliases=("-k",))] = 10
    """How many."""
    out: Path | None = None
    """The picture to make, a .png; IMAGE-similar.png in this folder by default, with a number if that is taken."""
    no_picture: bool = False
    """Only the table."""
    overwrite: bool = False
    """Replace the picture if it is there."""


def main(arguments: Sequence[str]) -> None:
    """`adasim similar ...`"""
    asked = read_options(SimilarArguments, arguments, "similar")
    console = terminal.console()
    if asked.image.is_dir():
        raise UserError(f"{asked.image} is a folder. Name one image to compare with, and folders with --in.")
    if not asked.image.is_file():
        raise UserError(f"No such file: {asked.image}. Name the image to compare with.")
    if asked.out is not None:
        if asked.out.suffix != ".png":
            raise UserError(f"--out {asked.out} must end in .png.")
        check_output(asked.out, asked.overwrite)
    asked.check(asked.model, asked.among, "--in")

    from adasim.tools.embed import contact_sheet, similar

    nearest = similar(asked.model, asked.image, asked.among, asked.k, **asked.named(), say=terminal.say)
    console.print(
        Text.assemble("\nMost similar to ", (terminal.printable(asked.image), "bold"), "\n"), soft_wrap=True
    )
    place = Column("", justify="right", style="dim")
    score = Column("similarity", justify="right")
    table = Table(place, score, Column("file", overflow="fold"), box=None, padding=(0, 2), header_style="dim")
    for number, (name, similarity) in enumerate(zip(nearest.files, nearest.scores, strict=True), 1):
        table.add_row(str(number), f"{similarity:.4f}", name)
    console.print(table)
    if not asked.no_picture:
        default = Path(f"{asked.image.stem}-similar.png")
        out = asked.out or (default if asked.overwrite else first_free(default))
        with write_errors(out, "name another --out, or use --no-picture"):
            contact_sheet(out, nearest, asked.image.name)
        terminal.say(f"\nPicture: {out}")
