"""Put the paper's claims on trial at desk scale; or its tables and figures with its own recipes, on a cluster.

    python -m benchmarks.paper main --data cifar10              # all cells of a table that have no result yet
    python -m benchmarks.paper main --data cifar10 --cell simsiam/adasim/0        # one cell
    python -m benchmarks.paper main                             # the results so far
    python -m benchmarks.paper all --recipes paper --dry-run    # all that the paper has: data, commands, GPU hours
    python -m benchmarks.paper main --recipes paper --data data --gpus 8          # one of its tables

--data is a folder with train/CLASS/*.png and test/CLASS/*.png (docs/benchmarks.md says how to get CIFAR-10 so); with
--recipes paper, one with a folder for each of its data sets. Each cell is a run, at desk scale of one thread. It may
be stopped at any time and goes on where it was; its result is a line of benchmarks/paper/results/TABLE.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from pathlib import Path

from adasim.registry import PAIRS

from . import cluster
from .cell import RESULTS, done, run_cell
from .results import Results, figure_of, gain_of
from .settings import METHODS, build
from .tables import TABLES, Cell, read_arm


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(TABLES), ", ".join([*cluster.PAPER, "all"])
    parser.add_argument("table", help=f"{names[0]}; with --recipes paper: {names[1]}")
    parser.add_argument("--data", type=Path, help="the images; without it, the results so far are shown")
    parser.add_argument(
        "--cell", nargs="+", type=Cell.read, help="METHOD/ARM/SEED; by default all of the table"
    )
    parser.add_argument(
        "--again", action="store_true", help="also cells that have a result, from their beginning"
    )
    parser.add_argument(
        "--recipes", choices=("desk", "paper"), default="desk", help="`paper`: its own, for those who can"
    )
    parser.add_argument("--weights", help="MODEL:FILE that the table `continued` goes on from")
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"), help="where run folders are kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are appended")
    paper = parser.add_argument_group("with --recipes paper")
    paper.add_argument("--dry-run", action="store_true", help="print a script of all commands; run nothing")
    paper.add_argument("--gpus", type=int, default=8, help="processes that torchrun starts on this node")
    paper.add_argument("--launch", help='another start than torchrun\'s, such as "srun python"')
    paper.add_argument("--gpu", default="A100", help="whose hours a dry run estimates: V100, A100, H100 ...")
    args = parser.parse_args()
    tables = [*cluster.PAPER, "all"] if args.recipes == "paper" else [*TABLES]
    if args.table not in tables:
        sys.exit(f"There is no table {args.table} with --recipes {args.recipes}, only {', '.join(tables)}.")
    for cell in args.cell or ():
        check(cell, cluster.TRAININGS if args.recipes == "paper" else METHODS)
    if args.recipes == "paper":
        return at_paper_scale(args)
    if args.dry_run:
        sys.exit("--dry-run is for --recipes paper.")
    if args.data is not None:
        run(args, args.cell or TABLES[args.table])
    show(Results(args.results), TABLES[args.table])


def at_paper_scale(args: argparse.Namespace) -> None:
    """Print, run or show tables of the paper with its own recipes."""
    from . import dry_run

    names = [*cluster.PAPER] if args.table == "all" else [args.table]
    launch = args.launch or ("python" if args.gpus == 1 else f"torchrun --nproc-per-node {args.gpus}")
    results: Path = args.results / "cluster"
    if results.is_relative_to(Path.cwd()):
        results = results.relative_to(Path.cwd())
    place = cluster.Cluster(args.data or Path("data"), args.runs / "cluster", results, launch)
    if args.gpu not in dry_run.GPUS:
        sys.exit(f"There is no --gpu {args.gpu}, only {', '.join(dry_run.GPUS)}.")
    if args.dry_run:
        return dry_run.show(names, place, args.gpu)
    failed = []
    for name in names:
        if args.data is not None:
            if lacking := [d for d in dry_run.needed(name) if not (args.data / d).exists()]:
                how = f"python -m benchmarks.paper {name} --recipes paper --dry-run"
                sys.exit(f"{args.data} has no folder {', '.join(lacking)}. How to get them: {how}")
            failed += cluster.run(name, place, args.cell, again=args.again)
        else:
            for cell, line in done(place.results / f"{name}.jsonl").items():
                figures = "  ".join(f"{what} {value:.1f}" for what, value in line["figures"].items())
                print(f"{name}  {cell}  {figures}  {'collapse' if line.get('collapse') else ''}")
    if failed:
        sys.exit(f"No result of {', '.join(failed)}.")


def check(cell: Cell, methods: Collection[str]) -> None:
    """Refuse a cell that nobody can run, with a sentence."""
    if cell.method not in methods:
        sys.exit(f"--cell {cell}: there is no method {cell.method}, only {', '.join(methods)}.")
    if (pairs := read_arm(cell.arm)[0]) not in PAIRS:
        sys.exit(f"--cell {cell}: there are no pairs {pairs}, only {', '.join(PAIRS.names())}.")
    if methods is METHODS:
        build(*cell)  # refuses settings that the pairs do not have


def run(args: argparse.Namespace, cells: list[Cell]) -> None:
    """Run the cells that have no result yet, or all if asked for --again."""
    if not (args.data / "train").is_dir():
        sys.exit(f"{args.data} has no folder train. See docs/benchmarks.md.")
    for cell in cells:
        if read_arm(cell.arm)[0] not in PAIRS:
            print(f"{cell} is not run: adasim no longer has these pairs. Its results are kept.")
        elif args.again or cell not in done(args.results / f"{args.table}.jsonl"):
            run_cell(args.table, cell, args.data, args.runs, args.results, args.weights)
        elif args.cell:
            print(f"{cell} has a result already; --again runs it once more.")


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
