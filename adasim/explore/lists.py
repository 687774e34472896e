"""What was found, as text: the lists of the hunts for the page and as CSV files, and the table beside a gallery, as
CSV and as LaTeX."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adasim.explore.collection import Collection
from adasim.explore.duplicates import Group
from adasim.explore.gallery import Row
from adasim.explore.hunts import Findings
from adasim.explore.labels import LabelFindings
from adasim.explore.open import Opened
from adasim.explore.support import Support
from adasim.util.csv import escape_latex, to_csv
from adasim.util.files import atomic_write


@dataclass(frozen=True)
class Table:
    """A list of findings as text: what the page shows and exports, and what `--csv` writes."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    threshold: float | None = None
    """The least score that the page shows at first; the table has all."""


IMAGE = ("id", "split", "file", "label")
"""The columns that say which image a row is about."""


def tables(collection: Collection, support: Support, findings: Findings) -> dict[str, Table]:
    """The lists by name: duplicates, wrong-labels (where there are labels), surprising, lonely."""
    lists = {"duplicates": _duplicates(collection, findings.groups)}
    if collection.labels is not None:
        lists["wrong-labels"] = _wrong_labels(collection, findings.labels)
    lists["surprising"] = _surprising(collection, support, findings)
    lists["lonely"] = _lonely(collection, findings)
    return lists


def _image(collection: Collection, i: int) -> tuple[str, ...]:
    return str(i), collection.splits[collection.split_of[i]], collection.names[i], collection.class_name(i)


def _duplicates(collection: Collection, groups: Sequence[Group]) -> Table:
    rows = []
    for number, group in enumerate(groups, 1):
        labels = {collection.class_name(i) for i in group.members}
        how = f", {group.how}" if group.how else ""
        reason = {
            "exact": "The same pixels.",
            "near": f"Nearly the same picture{how}: its detail agrees by {group.score:.2f}.",
            "same scene": f"Alike to the encoder; the detail agrees by {group.score:.2f} only.",
        }[group.kind]
        if group.straddles:
            reason += f" In {' and '.join(collection.splits)}: what is tested was trained on."
        if len(labels) > 1:
            reason += f" Labelled {', '.join(sorted(name or 'nothing' for name in labels))}."
        for place, i in enumerate(group.members):
            keep = "no" if place else "yes"
            straddles = "yes" if group.straddles else "no"
            score = f"{group.score:.4f}"
            rows.append((*_image(collection, i), score, str(number), group.kind, keep, straddles, reason))
    return Table((*IMAGE, "score", "group", "kind", "keep", "straddles", "reason"), rows)


def _wrong_labels(collection: Collection, found: LabelFindings | None) -> Table:
    columns = ("neighbours_own", "neighbours_suggested", "probe_own", "probe_suggested")
    # Rounded as the scores are, or the last of them could fall below it.
    threshold = None if found is None else round(found.threshold, 4)
    table = Table((*IMAGE, "score", "suggested", "judge", *columns, "reason"), [], threshold)
    if found is None:
        return table
    for i in found.suspects.tolist():
        own, suggested = collection.class_name(i), collection.classes[int(found.suggested[i])]
        votes, probe = found.votes[i].tolist(), found.probe[i].tolist()
        reason = (
            f"Its neighbours vote {votes[1]:.0%} for {suggested} and {votes[0]:.0%} for {own}; a linear probe on the "
            f"features gives {probe[1]:.0%} and {probe[0]:.0%}."
        )
        numbers = [f"{value:.4f}" for value in (*votes, *probe)]
        score = f"{float(found.score[i]):.4f}"
        table.rows.append((*_image(collection, i), score, suggested, found.judge(i), *numbers, reason))
    return table


def _surprising(collection: Collection, support: Support, findings: Findings) -> Table:
    own = support.self_match()
    rows = []
    for i, excess in zip(findings.surprising.tolist(), findings.excess.tolist(), strict=True):
        best, p = int(support.neighbours[i, 0]), float(support.p[i, 0])
        reason = f"Its best match is image {best} with {p:.0%}; itself it matches with {float(own[i]):.0%}."
        rows.append(
            (*_image(collection, i), f"{excess:.4f}", str(best), f"{p:.4f}", f"{float(own[i]):.4f}", reason)
        )
    return Table((*IMAGE, "score", "best_match", "best_probability", "self_probability", "reason"), rows)


