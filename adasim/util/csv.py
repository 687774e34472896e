"""Text that others wrote, in tables: CSV in which a spreadsheet finds nothing to run, and LaTeX that can be set."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from adasim.util.errors import UserError

_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


def safe(text: str) -> str:
    """A text that is not a formula to any spreadsheet: an apostrophe goes before what could begin one.

    It also goes before an apostrophe, so that `original` can take it off again.

    >>> safe("=1+1"), safe("'quoted'"), safe("-0.5"), safe("cat.png")
    ("'=1+1", "''quoted'", '-0.5', 'cat.png')
    """
    return f"'{text}" if text[:1] in tuple("=+-@\t\r\n'") and not _NUMBER.fullmatch(text) else text


def original(text: str) -> str:
    """The inverse of `safe`."""
    return text[1:] if text.startswith("'") else text


def to_csv(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as RFC 4180 has it: lines end with CRLF, fields are quoted where they must be."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\r\n")
    writer.writerow(columns)
    writer.writerows([safe(field) for field in row] for row in rows)
    return file.getvalue()


def read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and the rows of a file, which a spreadsheet may have saved; what `safe` added is taken off."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"{path} cannot be read as a CSV file: {reason}.") from None
    separator = ";" if text.partition("\n")[0].count(";") > text.partition("\n")[0].count(",") else ","
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True))
    except csv.Error as error:
        raise UserError(f"{path} is not a CSV file: {error}.") from None
    columns = lines[0] if lines else []
    rows = [dict(zip(columns, map(original, line), strict=False)) for line in lines[1:] if line]
    return columns, rows


_LATEX = {
    **{character: "\\" + character for character in "&%#$_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{character: f"{{{character}}}" for character in "[]*"},  # after \\ they would be its arguments
}


def escape_latex(text: str) -> str:
    r"""Any text as LaTeX that every engine can set: Latin letters as they are, other scripts by their numbers.

    >>> print(escape_latex("50% of_{é}"), escape_latex("猫.png"))
    50\% of\_\{é\} U+732B.png
    """
    escaped = "".join(map(_latex, unicodedata.normalize("NFC", text)))
    return re.sub(r"(?<=[-`'?!])(?=[-`'])", "{}", escaped)  # lest two become a dash or a quotation mark


def _latex(c: str) -> str:
    parts = unicodedata.normalize("NFD", c)  # a letter and its accents
    latin = " " <= c < "\u0180" and parts[0].isascii() and max(parts) < "\u0328"
    return _LATEX.get(c) or (c if latin or c in "ßæÆøØœŒłŁ" else f"U+{ord(c):04X}")
