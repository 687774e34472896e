"""Write the tables of docs/results.md, its figures, and the README's table of results from the committed results.

    python -m benchmarks.paper.report            # after new lines in benchmarks/paper/results
    python -m benchmarks.paper.report --check    # only say whether the texts are up to date

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`; the words around it are written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from . import figures
from .blocks import blocks
from .cell import RESULTS
from .results import Results

ROOT = Path(__file__).parents[2]
TEXTS = (ROOT / "README.md", ROOT / "docs" / "results.md")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a text is out of date")
    args = parser.parse_args()
    results = Results(RESULTS)
    tables = blocks(results)
    stale = []
    for path in TEXTS:
        old = path.read_text()
        new = filled(old, tables)
        if new != old:
            stale.append(path.name)
            if not args.check:
                path.write_text(new)
    if args.check:
        sys.exit(f"Out of date: {', '.join(stale)}. Run python -m benchmarks.paper.report." if stale else 0)
    figures.draw(results, ROOT / "docs" / "images")
    print(f"Changed: {', '.join(stale) or 'no text'}; figures drawn.")


def filled(text: str, tables: dict[str, str]) -> str:
    """The text with each marked table replaced.

    >>> filled("<!-- a -->old<!-- /a -->", {"a": "new"})
    '<!-- a -->\\nnew\\n<!-- /a -->'
    """
    for name, table in tables.items():
        pattern = re.compile(rf"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
        text = pattern.sub(lambda _, n=name, t=table: f"<!-- {n} -->\n{t}\n<!-- /{n} -->", text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    main()
