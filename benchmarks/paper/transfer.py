"""What the runs of the other tables know beside their own task: few-shot accuracy and linear segmentation.

    python -m benchmarks.paper.transfer --data cifar10 --fashion fashion-mnist
    python -m benchmarks.paper.transfer --recipes paper --data data --gpus 8     # its eight sets, VOC and COCO

Measures every finished run of the tables main, oracle and policies that has no line in
benchmarks/paper/results/transfer.jsonl yet. Few-shot is 5-way 5-shot by prototypes, in the same 600 episodes for all:
of the test images of CIFAR-10 and of Fashion-MNIST, and of 3,000 generated patterns. Segmentation is a linear layer
on the last feature map, for the generated patterns. With the paper's recipes these are its own tables: the finished
runs of `python -m benchmarks.paper fewshot|segmentation --recipes paper`, which pretrain what is not there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import adasim
from adasim.data import open_images

from . import cluster
from .cell import RESULTS, append, done, folder_of, save_arrays, stamp
from .cluster import finished
from .tables import transferred

PATTERNS = "synthetic:3000"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="CIFAR-10; or a folder of all data")
    parser.add_argument("--fashion", type=Path, help="Fashion-MNIST, likewise; at desk scale")
    parser.add_argument("--recipes", choices=("desk", "paper"), default="desk", help="whose runs")
    parser.add_argument("--gpus", type=int, default=8, help="with --recipes paper: processes of torchrun")
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"), help="where run folders are kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are appended")
    parser.add_argument("--again", action="store_true", help="also runs that have a line")
    args = parser.parse_args()
    if args.recipes == "paper":
        return at_paper_scale(args)
    if args.fashion is None:
        parser.error("--fashion is needed at desk scale")
    torch.set_num_threads(1)
    targets = {"cifar10": test_images(args.data, args.runs), "fashion": test_images(args.fashion, args.runs)}
    results = args.results / "transfer.jsonl"
    for cell in sorted(transferred()):
        folder = folder_of(cell, args.runs)
        if finished(folder) and (args.again or cell not in done(results)):
            line = measure(folder, targets | {"patterns": PATTERNS})
            append(results, cell._asdict() | line)
            print(f"{cell!s:44}{line['fewshot']}  mIoU {line['segmentation']}", flush=True)


def at_paper_scale(args: argparse.Namespace) -> None:
    """Measure the finished runs of the paper's tables of few-shot and segmentation; train nothing."""
    launch = "python" if args.gpus == 1 else f"torchrun --nproc-per-node {args.gpus}"
    place = cluster.Cluster(args.data, args.runs / "cluster", args.results / "cluster", launch)
    for name in ("fewshot", "segmentation"):
        cells = [cell for cell in cluster.PAPER[name].cells if finished(Path(place.run_of(cell)))]
        if failed := cluster.run(name, place, cells):
            sys.exit(f"No result of {', '.join(failed)}.")


def test_images(data: Path, runs: Path) -> str:
    """The test images as a file of arrays, made once."""
    file = runs / f"test-{data.name}.npz"
    if not file.exists():
        images = open_images(str(data), split="test")
        assert images.labels is not None
        pixels = np.stack([images.load(i).expand(3, -1, -1).numpy() for i in range(len(images))])
        runs.mkdir(parents=True, exist_ok=True)
        save_arrays(file, images=pixels, labels=images.labels.numpy())
    return str(file)


def measure(folder: Path, targets: dict[str, str]) -> dict[str, Any]:
    """Accuracy with its 95% interval for each target, and mean IoU at the last epoch."""
    fewshot = {}
    for name, source in targets.items():
        found = adasim.evaluate(
            folder, "fewshot", data=(source,), workers=0, no_cache=True, save=False
        ).metrics
        fewshot[name] = [round(found["mean"], 2), round(found["interval95"], 2)]
    masks = adasim.evaluate(folder, "segmentation", data=PATTERNS, workers=0, save=False).metrics
    return {
        "fewshot": fewshot,
        "segmentation": round(masks["miou_last"], 2),
        **stamp(),
    }


if __name__ == "__main__":
    main()
