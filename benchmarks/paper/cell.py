"""One cell: pretrain, measure once on the test images, and a line of JSON that needs the run folder no more."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import adasim
from adasim.data import open_images
from adasim.runs.metrics import read_metrics
from adasim.train.loop import NonFiniteLossError
from adasim.util.collapse import BEGINNINGS
from adasim.util.files import atomic_write

from .results import newest, read_lines
from .settings import IMAGES_PER_CLASS, build, images_per_class
from .starts import resolve
from .tables import Cell

RESULTS = Path(__file__).parent / "results"
CURVES = {
    "knn_top1": "knn",
    "bootstrap_ratio": "bootstrapped",
    "partner_accuracy": "partner_accuracy",
    "second_neighbour_accuracy": "second_neighbour_accuracy",
    "nn_self_top1": "own_nearest",
    "epoch_loss": "loss",
    "epoch_feature_spread": "spread",
    "epoch_rankme": "rankme",
    "epoch_teacher_entropy_share": "teacher_entropy",
}
"""What is kept of each epoch, by its name in metrics.jsonl and here."""


def prepare(data: Path, runs: Path, per_class: int = IMAGES_PER_CLASS) -> Path:
    """The first training images of each class, and all test images, as one file of arrays, made once."""
    folder = runs if per_class == IMAGES_PER_CLASS else runs / f"{per_class}-per-class"
    bench, source = folder / "bench.npz", folder / "bench.source"
    if bench.exists() and source.exists() and source.read_text() != data.name:
        raise SystemExit(
            f"{bench} holds images of {source.read_text()}, not of {data.name}. Name another --runs."
        )
    if not bench.exists():
        arrays: dict[str, Any] = {}
        for split in ("train", "test"):
            images = open_images(str(data), split=split)
            assert images.labels is not None
            places = torch.arange(len(images))
            if split == "train":
                places = torch.cat(
                    [(images.labels == c).nonzero()[:per_class, 0] for c in images.labels.unique()]
                )
            arrays[f"x_{split}"] = np.stack([images.load(int(i)).numpy() for i in places])
            arrays[f"y_{split}"] = images.labels[places].numpy()
        folder.mkdir(parents=True, exist_ok=True)
        source.write_text(data.name)
        save_arrays(bench, **arrays)
    return bench


def save_arrays(path: Path, **arrays: Any) -> None:
    """An .npz file, whole or not at all."""
    atomic_write(path, lambda file: np.savez(file, **arrays))


def join_splits(data: Path, runs: Path) -> Path:
    """A folder whose training images are those of `data`, and whose test images are its test and validation ones."""
    folder = runs / data.name
    for split, target in (("train", "train"), ("validation", "test"), ("test", "test")):
        for file in sorted((data / split).glob("*/*")):
            link = folder / target / file.parent.name / f"{split}-{file.name}"
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(file.resolve())
    return folder


def run_cell(
    table: str, cell: Cell, data: Path, runs: Path, results: Path, weights: str | None = None
) -> dict[str, Any]:
    """Run a cell, or go on with it, or begin it anew if it is finished; append its line to RESULTS/TABLE.jsonl."""
    torch.set_num_threads(1)
    per_class = images_per_class(cell.method)
    if cell.method.startswith("glyphs"):
        data, runs = data.with_name(f"glyphs-{cell.method[-1]}"), runs / f"glyphs-{cell.method[-1]}"
    bench = join_splits(data, runs) if cell.method == "clothes" else prepare(data, runs, per_class)
    config = build(*cell)
    config.data.source = str(bench)
    config.model.init = resolve(config, data, runs, weights)
    out = folder_of(cell, runs)
    log = out.with_suffix(out.suffix + ".log")
    resumed = (out / "checkpoints").is_dir()
    # A cell with a result has no checkpoints any more.
    finished = (out / "config.json").exists() and not resumed
    started, used = time.time(), time.process_time()
    line: dict[str, Any] = {"table": table, **cell._asdict(), "commit": stamp()["commit"]}
    line["command"] = f"python -m benchmarks.paper {table} --data DIR --cell {cell} --again"
    with _said_to(log, anew=not resumed):
        try:
            adasim.pretrain(config, out, resume=resumed, overwrite=finished)
        except NonFiniteLossError as error:  # a result, too
            line["failed"] = str(error)
    if config.model.init:
        line["knn_start"] = measure_start(config.model.init, bench, config.views.size)
    if "failed" not in line:
        line |= measure(out, bench)
    line["collapse"] = collapse_of(log)
    line["curves"] = curves(out)
    line["cpu_seconds"], line["resumed"] = round(time.process_time() - used), resumed
    line["hours"] = round((time.time() - started) / 3600, 2)
    line |= {"date": stamp()["date"], "torch": torch.__version__}
    config.model.init = Path(config.model.init).name
    line["config"] = config.to_dict() | {"data": {"images_per_class": per_class, "name": data.name}}
    append(results / f"{table}.jsonl", line)
    for leftover in ("checkpoints", "features", "tensorboard"):
        shutil.rmtree(out / leftover, ignore_errors=True)
    return line


def folder_of(cell: Cell, runs: Path) -> Path:
    """Where a cell's run is kept."""
    return runs / str(cell).replace("/", "_").replace(":", "_")


