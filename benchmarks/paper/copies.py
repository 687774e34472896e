"""Copies between CIFAR-10's training and test images, as the explorer lists them.

    python -m benchmarks.paper.prepare cifar10 downloads data/cifar10
    python -m benchmarks.paper.copies runs/paper/simsiam_standard_0 --data data/cifar10         # about five minutes

Writes benchmarks/paper/results/copies.csv with a line for each test image that has a near or exact copy among the
training images, copies.jsonl with how many there are, and docs/images/explore-cifar10.png: 36 of these pairs, at
even distances in the list.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageDraw

from adasim.explore.align import align
from adasim.explore.collection import Collection
from adasim.explore.open import open_backbone
from adasim.explore.page import Exploration, explore
from adasim.options import ExploreOptions

from .cell import RESULTS, append, stamp

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "explore-cifar10.png"
COLUMNS, ROWS, SIDE, GAP = 12, 3, 72, 8


class Pair(NamedTuple):
    """A test image and the training image of its group that it resembles most."""

    difference: float
    test: int
    train: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a run folder or a backbone.safetensors")
    parser.add_argument("--data", required=True, help="train/CLASS/*.png and test/CLASS/*.png")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the list is written")
    args = parser.parse_args()
    # One pass: supports play no part among duplicates.
    found = explore(
        open_backbone(args.model, args.data, ExploreOptions(passes=1, workers=0, no_cache=True), print)
    )
    pairs = across_splits(found)
    line: dict[str, Any] = {"encoder": Path(args.model).name, "images": len(found.collection)}
    for kind in ("exact", "near", "same scene"):
        groups = [group for group in found.findings.groups if group.kind == kind]
        across = [group for group in groups if group.straddles]
        mixed = sum(len({found.collection.class_name(i) for i in group.members}) > 1 for group in across)
        line[kind] = {"groups": len(groups), "in both splits": len(across), "of several labels": mixed}
    line["test images with a copy"] = len(pairs)
    line |= stamp()
    print(line)
    append(args.results / "copies.jsonl", line)
    write_list(args.results / "copies.csv", found.collection, pairs)
    draw(found.collection, pairs)


def is_test(collection: Collection, i: int) -> bool:
    return i >= len(collection.sets[0])


def across_splits(found: Exploration) -> list[Pair]:
    """Each test image of a group of copies in both splits with its likest training image, the likest pairs first."""
    pairs = []
    for group in found.findings.groups:
        if group.kind == "same scene" or not group.straddles:
            continue
        train = [i for i in group.members if not is_test(found.collection, i)]
        for test in (i for i in group.members if is_test(found.collection, i)):
            grey = found.looks.small[[*train, test]].float().mean(1, keepdim=True)
            differences = 1 - align(grey, torch.tensor([(n, len(train)) for n in range(len(train))])).detail
            best = int(differences.argmin())
            pairs.append(Pair(float(differences[best]), test, train[best]))
    return sorted(pairs)


def write_list(path: Path, collection: Collection, pairs: list[Pair]) -> None:
    with open(path, "w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["test", "train", "difference"])
        for difference, test, train in pairs:
            out.writerow([collection.names[test], collection.names[train], f"{difference:.3f}"])


def draw(collection: Collection, pairs: list[Pair]) -> None:
    """The test image above the training image, and below them how much their detail differs."""
    count = min(COLUMNS * ROWS, len(pairs))
    shown = [pairs[round(n * (len(pairs) - 1) / max(1, count - 1))] for n in range(count)]
    height = 2 * SIDE + 28
    sheet = Image.new("RGB", (COLUMNS * (SIDE + GAP) + GAP, ROWS * height + GAP), "white")
    pen = ImageDraw.Draw(sheet)
    for n, (difference, *ids) in enumerate(shown):
        x, y = GAP + n % COLUMNS * (SIDE + GAP), GAP + n // COLUMNS * height
        for place, i in enumerate(ids):
            images, own = collection.place(i)
            pixels = Image.fromarray(images.load(own).permute(1, 2, 0).numpy())
            sheet.paste(pixels.resize((SIDE, SIDE), Image.Resampling.NEAREST), (x, y + place * (SIDE + 3)))
        pen.text((x, y + 2 * SIDE + 5), f"{difference:.2f}", fill="black")
    sheet.quantize(220).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
