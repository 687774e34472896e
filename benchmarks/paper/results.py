"""The lines of benchmarks/paper/results, and figures over their seeds."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from adasim.util.units import mean_and_deviation, paired_gain, with_spread

from .tables import TABLES, Cell, read_arm, transferred

Lines = list[dict[str, Any]]


class Results:
    """What the files hold: the newest line of each cell, whichever table it was run for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        lines = [line for table in TABLES for line in self.lines(table)]
        self.cells = newest(sorted(lines, key=lambda line: line.get("date", "")))

    def lines(self, name: str) -> Lines:
        """All lines of a file, in their order."""
        return read_lines(self.folder / f"{name}.jsonl")

    def seeds(self, method: str, arm: str) -> Lines:
        """The arm's runs, by seed."""
        return [line for cell, line in sorted(self.cells.items()) if (cell.method, cell.arm) == (method, arm)]

    def arms(self, method: str, pairs: str) -> list[str]:
        """The arms of a pair policy that have been run, or are to be, with a method: itself first."""
        planned = [cell for cells in TABLES.values() for cell in cells]
        known = {cell.arm for cell in (*self.cells, *planned) if cell.method == method}
        return sorted((arm for arm in known if read_arm(arm)[0] == pairs), key=lambda arm: (":" in arm, arm))

    def transfer(self) -> dict[tuple[str, str], Lines]:
        """Few-shot accuracies, their mean, and mean IoU by method and arm, in the order of the tables."""
        measured = newest(self.lines("transfer"))
        methods = list(dict.fromkeys(c.method for c in transferred()))
        order = sorted(
            dict.fromkeys((c.method, c.arm) for c in transferred()), key=lambda key: methods.index(key[0])
        )
        found: dict[tuple[str, str], Lines] = {key: [] for key in order}
        for cell, line in sorted(measured.items()):
            accuracies = {target: accuracy for target, (accuracy, _) in line["fewshot"].items()}
            figures = accuracies | {
                # The older lines resized Fashion-MNIST bicubically; the others are not resized at all.
                "mean": statistics.mean(accuracies[target] for target in ("cifar10", "patterns")),
                "miou": line["segmentation"],
            }
            found[cell.method, cell.arm].append({"seed": cell.seed} | figures)
        return {key: lines for key, lines in found.items() if lines}

    def unpaired(self) -> list[Cell]:
        """Cells whose first epoch is not that of standard pairs of the same seed, to the digits that are kept.

        No arm joins two images in its first epoch, so another program, or other images, made the difference.
        """
        first = {cell: line["curves"]["loss"][0] for cell, line in self.cells.items() if line["curves"]}
        standard = {cell: Cell(cell.method, "standard", cell.seed) for cell in first}
        return sorted(c for c, base in standard.items() if base in first and first[c] != first[base])

    def frontier(self, run: str = "simsiam_standard_0") -> dict[str, Any]:
        """The tables of a frozen encoder, as it was last looked at."""
        return next(line["tables"] for line in reversed(self.lines("frontier")) if line["run"] == run)


def shares(line: dict[str, Any], epochs: slice = slice(None)) -> tuple[float, float]:
    """Right and wrong partners as shares of all pairs, in these epochs of a run: pairs of one class, and of two."""
    joined, right = (
        statistics.mean(line["curves"][name][epochs]) for name in ("bootstrapped", "partner_accuracy")
    )
    return joined - (1 - right), 1 - right


def read_lines(path: Path) -> Lines:
    """All lines of a file of results, in their order; none if there is no such file."""
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def newest(lines: Lines) -> dict[Cell, dict[str, Any]]:
    """The last line of each cell."""
    return {Cell(line["method"], line["arm"], line["seed"]): line for line in lines}


def figure_of(lines: Lines, name: str) -> str:
    """Mean over seeds, with the standard deviation where there are several."""
    values = [line[name] for line in lines if name in line]
    return with_spread(*mean_and_deviation(values)) if values else ""


def gain_of(ours: Lines, standard: Lines, name: str) -> str:
    """The mean difference to standard pairs of the same seed, with its standard error where there are several.

    >>> standard = [{"seed": 1, "knn": 2.0}, {"seed": 0, "knn": 1.0}]
    >>> gain_of([{"seed": 0, "knn": 3.0}, {"seed": 1, "knn": 6.0}], standard, "knn")
    '+3.0 ± 1.0'
    """
    first, base = ({line["seed"]: line[name] for line in lines if name in line} for lines in (ours, standard))
    gain = paired_gain(first, base)
    return "" if gain is None or ours == standard else with_spread(*gain, "+")
