"""`adasim explore ...`: one page to go through neighbours, duplicates, wrong labels and outliers.

adasim explore RUN                                      what a run learned about its own images
adasim explore --backbone resnet50 --data photos/       any frozen encoder, any images
adasim explore --features mine.npz --data photos/       features that somebody else made
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from adasim.cli.options import Neighbours, read_options
from adasim.options import FOR_AN_ENCODER, ExploreOptions, refuse_unused
from adasim.tools.outputs import check_lists, check_output, check_page
from adasim.util.errors import UserError
from adasim.util.files import write_errors
from adasim.util.terminal import console, say

if TYPE_CHECKING:
    from torch import Tensor

    from adasim.explore.open import Opened
    from adasim.explore.page import Exploration

TABLES = ("duplicates", "wrong-labels", "surprising", "lonely")


@dataclass(kw_only=True)
class What(Neighbours):
    """What is explored, and what is written."""

    out: Path | None = None
    """The page to write; RUN/explore.html, or explore.html."""
    csv: Path | None = None
    """Write the lists as CSV into this folder, and no page (unless --out names one)."""
    export_atlas: Path | None = None
    """Also write a .jsonl file with precomputed neighbours for Embedding Atlas."""
    overwrite: bool = False
    """Replace a page or lists of an earlier exploration."""


@dataclass(kw_only=True)
class ExploreArguments(ExploreOptions, What):  # in this order `What` comes first in the help
    """Write a page to explore images by their neighbours. It opens from the disk and needs no network; none of your
    images is changed, moved or deleted."""


def main(arguments: Sequence[str]) -> None:
    """`adasim explore ...`"""
    asked = read_options(ExploreArguments, arguments, "explore")
    page = asked.out
    if page is None and asked.csv is None:
        page = asked.run / "explore.html" if asked.run is not None else Path("explore.html")
    asked.check("What is to be explored?")
    if asked.features is not None:
        refuse_unused(asked, (*FOR_AN_ENCODER, "seed"), None)
    if page is not None:
        check_page(page, asked.overwrite)
    if asked.csv is not None:
        check_lists(asked.csv, TABLES, asked.overwrite)
    if asked.export_atlas is not None:
        if asked.export_atlas.suffix != ".jsonl":
            raise UserError(f"--export-atlas {asked.export_atlas} must end in .jsonl.")
        check_output(asked.export_atlas, asked.overwrite, "--export-atlas")

    from adasim.explore.page import explore

    opened = open_asked(asked, say)
    explored = explore(opened, say)
    count = {name: len(table.rows) for name, table in explored.tables.items()}
    groups = len(explored.findings.groups)
    straddling = sum(group.straddles for group in explored.findings.groups)
    leaks = f", {straddling:,} in both train and test" if straddling else ""
    say(f"{groups:,} {'group' if groups == 1 else 'groups'} of duplicates{leaks}.")
    if "wrong-labels" in count:
        say(f"{count['wrong-labels']:,} images whose neighbours carry another label.")
    say(f"{count['surprising']:,} surprising and {count['lonely']:,} lonely images.")
    with write_errors(page or asked.csv, "or choose another place"):
        written = write(asked, page, explored, opened.features)
    if asked.export_atlas is not None:
        say(f"For Embedding Atlas: embedding-atlas {asked.export_atlas} --x x --y y --neighbors neighbors")
    for path in written:
        console().print(Text.assemble("  ", str(path)), soft_wrap=True)


def write(asked: ExploreArguments, page: Path | None, explored: Exploration, features: Tensor) -> list[Path]:
    """Everything that was asked for; returns what there is now."""
    from adasim.explore.lists import write_atlas, write_csv
    from adasim.explore.page import write_page

    written: list[Path] = []
    if asked.csv is not None:
        written += write_csv(asked.csv, explored.tables, TABLES)
    if asked.export_atlas is not None:
        write_atlas(asked.export_atlas, explored.collection, explored.support, features)
        written.append(asked.export_atlas)
    return written + (write_page(page, explored) if page is not None else [])


def open_asked(asked: ExploreArguments, say: Callable[[str], None]) -> Opened:
    from adasim.explore.open import open_backbone, open_features, open_run

    if asked.run is not None:
        return open_run(asked.run, asked, say, data=asked.data)
    assert asked.data is not None
    if asked.backbone is not None:
        return open_backbone(asked.backbone, asked.data, asked, say)
    assert asked.features is not None
    return open_features(asked.features, asked.data, asked, say)