def collapse_of(log: Path) -> list[str]:
    """What the monitor said about a collapse in a run's output."""
    return [line for line in log.read_text().splitlines() if line.startswith(BEGINNINGS)]


def measure(out: Path, bench: Path) -> dict[str, Any]:
    """k-NN (k = 20) and linear accuracy on the test images, the training images being the bank.

    The linear layer's rate is the one that does best, at its last epoch, on a fifth of the training images; it is
    then trained on all of them and its last epoch counts: nothing is chosen on the test images.
    """
    knn = adasim.evaluate(out, "knn", data=str(bench), k=(20,), workers=0, save=False)
    linear = adasim.evaluate(
        out, "linear", data=str(bench), sweep=True, quick=True, workers=0, save=False
    ).metrics
    return {"knn": knn.value, "linear": linear["top1_last"], "linear_rate": linear["rate"]}


def measure_start(init: str, bench: Path, size: int) -> float:
    """k-NN accuracy of the encoder that a run started from."""
    return adasim.evaluate(init, "knn", data=str(bench), k=(20,), size=size, workers=0, save=False).value


def curves(out: Path) -> dict[str, list[Any]]:
    """The epochs' metrics, one list each; what was not measured in an epoch is null."""
    epochs = [line for line in read_metrics(out) if "epoch_loss" in line]
    found = {short: [_short(line.get(name)) for line in epochs] for name, short in CURVES.items()}
    return {name: values for name, values in found.items() if any(v is not None for v in values)}


def append(path: Path, line: dict[str, Any]) -> None:
    """One write to the end of the file: two cells that finish together do not mix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = (json.dumps(line) + "\n").encode()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        if os.write(file, data) != len(data):
            os.ftruncate(file, size)
            raise OSError(f"{path}: the disk is full")
        os.fsync(file)
    finally:
        os.close(file)


def done(path: Path) -> dict[Cell, dict[str, Any]]:
    """The newest line of each cell in a file of results."""
    return newest(read_lines(path))


def stamp() -> dict[str, str]:
    """The commit of the code that runs, and today's date."""
    where = Path(adasim.__file__).parent
    found = subprocess.run(
        ["git", "-C", where, "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return {"commit": found.stdout.strip(), "date": datetime.now(UTC).strftime("%Y-%m-%d")}


@contextlib.contextmanager
def _said_to(log: Path, anew: bool) -> Iterator[None]:
    with open(log, "w" if anew else "a") as file, contextlib.redirect_stdout(file):
        yield


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None
