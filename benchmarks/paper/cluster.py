"""Every table and figure of the paper with its own recipes: which runs it takes, and how they are measured.

`PAPER` describes them, `commands` turns a run into command lines. A dry run prints these (dry_run.py), `run` starts
them. Nobody here could run this to its end: a test does so with some of the runs and 64 small images.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import adasim
from adasim.eval.results import RESULTS_FILE, read_results
from adasim.runs.metrics import read_metrics

from .cell import append, collapse_of, curves, done, folder_of, stamp
from .prepare import CLASSES
from .published import ABLATION
from .tables import Cell, cells, read_arm

Command = list[str]


class Training(NamedTuple):
    """How a method of the paper is pretrained."""

    title: str
    recipe: str
    data: str = "imagenet"
    changes: str = ""


class Item(NamedTuple):
    """A table or figure: its runs, what each is measured by, and what is made of all of them."""

    title: str
    cells: list[Cell]
    measures: str
    afterwards: str = "table"


TRAININGS = {
    "simsiam": Training("SimSiam, ResNet-50", "simsiam-resnet50"),
    "dino": Training("DINO, ResNet-50", "dino-resnet50"),
    "dino-vit": Training("DINO, ViT-S/16", "dino-vit-s16"),
    "dino-vit-b": Training("DINO, ViT-B/16", "dino-vit-b16", changes="--save.encoder-every 50"),
    # The paper gives no recipe for COCO; the same authors' other runs there have batches of 256.
    "dino-vit-coco": Training("DINO, ViT-S/16, COCO", "dino-vit-s16", "coco/train2017", "--batch-size 256"),
}
SUPERVISED = "supervised"
"""In place of a method: an encoder of timm's, which the arm names, that is only measured."""
ARMS = "standard nearest nearest:space=latent adasim"
HOOD = "adasim:window=50,k=10"
"""The figures' runs have w = 50, and galleries of ten neighbours."""

PAPER: dict[str, Item] = {
    "oracle": Item(
        "Table 1. Partners by the labels: k-NN and linear accuracy",
        cells("dino-vit", "standard oracle:p=0 oracle:p=0.5"),
        "knn linear",
    ),
    "main": Item(
        "Table 2. ImageNet-1k: k-NN and linear accuracy of all methods",
        cells("simsiam dino dino-vit dino-vit-b", ARMS),
        "knn linear",
    ),
    "fewshot": Item(
        "Table 3. 5-way 5-shot accuracy on eight data sets",
        cells("simsiam dino dino-vit", "standard nearest adasim") + cells(SUPERVISED, "resnet50.tv_in1k"),
        "fewshot",
    ),
    "ablation": Item(
        "Table 4. tau, w and K: k-NN and linear accuracy", cells("dino-vit", " ".join(ABLATION)), "knn linear"
    ),
    "runtime": Item("Table A1. Seconds a step, without and with the memory", [], "", "runtime"),
    "segmentation": Item(
        "Table A2. Linear segmentation after ImageNet-1k and after COCO",
        cells("dino-vit", "standard nearest adasim")
        + cells("dino-vit-coco", "standard nearest adasim:window=50,k=3"),
        "voc coco-things coco-stuff",
    ),
    "hood": Item(
        "Figure: joined pairs and partners' classes over training, for each tau",
        cells("dino-vit", f"{HOOD},tau=0.05 {HOOD},tau=0.1 {HOOD} {HOOD},tau=0.4"),
        "",
        "hood",
    ),
    "gallery": Item(
        "Figures: images and their support, also where another image is nearest",
        cells("dino-vit", HOOD),
        "",
        "random intriguing other-class",
    ),
    "schedule": Item(
        "Figure: k-NN accuracy of ViT-B/16 over 800 epochs",
        cells("dino-vit-b", "standard adasim"),
        "snapshots",
        "schedule",
    ),
}

