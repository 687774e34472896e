"""`adasim gallery ...`: images with their ranked support, as a picture and as tables.

adasim gallery RUN                                      random images and what they draw their partners from
adasim gallery RUN --pick intriguing                    those whose best match is another image
adasim gallery --backbone resnet50 --data photos/       any frozen encoder, any images
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.text import Text

from adasim.cli.options import Neighbours, read_options
from adasim.explore import KINDS
from adasim.options import FOR_AN_ENCODER, ExploreOptions, refuse_unused
from adasim.tools.outputs import check_output
from adasim.util.errors import UserError
from adasim.util.files import atomic_write, write_errors
from adasim.util.terminal import console, say

if TYPE_CHECKING:
    from adasim.explore.open import Opened


@dataclass(kw_only=True)
class What(Neighbours):
    """Which images, and what is written."""

    pick: Annotated[str, tyro.conf.arg(metavar="random|intriguing|other-class|IDS")] = "random"
    """random: any images. intriguing: the best match is another image, so that the gate is shut. other-class: the
    best match is of another class than the image (needs labels). Or ids and file names, with commas between them."""
    count: int = 6
    """How many images, where they are not named."""
    show: int = 10
    """How many neighbours of each are drawn at most; the tables hold all."""
    out: Path | None = None
    """A folder, or the beginning of the files' names; RUN/gallery-PICK, or gallery-PICK here."""
    format: tuple[Literal["png", "pdf"], ...] = ()
    """Of the picture: png, pdf, or both; what --out ends in, or png. A .csv and a .tex table are always written."""
    overwrite: bool = False
    """Replace files that are there."""


@dataclass(kw_only=True)
class GalleryArguments(ExploreOptions, What):  # in this order `What` comes first in the help
    """The galleries of the paper: images, each with its ranked support and a bar for every probability p_win; and the
    same as tables for a spreadsheet and for LaTeX."""

    seed: int = 0
    """Random seed: which images are picked, and the augmented passes of --backbone."""


def main(arguments: Sequence[str]) -> None:
    """`adasim gallery ...`"""
    asked = read_options(GalleryArguments, arguments, "gallery")
    check(asked)
    beginning, formats = names(asked)
    paths = {kind: beginning.with_name(f"{beginning.name}.{kind}") for kind in (*formats, "csv", "tex")}
    for path in paths.values():
        check_output(path, asked.overwrite)

    from adasim.explore.gallery import pick, render, rows_of
    from adasim.explore.lists import as_csv, as_latex

    supports = open_asked(asked, say)
    picked = pick(supports, asked.pick, asked.count, asked.seed)
    rows = rows_of(supports, picked.ids)
    say(f"{picked.title}: {picked.choice}.")
    made = {kind: render(supports, rows, picked, show=asked.show, format=kind) for kind in formats}
    made["csv"] = as_csv(supports, rows)
    made["tex"] = as_latex(supports, rows, f"{picked.title}. {picked.choice}; p_win from {supports.origin}.")
    for kind, path in paths.items():
        with write_errors(path):
            atomic_write(path, made[kind])
        console().print(Text.assemble("  ", str(path)), soft_wrap=True)


def check(asked: GalleryArguments) -> None:
    """What is shown must be there, and numbers must make sense."""
    asked.check("Whose neighbours are to be shown?")
    if asked.run is not None:
        refuse_unused(asked, ("passes", "k", "size", "random_weights"), asked.run)
    if asked.features is not None:
        refuse_unused(asked, FOR_AN_ENCODER, None)
    for name in ("count", "show"):
        if getattr(asked, name) < 1:
            raise UserError(f"--{name}={getattr(asked, name)} must be at least 1.")


def names(asked: GalleryArguments) -> tuple[Path, tuple[str, ...]]:
    """How the names of all files begin, and the formats of the picture."""
    kind = asked.pick if asked.pick in KINDS else "picked"
    out = asked.out if asked.out is not None else asked.run if asked.run is not None else Path()
    if out.is_dir():
        return out / f"gallery-{kind}", tuple(dict.fromkeys(asked.format)) or ("png",)
    suffix = out.suffix.lower().removeprefix(".")
    if suffix in ("png", "pdf"):
        return out.with_suffix(""), tuple(dict.fromkeys((suffix, *asked.format)))
    return out, tuple(dict.fromkeys(asked.format)) or ("png",)


def open_asked(asked: GalleryArguments, say: Callable[[str], None]) -> Opened:
    from adasim.explore.gallery import supports_of_run
    from adasim.explore.open import open_backbone, open_features

    if asked.run is not None:
        return supports_of_run(asked.run, say, data=asked.data, tau=asked.tau)
    assert asked.data is not None
    if asked.backbone is not None:
        opened = open_backbone(asked.backbone, asked.data, asked, say)
    else:
        assert asked.features is not None
        opened = open_features(asked.features, asked.data, asked, say)
    return replace(opened, support=opened.support.best(asked.k))  # as many as a run would draw from
