"""The demo's setting over several seeds: k-NN accuracy, bootstrapping ratio at the end, and how long it takes.

    python benchmarks/demo_seeds.py                                       # the demo as it is, five seeds, two threads
    python benchmarks/demo_seeds.py --threads 1 --set optim.lr=0.2 neighbors.window=5 --lines tried.jsonl

The first writes benchmarks/results/demo.{json,md}. With --lines each seed is a line appended to that file instead:
for trying settings out. Accuracy is that of `adasim demo`: k = 20, on test images that the run has not seen.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _report import options, report

from adasim.api import load_run, pretrain
from adasim.config import Config
from adasim.eval import knn_accuracy
from adasim.eval.features import extract
from adasim.models.transform import EvalTransform
from adasim.recipes import get_recipe


def main() -> None:
    args = options(__doc__, seeds=[0, 1, 2, 3, 4], threads=2, set=[], lines=None)
    torch.set_num_threads(args.threads)
    changes = dict(change.split("=", 1) for change in args.set)
    rows = []
    for seed in args.seeds:
        config = get_recipe("demo")
        for name, value in changes.items():
            assign(config, name, value)
        config.seed = seed
        rows.append({"seed": seed, **measure(config)})
        if args.lines:
            with open(args.lines, "a") as file:
                file.write(json.dumps({"changes": changes, "threads": args.threads, **rows[-1]}) + "\n")
    if args.lines is None:
        accuracies = [row["k-NN top-1"] for row in rows]
        settings = {
            "mean": f"{statistics.mean(accuracies):.1f}%",
            "lowest": f"{min(accuracies):.1f}%",
            "threads": args.threads,
            **changes,
        }
        report("demo", settings, rows, "demo_seeds")


def measure(config: Config) -> dict[str, Any]:
    """A run in a folder that is deleted afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        start, used = time.perf_counter(), time.process_time()
        out = pretrain(config, Path(folder) / "run")
        run = load_run(out)
        sets = [run.images(split) for split in ("train", "test")]
        transform = EvalTransform.for_run(config)
        train, test = (extract(run.encoder, images, transform, progress=False) for images in sets)
        last = run.metrics[-1]
        return {
            "k-NN top-1": knn_accuracy(train, sets[0].labels, test, sets[1].labels).top1,
            "bootstrapping ratio": last["bootstrap_ratio"],
            "partners of the image's class": precision(last),
            "seconds": round(time.perf_counter() - start),
            "processor seconds": round(time.process_time() - used),
        }


def precision(last: dict[str, Any]) -> float:
    """Of the pairs that join two images, how many join images of one class."""
    ratio = last["bootstrap_ratio"]
    return 1 - (1 - last["partner_accuracy"]) / ratio if ratio else float("nan")


def assign(config: Config, name: str, value: str) -> None:
    """config.a.b = value, as the type that is there."""
    *path, last = name.split(".")
    section: Any = config
    for part in path:
        section = getattr(section, part)
    old = getattr(section, last)
    numbers = tuple(float(part) for part in value.split(":")) if isinstance(old, tuple) else None
    setattr(section, last, numbers or type(old)(value))


if __name__ == "__main__":
    main()