MEASURES = {
    "knn": "eval knn {run} --data {data}/imagenet",
    "linear": "eval linear {run} --data {data}/imagenet",
    "snapshots": "eval knn {run} --data {data}/imagenet --all-snapshots",
    "fewshot": "eval fewshot {run} --data " + " ".join(f"{{data}}/{name}" for name in CLASSES),
    "voc": "eval segmentation {run} --data {data}/voc --classes 21",
    "coco-things": "eval segmentation {run} --data {data}/coco-things --classes 12",
    "coco-stuff": "eval segmentation {run} --data {data}/coco-stuff --classes 15",
}
"""Of one run. They are started on all GPUs, as pretraining is."""
AFTERWARDS = {
    "hood": "plot {runs} --curves bootstrap nn second-nn --out {figures}/hood.png",
    "schedule": "plot {runs} --curves knn --out {figures}/schedule.png",
    **{
        pick: f"gallery {{runs}} --pick {pick} --count 10 --out {{figures}}/{pick} --overwrite"
        for pick in ("random", "intriguing", "other-class")
    },
}
"""Of all runs, by one process."""
RUNTIME = "benchmarks.paper.runtime --recipe dino-vit-s16 --images 1281167 --batch 128 256 --device cuda"


@dataclass(frozen=True)
class Cluster:
    """Where everything is, and how processes are started."""

    data: Path
    """The folder of all data sets: imagenet/, coco/, voc/, aircraft/ ..."""
    runs: Path
    results: Path
    launch: str = "python"
    """What comes before `-m adasim`: `torchrun --nproc-per-node 8`, `srun python` ..."""

    def run_of(self, cell: Cell) -> str:
        """The run folder, or the name of a model that is no run."""
        return cell.arm if cell.method == SUPERVISED else str(folder_of(cell, self.runs))

    def results_of(self, cell: Cell) -> str:
        """Where `adasim eval table` finds the run's figures."""
        return str(self.runs / f"{cell.arm}.jsonl") if cell.method == SUPERVISED else self.run_of(cell)


def commands(cell: Cell, measures: str, cluster: Cluster, *, anew: bool = False) -> list[Command]:
    """Pretrain, go on with it, or nothing if that is finished (all of it if `anew`); then the measures.

    >>> place = Cluster(Path("data"), Path("runs"), Path("results"), "srun python")
    >>> train, measure = commands(Cell("dino-vit", "adasim:k=5", 0), "knn", place)
    >>> print(*train[:5], *train[-4:])
    srun python -m adasim pretrain --pairs adasim --neighbors.k 5
    >>> print(*measure)
    srun python -m adasim eval knn runs/dino-vit_adasim_k=5_0 --data data/imagenet
    """
    many = [*shlex.split(cluster.launch), "-m", "adasim"]
    names = {"run": cluster.run_of(cell), "data": str(cluster.data)}
    found = [[*many, *(word.format(**names) for word in MEASURES[name].split())] for name in measures.split()]
    if cell.method == SUPERVISED:
        return [[*command, "--results", cluster.results_of(cell)] for command in found]
    train = pretraining(cell, cluster, anew=anew)
    return [*([[*many, *train]] if train else []), *found]


def pretraining(cell: Cell, cluster: Cluster, *, anew: bool) -> Command:
    """The arguments of `adasim` that begin the run, or go on with it; none if it is finished."""
    out = Path(cluster.run_of(cell))
    if not anew and finished(out):
        return []
    if not anew and (out / "config.json").exists():
        return ["pretrain", "--resume", str(out)]
    training, (pairs, changes) = TRAININGS[cell.method], read_arm(cell.arm)
    train = ["pretrain", training.recipe, "--data", f"{cluster.data}/{training.data}", "--out", str(out)]
    train += [*training.changes.split(), "--seed", str(cell.seed), "--pairs", pairs]
    section = pairs if pairs == "nearest" else "neighbors"
    for name, value in changes.items():
        train += [f"--{section}.{'oracle-p' if name == 'p' else name.replace('_', '-')}", value]
    return [*train, "--overwrite"] if anew else train


