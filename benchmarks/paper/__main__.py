"""Put the paper's claims on trial at desk scale.

    python -m benchmarks.paper main --data cifar10              # all cells of a table that have no result yet
    python -m benchmarks.paper main --data cifar10 --cell simsiam/adasim/0        # one cell
    python -m benchmarks.paper main                             # the results so far
    python -m benchmarks.paper main --recipes paper --data imagenet --launch "torchrun --nproc-per-node 8 -m adasim"

--data is a folder with train/CLASS/*.png and test/CLASS/*.png (docs/benchmarks.md says how to get CIFAR-10 so).
Each cell is a run of one thread. It may be stopped at any time and goes on where it was; its result is a line of
benchmarks/paper/results/TABLE.jsonl.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from adasim.registry import PAIRS

from . import imagenet
from .cell import RESULTS, done, run_cell
from .results import Results, figure_of, gain_of
from .settings import METHODS, build
from .tables import TABLES, Cell, read_arm


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=TABLES, help="which table")
    parser.add_argument("--data", type=Path, help="the images; without it, the results so far are shown")
    parser.add_argument(
        "--cell", nargs="+", type=Cell.read, help="METHOD/ARM/SEED; by default all of the table"
    )
    parser.add_argument(
        "--again", action="store_true", help="also cells that have a result, from their beginning"
    )
    parser.add_argument(
        "--recipes",
        choices=("desk", "paper"),
        default="desk",
        help="`paper`: ResNet-50 and ViT-S/16 on ImageNet, for those who can",
    )
    parser.add_argument("--launch", default=imagenet.ADASIM, help="what starts a pretraining of the paper's")
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"), help="where run folders are kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are appended")
    args = parser.parse_args()
    at_paper_scale = args.recipes == "paper"
    if at_paper_scale and args.table not in imagenet.TABLES:
        sys.exit(f"The paper has no table {args.table}. With its recipes: {', '.join(imagenet.TABLES)}.")
    cells = (imagenet.TABLES if at_paper_scale else TABLES)[args.table]
    methods = imagenet.RECIPES if at_paper_scale else METHODS
    for cell in args.cell or ():
        check(cell, methods)
    results = args.results / "imagenet" if at_paper_scale else args.results
    if args.data is not None:
        run(args, args.cell or cells, results)
    show(Results(results), cells)


def check(cell: Cell, methods: Collection[str]) -> None:
    """Refuse a cell that nobody can run, with a sentence."""
    if cell.method not in methods:
        sys.exit(f"--cell {cell}: there is no method {cell.method}, only {', '.join(methods)}.")
    if (pairs := read_arm(cell.arm)[0]) not in PAIRS:
        sys.exit(f"--cell {cell}: there are no pairs {pairs}, only {', '.join(PAIRS.names())}.")
    if methods is METHODS:
        build(*cell)  # refuses settings that the pairs do not have


def run(args: argparse.Namespace, cells: list[Cell], results: Path) -> None:
    """Run the cells that have no result yet, or all if asked for --again."""
    if not (args.data / "train").is_dir():
        sys.exit(f"{args.data} has no folder train. See docs/benchmarks.md.")
    failed = []
    for cell in cells:
        known = cell in done(results / f"{args.table}.jsonl")
        if known and not args.again:
            if args.cell:
                print(f"{cell} has a result already; --again runs it once more.")
            continue
        if args.recipes == "desk":
            run_cell(args.table, cell, args.data, args.runs, results)
            continue
        try:
            runs = args.runs / "imagenet"
            imagenet.run_cell(args.table, cell, args.data, runs, results, args.launch, anew=known)
        except subprocess.CalledProcessError as error:
            failed.append(f"{cell} (exit code {error.returncode})")
    if failed:
        sys.exit(f"No result of {', '.join(failed)}.")


def show(results: Results, cells: list[Cell]) -> None:
    """The cells so far: mean and deviation over seeds, and the gain over standard pairs of the same seeds."""
    heads = ("method", "arm", "seeds", "k-NN", "gain", "linear", "gain")
    widths = (15, 36, 7, 14, 14, 14, 14)
    print("".join(f"{head:{width}}" for head, width in zip(heads, widths, strict=True)))
    for method, arm in dict.fromkeys((cell.method, cell.arm) for cell in cells):
        lines, standard = results.seeds(method, arm), results.seeds(method, "standard")
        row = [method, arm, str(len(lines))]
        for name in ("knn", "linear"):
            row += [figure_of(lines, name) or "-", gain_of(lines, standard, name)]
        notes = "collapse" if any(line["collapse"] for line in lines) else ""
        print("".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) + notes)


if __name__ == "__main__":
    main()
