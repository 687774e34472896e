"""A comparison of runs as the paper's main table: for the terminal, for Markdown, for LaTeX."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from adasim.eval.results import Comparison
from adasim.util.terminal import printable

_LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """A row for each run; where that is too wide for the console, a column for each, as many as fit side by side.

    The best value of each protocol is bold; gains over the first run are green, losses red. No number is ever cut.
    """
    names = [printable(name) for name, _ in comparison.rows]
    cells = _styled(comparison)
    table = Table(box=None, padding=(0, 2))
    table.add_column("run")
    for protocol, setting, data in comparison.headings:
        what = "\n".join(map(printable, (setting, data)))
        table.add_column(Text.assemble(printable(protocol), "\n", (what, "dim")), justify="right")
    for name, row in zip(names, cells, strict=True):
        table.add_row(Text(name), *row)
    wanted = console.measure(table, options=console.options.update(max_width=10**6)).maximum
    if wanted <= console.width:
        console.print(table)
        return
    # Names are wrapped, so as to have many runs side by side.
    width = max(len(cell) for row in cells for cell in row)
    heads = [Text(", ".join(map(printable, heading))) for heading in comparison.headings]
    left = console.width - 2 - len(names) * (width + 2)
    first = min(max(map(len, heads)), max(20, console.width // 3, left))
    side_by_side = max(1, (console.width - first - 2) // (width + 2))
    for start in range(0, len(names), side_by_side):
        if start:
            console.print()
        shown = slice(start, start + side_by_side)
        table = Table(box=None, padding=(0, 1))
        table.add_column("", width=first, overflow="fold")
        for name in names[shown]:
            table.add_column(Text(name), width=width, justify="right", overflow="fold")
        for head, *row in zip(heads, *cells[shown], strict=True):
            table.add_row(head, *row)
        console.print(table)


def _styled(comparison: Comparison) -> list[list[Text]]:
    """The cells of each run, for the terminal."""
    best = _best(comparison)
    styled = []
    for _, cells in comparison.rows:
        row = []
        for cell, top in zip(cells, best, strict=True):
            text = Text(
                "-" if cell is None else f"{cell[0]:.1f}", style="bold" if cell and cell[0] == top else ""
            )
            if cell is not None and cell[1] is not None:
                style = "green" if cell[1] > 0 else "red" if cell[1] < 0 else "dim"
                text.append(f" ({cell[1]:+.1f})", style=style)
            row.append(text)
        styled.append(row)
    return styled


def to_markdown(comparison: Comparison) -> str:
    """A table of pipes; the best value of each column is bold."""
    heads = [", ".join(heading) for heading in comparison.headings]
    lines = ["| run | " + " | ".join(head.replace("|", "\\|") for head in heads) + " |"]
    lines.append("|---|" + "---:|" * len(heads))
    for name, cells in _rendered(comparison, lambda value: f"**{value}**"):
        lines.append(f"| {name.replace('|', chr(92) + '|')} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def to_latex(comparison: Comparison) -> str:
    """A tabular with booktabs rules; the best value of each column is bold."""
    columns = "l" + "r" * len(comparison.headings)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    for level in range(3):  # protocol, setting, data
        heads = [heading[level].translate(_LATEX) for heading in comparison.headings]
        lines.append(" & ".join(["Run" if level == 0 else "", *heads]) + r" \\")
    lines.append(r"\midrule")
    for name, cells in _rendered(comparison, lambda value: rf"\textbf{{{value}}}"):
        lines.append(" & ".join([name.translate(_LATEX), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _rendered(comparison: Comparison, strong: Callable[[str], str]) -> list[tuple[str, list[str]]]:
    best = _best(comparison)
    rendered = []
    for name, cells in comparison.rows:
        row = []
        for cell, top in zip(cells, best, strict=True):
            if cell is None:
                row.append("-")
                continue
            value = f"{cell[0]:.1f}"
            row.append(strong(value) if cell[0] == top else value)
            if cell[1] is not None:
                row[-1] += f" ({cell[1]:+.1f})"
        rendered.append((name, row))
    return rendered


def _best(comparison: Comparison) -> list[float | None]:
    """The greatest value of each column, where there is more than one to choose from."""
    best: list[float | None] = []
    for place in range(len(comparison.headings)):
        values = [cells[place][0] for _, cells in comparison.rows if cells[place] is not None]  # type: ignore[index]
        best.append(max(values) if len(values) > 1 else None)
    return best