def _lonely(collection: Collection, findings: Findings) -> Table:
    rows = []
    for i in findings.lonely.tolist():
        nearest, distance = int(findings.nearest[i]), float(findings.distance[i])
        reason = f"No other image has it among its neighbours; the nearest is image {nearest}, {distance:.3f} away."
        rows.append((*_image(collection, i), f"{distance:.4f}", str(nearest), reason))
    return Table((*IMAGE, "score", "nearest", "reason"), rows)


# ---- files ----


def write_csv(folder: Path, tables: dict[str, Table], known: tuple[str, ...]) -> list[Path]:
    """One file per list; of the `known` lists that there are none of now, earlier files are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in set(known) - tables.keys():
        (folder / f"{name}.csv").unlink(missing_ok=True)
    for name, table in tables.items():
        path = folder / f"{name}.csv"
        atomic_write(path, to_csv(table.columns, table.rows).encode())
        written.append(path)
    return written


# ---- the table of a gallery ----

COLUMNS = ("query", "query_file", "query_class", "rank", "id", "file", "class", "p_win")
P_WIN = r"$p_{\mathrm{win}}$"
_LONG = 12  # letters of a word after which it may be broken


def as_csv(supports: Opened, rows: Sequence[Row]) -> bytes:
    """One line per neighbour, safe in a spreadsheet; a class is empty where there is no label."""
    images = supports.collection
    lines = [
        [
            *(str(row.query), images.names[row.query], images.class_name(row.query)),
            *(str(rank), str(j), images.names[j], images.class_name(j), f"{share:.6f}"),
        ]
        for row in rows
        for rank, (j, share) in enumerate(zip(row.ids, row.p, strict=True), 1)
    ]
    return to_csv(COLUMNS, lines).encode()


def as_latex(supports: Opened, rows: Sequence[Row], caption: str) -> bytes:
    r"""A `longtable`, which goes on over pages: it needs \usepackage{longtable} and nothing else."""
    images = supports.collection
    labelled = images.labels is not None
    headings = ["rank", "id", "file", *(["class"] if labelled else []), P_WIN]
    form = r"rrp{0.45\linewidth}" + (r"p{0.2\linewidth}" if labelled else "") + "r"

    def lines() -> Iterator[str]:
        yield r"% Needs \usepackage{longtable} in the preamble; then \input this file."
        yield r"\begingroup\footnotesize"
        yield rf"\begin{{longtable}}{{{form}}}"
        words = escape_latex(caption).replace(r"p\_win", P_WIN)
        yield rf"\caption{{{words}}}\\"
        yield r"\hline"
        yield " & ".join(headings) + r" \\"
        yield r"\hline"
        yield r"\endhead"
        for row in rows:
            what = rf"image {row.query}, {breakable(images.names[row.query])}"
            if name := images.class_name(row.query):
                what += f", {escape_latex(name)}"
            what = rf"{{\raggedright \textbf{{Query:}} {what}\par}}"
            yield rf"\multicolumn{{{len(headings)}}}{{p{{0.9\linewidth}}}}{{{what}}} \\*"
            for rank, (j, share) in enumerate(zip(row.ids, row.p, strict=True), 1):
                file = "the query" if j == row.query else rf"\raggedright {breakable(images.names[j])}"
                cells = [str(rank), str(j), file]
                if labelled:
                    cells.append(rf"\raggedright {escape_latex(images.class_name(j))}")
                yield " & ".join([*cells, f"{share:.2f}"]) + r" \\"
            yield r"\hline"
        yield r"\end{longtable}"
        yield r"\endgroup"

    return ("\n".join(lines()) + "\n").encode()


def breakable(name: str) -> str:
    """A file name as LaTeX, in typewriter letters, that may go on in the next line after a mark, or within a long
    word."""
    pieces = []
    for piece in re.findall(rf"[^ /_\-.]{{1,{_LONG}}}|[ /_\-.]", unicodedata.normalize("NFC", name)):
        pieces.append("\\ " if piece == " " else escape_latex(piece))
        if piece in "/_-." or len(piece) == _LONG:
            pieces.append(r"\allowbreak{}")
    return rf"\texttt{{{''.join(pieces)}}}"