def finished(run: Path) -> bool:
    """Whether a run came to its end."""
    if not (run / "backbone.safetensors").exists():
        return False
    return sum("epoch_loss" in line for line in read_metrics(run)) == adasim.load_run(run).config.epochs


def afterwards(item: Item, cluster: Cluster, among: Sequence[Cell] | None = None) -> list[Command]:
    """What is made of all runs together: a table for each method, the baseline first, or figures."""
    among = item.cells if among is None else among
    if item.afterwards == "runtime":
        return [[*shlex.split(cluster.launch), "-m", *RUNTIME.split(), "--results", str(cluster.results)]]
    one = ["python", "-m", "adasim"]
    if item.afterwards == "table":
        methods = dict.fromkeys(cell.method for cell in among)
        rows = [[cluster.results_of(c) for c in among if c.method == method] for method in methods]
        return [[*one, "eval", "table", *runs] for runs in rows]
    made = []
    for name in item.afterwards.split():
        words = AFTERWARDS[name].format(runs="{runs}", figures=cluster.results / "figures").split()
        place = words.index("{runs}")
        made.append([*one, *words[:place], *map(cluster.run_of, among), *words[place + 1 :]])
    return made


def shown_and_kept(command: Command, log: Path) -> None:
    """Run a command; what it prints is shown, and appended to a file."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, open(log, "a") as file:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def run(
    name: str,
    cluster: Cluster,
    among: Sequence[Cell] | None = None,
    *,
    again: bool = False,
    execute: Callable[[Command, Path], None] = shown_and_kept,
) -> list[str]:
    """Run the cells of a table that have no result yet, or all if `again`, then what is made of all of them.

    Each cell adds a line to RESULTS/NAME.jsonl. Returns what failed, in words.
    """
    item, results = PAPER[name], cluster.results / f"{name}.jsonl"
    failed: list[str] = []
    (cluster.results / "figures").mkdir(parents=True, exist_ok=True)
    cluster.runs.mkdir(parents=True, exist_ok=True)

    def attempt(what: str, todo: list[Command], log: Path) -> bool:
        try:
            for command in todo:
                print(shlex.join(command), flush=True)
                execute(command, log)
        except subprocess.CalledProcessError as error:
            failed.append(f"{what} (exit code {error.returncode})")
            return False
        return True

    measured = []
    for cell in item.cells if among is None else among:
        known = cell in done(results)
        log = cluster.runs / f"{folder_of(cell, cluster.runs).name}.log"
        if again or not known:
            if not attempt(str(cell), commands(cell, item.measures, cluster, anew=again and known), log):
                continue
            append(results, line_of(name, cell, cluster, log))
        measured.append(cell)
    if measured or not item.cells:
        attempt(name, afterwards(item, cluster, measured), cluster.runs / f"{name}.log")
    return failed


def line_of(name: str, cell: Cell, cluster: Cluster, log: Path) -> dict[str, Any]:
    """What a cell's run has come to: its newest figures by protocol and data, its curves, and a collapse."""
    line: dict[str, Any] = {"table": name, **cell._asdict()}
    where = Path(cluster.results_of(cell))
    results = read_results(where) if where.is_file() or (where / RESULTS_FILE).is_file() else []
    final = [result for result in results if "epoch" not in result.model]
    line |= {r.protocol: r.value for r in final if r.protocol in ("knn", "linear")}
    line["figures"] = {f"{r.protocol} {r.data['name']}": r.value for r in final}
    line["snapshots"] = {r.model["epoch"]: r.value for r in results if "epoch" in r.model}
    if cell.method != SUPERVISED:
        line |= {"collapse": collapse_of(log) if log.exists() else [], "curves": curves(where)}
    return line | stamp()
