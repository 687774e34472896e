"""`adasim explore ...`: one page to go through neighbours, duplicates, wrong labels and outliers.

adasim explore RUN                                      what a run learned about its own images
adasim explore --backbone resnet50 --data photos/       any frozen encoder, any images
adasim explore --features mine.npz --data photos/       features that somebody else made
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adasim.cli.options import Neighbours, read_options
from adasim.options import FOR_AN_ENCODER, refuse_unused
from adasim.tools.outputs import check_lists, check_output, check_page
from adasim.util.errors import UserError
from adasim.util.files import write_errors
from adasim.util.terminal import say

if TYPE_CHECKING:
    from torch import Tensor

    from adasim.explore.page import Exploration

_EXPORTS = {"atlas": ".jsonl", "fiftyone": ".csv", "cleanlab": ".npz"}
"""For which tools files are written, and how their names end."""
TABLES = ("duplicates", "wrong-labels", "surprising", "lonely")


@dataclass(kw_only=True)
class ExploreArguments(Neighbours):
    """Write a page to explore images by their neighbours. It opens from the disk and needs no network; none of your
    images is changed, moved or deleted."""

    out: Path | None = None
    """The page to write; RUN/explore.html, or explore.html."""
    csv: Path | None = None
    """Write the lists as CSV into this folder, and no page (unless --out names one)."""
    export_atlas: Path | None = None
    """Also write a .jsonl file with precomputed neighbours for Embedding Atlas."""
    export_fiftyone: Path | None = None
    """Also write a .csv file of all images and findings for FiftyOne."""
    export_cleanlab: Path | None = None
    """Also write an .npz file of labels and features for cleanlab."""
    overwrite: bool = False
    """Replace a page or lists of an earlier exploration."""


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
    for tool, ending in _EXPORTS.items():
        path, option = getattr(asked, f"export_{tool}"), f"--export-{tool}"
        if path is not None and path.suffix != ending:
            raise UserError(f"{option} {path} must end in {ending}.")
        if path is not None:
            check_output(path, asked.overwrite, option)

    from adasim.explore.page import explore

    opened = asked.open(say)
    explored = explore(opened, say)
    count = {name: len(table.rows) for name, table in explored.tables.items()}
    groups = len(explored.findings.groups)
    straddling = sum(group.straddles for group in explored.findings.groups)
    leaks = f", {straddling:,} in both train and test" if straddling else ""
    say(f"{groups:,} {'group' if groups == 1 else 'groups'} of duplicates{leaks}.")
    if "wrong-labels" in count:
        say(f"Suspected wrong labels: {count['wrong-labels']:,}.")
    say(f"Surprising images: {count['surprising']:,}. Lonely ones: {count['lonely']:,}.")
    with write_errors(page or asked.csv, "or choose another place"):
        written = write(asked, page, explored, opened.features)
    if asked.export_atlas is not None:
        say(f"For Embedding Atlas: embedding-atlas {asked.export_atlas} --x x --y y --neighbors neighbors")
    if asked.export_fiftyone is not None:
        say(
            "For FiftyOne: fo.Dataset.from_dir(dataset_type=fo.types.CSVDataset, labels_path=...) (docs/explore.md)"
        )
    if asked.export_cleanlab is not None:
        say("For cleanlab: Datalab(...).find_issues(features=...) (docs/explore.md)")
    for path in written:
        say(f"  {path}")


def write(asked: ExploreArguments, page: Path | None, explored: Exploration, features: Tensor) -> list[Path]:
    """Everything that was asked for; returns what there is now."""
    from adasim.explore.exports import write_atlas, write_cleanlab, write_fiftyone
    from adasim.explore.lists import write_csv
    from adasim.explore.page import write_page

    written: list[Path] = []
    if asked.csv is not None:
        written += write_csv(asked.csv, explored.tables, TABLES)
    if asked.export_atlas is not None:
        write_atlas(asked.export_atlas, explored)
    if asked.export_fiftyone is not None:
        write_fiftyone(asked.export_fiftyone, explored)
    if asked.export_cleanlab is not None:
        write_cleanlab(asked.export_cleanlab, explored, features)
    exported = (getattr(asked, f"export_{tool}") for tool in _EXPORTS)
    written += [path for path in exported if path is not None]
    return written + (write_page(page, explored) if page is not None else [])
