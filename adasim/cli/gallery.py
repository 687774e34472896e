"""`adasim gallery ...`: images with their ranked support, as a picture and as tables.

adasim gallery RUN                                      random images and what they draw their partners from
adasim gallery RUN --pick intriguing                    those whose best match is another image
adasim gallery --backbone resnet50 --data photos/       any frozen encoder, any images
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, cast

import tyro

from adasim.cli.options import Neighbours, read_options
from adasim.explore import KINDS
from adasim.options import FOR_AN_ENCODER, refuse_unused
from adasim.tools.outputs import check_output
from adasim.util.fields import Count
from adasim.util.files import atomic_write, write_errors
from adasim.util.terminal import say


@dataclass(kw_only=True)
class GalleryArguments(Neighbours):
    """The galleries of the paper: images, each with its ranked support and a bar for every probability p_win; and the
    same as tables for a spreadsheet and for LaTeX."""

    seed: int = 0
    """Random seed: which images are picked, and the augmented passes of --backbone."""
    pick: Annotated[str, tyro.conf.arg(metavar="random|intriguing|other-class|IDS")] = "random"
    """random: any images. intriguing: the best match is another image, so that the gate is shut. other-class: the
    best match is of another class than the image (needs labels). Or ids and file names, with commas between them."""
    count: Count = 6
    """How many images, where they are not named."""
    show: Count = 10
    """How many neighbours of each are drawn at most; the tables hold all."""
    out: Path | None = None
    """A folder, or the beginning of the files' names; RUN/gallery-PICK, or gallery-PICK here."""
    format: tuple[Literal["png", "pdf"], ...] = ()
    """Of the picture: png, pdf, or both; what --out ends in, or png. A .csv and a .tex table are always written."""
    overwrite: bool = False
    """Replace files that are there."""


def main(arguments: Sequence[str]) -> None:
    """`adasim gallery ...`"""
    asked = read_options(GalleryArguments, arguments, "gallery")
    asked.check("Whose neighbours are to be shown?")
    if asked.run is not None:
        refuse_unused(asked, ("passes", "k", "size", "random_weights"), asked.run)
    if asked.features is not None:
        refuse_unused(asked, FOR_AN_ENCODER, None)
    beginning, formats = names(asked)
    paths = {kind: beginning.with_name(f"{beginning.name}.{kind}") for kind in (*formats, "csv", "tex")}
    for path in paths.values():
        check_output(path, asked.overwrite)

    from adasim.explore.gallery import pick, render, rows_of, supports_of_run
    from adasim.explore.lists import as_csv, as_latex

    if asked.run is not None:
        supports = supports_of_run(asked.run, say, data=asked.data, tau=asked.tau)
    else:
        opened = asked.open(say)
        supports = replace(opened, support=opened.support.best(asked.k))  # as many as a run would draw from
    picked = pick(supports, asked.pick, asked.count, asked.seed)
    rows = rows_of(supports, picked.ids)
    say(f"{picked.title}: {picked.choice}.")
    made = {kind: render(supports, rows, picked, show=asked.show, format=kind) for kind in formats}
    made["csv"] = as_csv(supports, rows)
    made["tex"] = as_latex(supports, rows, f"{picked.title}. {picked.choice}; p_win from {supports.origin}.")
    for kind, path in paths.items():
        with write_errors(path):
            atomic_write(path, made[kind])
        say(f"  {path}")


def names(asked: GalleryArguments) -> tuple[Path, tuple[str, ...]]:
    """How the names of all files begin, and the formats of the picture."""
    kind = asked.pick if asked.pick in KINDS else "picked"
    out, formats = asked.out or asked.run or Path(), cast(tuple[str, ...], asked.format)
    if out.is_dir():
        out /= f"gallery-{kind}"
    elif (suffix := out.suffix.lower().removeprefix(".")) in ("png", "pdf"):
        out, formats = out.with_suffix(""), (suffix, *formats)
    return out, tuple(dict.fromkeys(formats)) or ("png",)
