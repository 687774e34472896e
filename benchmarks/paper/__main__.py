"""Put the paper's claims on trial at desk scale.

    python -m benchmarks.paper main --data cifar10              # all cells of a table that have no result yet
    python -m benchmarks.paper main --data cifar10 --cell simsiam/adasim/0        # one cell
    python -m benchmarks.paper main                             # the results so far

--data is a folder with train/CLASS/*.png and test/CLASS/*.png (docs/benchmarks.md says how to get CIFAR-10 so).
Each cell is a run of one thread. It may be stopped at any time and goes on where it was; its result is a line of
benchmarks/paper/results/TABLE.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from .cell import RESULTS, done, run_cell
from .tables import TABLES, Cell


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=TABLES, help="which table")
    parser.add_argument("--data", type=Path, help="the images; without it, the results so far are shown")
    parser.add_argument(
        "--cell", nargs="+", type=Cell.read, help="METHOD/ARM/SEED; by default all of the table"
    )
    parser.add_argument("--again", action="store_true", help="also cells that have a result")
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"), help="where run folders are kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are appended")
    args = parser.parse_args()
    path = args.results / f"{args.table}.jsonl"
    if args.data is not None:
        if not (args.data / "train").is_dir() or not (args.data / "test").is_dir():
            sys.exit(f"{args.data} has no folders train and test. See docs/benchmarks.md.")
        for cell in args.cell or TABLES[args.table]:
            if args.again or cell not in done(path):
                run_cell(args.table, cell, args.data, args.runs, args.results)
    show(path)


def show(path: Path) -> None:
    """The cells so far: mean and deviation over seeds, and the gain over standard pairs with the same seeds."""
    standard = {
        (cell.method, cell.seed): line
        for file in path.parent.glob("*.jsonl")
        if file.stem in TABLES
        for cell, line in done(file).items()
        if cell.arm == "standard"
    }
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell, line in done(path).items():
        groups.setdefault((cell.method, cell.arm), []).append(line)
    print(f"{'method':15}{'arm':36}{'seeds':7}{'k-NN':14}{'gain':16}{'linear':14}{'bootstrapped':14}")
    for (method, arm), lines in groups.items():
        knn, linear = ([line[name] for line in lines if name in line] for name in ("knn", "linear"))
        pairs = [(line, standard.get((method, line["seed"]))) for line in lines if arm != "standard"]
        gains = [ours["knn"] - theirs["knn"] for ours, theirs in pairs if theirs and "knn" in ours]
        ratio = statistics.mean(line["curves"]["bootstrapped"][-1] for line in lines)
        notes = "collapse" if any(line["collapse"] for line in lines) else ""
        print(
            f"{method:15}{arm:36}{len(lines):<7}{_figure(knn):14}{_gain(gains):16}{_figure(linear):14}"
            f"{ratio:<14.1%}{notes}"
        )


def _gain(differences: list[float]) -> str:
    """Mean over seeds and its standard error."""
    if not differences:
        return ""
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else None
    return f"{statistics.mean(differences):+.2f}" + ("" if error is None else f" ± {error:.2f}")


def _figure(values: list[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


if __name__ == "__main__":
    main()
