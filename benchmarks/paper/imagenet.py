"""The same tables with the paper's recipes on ImageNet: which commands a cell takes, and what is read from its run.

Pretraining is started by `--launch`, on one device by default; evaluations by one process. Nobody here could run this
to its end: tests see to it that every command is understood.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import adasim

from .cell import append, collapse_of, curves, folder_of, stamp
from .published import ABLATION
from .tables import Cell, cells, read_arm

RECIPES = {"simsiam": "simsiam-resnet50", "dino": "dino-resnet50", "dino-vit": "dino-vit-s16"}
TABLES: dict[str, list[Cell]] = {
    "main": cells("simsiam dino dino-vit", "standard nearest adasim"),
    "oracle": cells("dino-vit", "oracle:p=0 oracle:p=0.5"),
    "ablation": cells("dino-vit", " ".join(ABLATION)),
    "policies": cells("dino-vit", "standard adasim confident"),
}
ADASIM = f"{shlex.quote(sys.executable)} -m adasim"


def commands(
    cell: Cell, data: Path, out: Path, launch: str = ADASIM, *, anew: bool = False
) -> list[list[str]]:
    """Pretrain, or go on with it unless `anew`; then k-NN and linear, as published (one rate, the best epoch).

    >>> one = Cell("dino-vit", "adasim:k=5", 0)
    >>> print(*commands(one, Path("in1k"), Path("out"), "torchrun -m adasim")[0])
    torchrun -m adasim pretrain dino-vit-s16 --data in1k --out out --seed 0 --pairs adasim --neighbors.k 5
    """
    pairs, changes = read_arm(cell.arm)
    train = ["pretrain", "--resume", str(out)]
    if anew or not (out / "config.json").exists():
        train = ["pretrain", RECIPES[cell.method], "--data", str(data), "--out", str(out)]
        train += ["--seed", str(cell.seed), "--pairs", pairs]
        train += ["--overwrite"] if anew else []
        section = pairs if pairs == "confident" else "neighbors"
        for name, value in changes.items():
            train += [f"--{section}.{'oracle-p' if name == 'p' else name.replace('_', '-')}", value]
    measures = [["eval", name, str(out), "--data", str(data)] for name in ("knn", "linear")]
    return [[*shlex.split(launch), *train], *([*shlex.split(ADASIM), *measure] for measure in measures)]


def run_cell(
    table: str, cell: Cell, data: Path, runs: Path, results: Path, launch: str, *, anew: bool
) -> None:
    """Run a cell, or go on with it unless `anew`; append its line to RESULTS/TABLE.jsonl."""
    out = folder_of(cell, runs)
    log = out.with_suffix(out.suffix + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    for command in commands(cell, data, out, launch, anew=anew):
        print(shlex.join(command), flush=True)
        shown_and_kept(command, log)
    run = adasim.load_run(out)
    values: dict[str, Any] = {result.protocol: result.value for result in run.results}
    line = {"table": table, **cell._asdict(), **values, "collapse": collapse_of(log), "curves": curves(out)}
    append(results / f"{table}.jsonl", line | stamp())


def shown_and_kept(command: list[str], log: Path) -> None:
    """Run a command; what it prints is shown, and appended to a file."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, open(log, "a") as file:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
