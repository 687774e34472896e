"""The table beside the picture: ids, files, classes and probabilities, as CSV and as LaTeX."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from adasim.gallery.opening import Supports
from adasim.util.csv import to_csv

COLUMNS = ("query", "query_file", "query_class", "rank", "id", "file", "class", "p_win")
P_WIN = r"$p_{\mathrm{win}}$"


@dataclass(frozen=True)
class Row:
    """One image and its support, best first."""

    query: int
    ids: list[int]
    p: list[float]


def rows_of(supports: Supports, ids: Sequence[int]) -> list[Row]:
    """The whole support of each image."""
    neighbours, p = supports.of(torch.tensor(ids, dtype=torch.int64))
    return [
        Row(
            query,
            [j for j in found if j >= 0],
            [share for j, share in zip(found, shares, strict=True) if j >= 0],
        )
        for query, found, shares in zip(ids, neighbours.tolist(), p.tolist(), strict=True)
    ]


def as_csv(supports: Supports, rows: Sequence[Row]) -> bytes:
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


def as_latex(supports: Supports, rows: Sequence[Row], caption: str) -> bytes:
    r"""A `longtable`, which goes on over pages: it needs \usepackage{longtable} and nothing else."""
    images = supports.collection
    labelled = images.labels is not None
    headings = ["rank", "id", "file", *(["class"] if labelled else []), P_WIN]
    form = r"rrp{0.45\linewidth}" + (r"p{0.2\linewidth}" if labelled else "") + "r"

    def lines() -> Iterator[str]:
        yield r"% Needs \usepackage{longtable} in the preamble; then \input this file."
        yield r"\begingroup\footnotesize"
        yield rf"\begin{{longtable}}{{{form}}}"
        words = escape(caption).replace(r"p\_win", P_WIN)
        yield rf"\caption{{{words}}}\\"
        yield r"\hline"
        yield " & ".join(headings) + r" \\"
        yield r"\hline"
        yield r"\endhead"
        for row in rows:
            what = rf"image {row.query}, {breakable(images.names[row.query])}"
            if name := images.class_name(row.query):
                what += f", {escape(name)}"
            what = rf"{{\raggedright \textbf{{Query:}} {what}\par}}"
            yield rf"\multicolumn{{{len(headings)}}}{{p{{0.9\linewidth}}}}{{{what}}} \\*"
            for rank, (j, share) in enumerate(zip(row.ids, row.p, strict=True), 1):
                file = "the query" if j == row.query else rf"\raggedright {breakable(images.names[j])}"
                cells = [str(rank), str(j), file]
                if labelled:
                    cells.append(rf"\raggedright {escape(images.class_name(j))}")
                yield " & ".join([*cells, f"{share:.2f}"]) + r" \\"
            yield r"\hline"
        yield r"\end{longtable}"
        yield r"\endgroup"

    return ("\n".join(lines()) + "\n").encode()


# ---- text in LaTeX ----

_SPECIAL = {
    **{character: "\\" + character for character in "&%#$_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    # Two of these beside each other would become a dash or a quotation mark; a bracket after \\ its argument.
    **{character: f"{{{character}}}" for character in "-`'[]*"},
    **{"ß": r"\ss{}", "æ": r"\ae{}", "Æ": r"\AE{}", "ø": r"\o{}", "Ø": r"\O{}", "œ": r"\oe{}", "Œ": r"\OE{}"},
    **{"ł": r"\l{}", "Ł": r"\L{}"},
}
_LONG = 12  # letters of a word after which it may be broken
_ACCENTS = dict(
    zip(
        "\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327",
        ("`", "'", "^", "~", "=", "u", ".", '"', "r", "H", "v", "c"),
        strict=True,
    )
)


def escape(text: str) -> str:
    r"""Any text as LaTeX that every engine and encoding can set: letters with accents as commands, and what has no
    command by its number.

    >>> print(escape("50% of_{é}"))
    50\% of\_\{\'{e}\}
    >>> print(escape("猫.png"))
    U+732B.png
    """
    return "".join(map(_character, unicodedata.normalize("NFC", text)))


def breakable(name: str) -> str:
    """A file name as LaTeX, in typewriter letters, that may go on in the next line after a mark, or within a long
    word."""
    pieces, since = [], 0
    for c in unicodedata.normalize("NFC", name):
        pieces.append("\\ " if c == " " else _character(c))
        since = 0 if c in " /_-." else since + 1
        if c in "/_-." or (since and since % _LONG == 0):
            pieces.append(r"\allowbreak{}")
    return rf"\texttt{{{''.join(pieces)}}}"


def _character(c: str) -> str:
    if c in _SPECIAL:
        return _SPECIAL[c]
    if " " <= c <= "~":
        return c
    parts = unicodedata.normalize("NFD", c)
    if len(parts) == 2 and parts[0].isascii() and parts[0].isalpha() and parts[1] in _ACCENTS:
        return f"\\{_ACCENTS[parts[1]]}{{{parts[0]}}}"
    return f"U+{ord(c):04X}"
