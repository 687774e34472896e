"""`adasim explore ...`: one page to go through neighbours, duplicates, wrong labels and outliers.

adasim explore RUN                                      what a run learned about its own images
adasim explore --backbone resnet50 --data photos/       any frozen encoder, any images
adasim explore --features mine.npz --data photos/       features that somebody else made
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adasim.cli.options import Neighbours, read_options
from adasim.options import FOR_AN_ENCODER, refuse_unused
from adasim.tools.outputs import check_lists, check_output, check_page
from adasim.util.errors import UserError
from adasim.util.files import write_errors
from adasim.util.terminal import say

_EXPORTS = {
    "atlas": (".jsonl", "Embedding Atlas: embedding-atlas {} --x x --y y --neighbors neighbors"),
    "fiftyone": (
        ".csv",
        "FiftyOne: fo.Dataset.from_dir(dataset_type=fo.types.CSVDataset, labels_path=...) (docs/explore.md)",
    ),
    "cleanlab": (".npz", "cleanlab: Datalab(...).find_issues(features=...) (docs/explore.md)"),
}
"""For which tools files are written, how their names end, and how they are used."""
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
    exports = {tool: path for tool in _EXPORTS if (path := getattr(asked, f"export_{tool}")) is not None}
    for tool, path in exports.items():
        if path.suffix != _EXPORTS[tool][0]:
            raise UserError(f"--export-{tool} {path} must end in {_EXPORTS[tool][0]}.")
        check_output(path, asked.overwrite, f"--export-{tool}")

    from adasim.explore import exports as writers
    from adasim.explore.lists import write_csv
    from adasim.explore.page import explore, write_page

    opened = asked.open(say)
    explored = explore(opened, say)
    count = {name: len(table.rows) for name, table in explored.tables.items()}
    groups = len(explored.findings.groups)
    straddling = sum(group.straddles for group in explored.findings.groups)
    leaks = f", {straddling:,} in both train and test" if straddling else ""
    say(f"{groups:,} {'group' if groups == 1 else 'groups'} of duplicates{leaks}.")
    if (labels := explored.findings.labels) is not None:
        table = explored.tables["wrong-labels"]
        said = f"Wrong labels: about {labels.estimate:,}."
        if table.threshold is not None and table.rows:
            place = table.columns.index("score")
            listed = sum(float(row[place]) >= table.threshold for row in table.rows)
            first = f"{listed:,} score {table.threshold:.2f} or more, which the page shows first"
            said += f" Of {len(table.rows):,} suspects {first}."
        say(said)
    say(f"Surprising images: {count['surprising']:,}. Lonely ones: {count['lonely']:,}.")
    written: list[Path] = []
    with write_errors(page or asked.csv, "or choose another place"):
        if asked.csv is not None:
            written += write_csv(asked.csv, explored.tables, TABLES)
        for tool, path in exports.items():
            more = (opened.features,) if tool == "cleanlab" else ()
            getattr(writers, f"write_{tool}")(path, explored, *more)
            written.append(path)
        if page is not None:
            written += write_page(page, explored)
    for tool, path in exports.items():
        say(f"For {_EXPORTS[tool][1].format(path)}")
    for path in written:
        say(f"  {path}")
