"""Few-shot transfer, 600 episodes of cached features: vectorised, against a loop over episodes in torch.

    python benchmarks/fewshot.py                  # sizes of the paper's eight data sets, width 384 (ViT-S)
    python benchmarks/fewshot.py --dim 2048       # ResNet-50
    python benchmarks/fewshot.py --episodes 60    # a quick try

The loop does in each episode what the published code does: choose classes, find and shuffle each class's
images, average the support, subtract every query from every prototype.
"""

from __future__ import annotations

from functools import partial

import torch
from _report import options, report, seconds
from torch import Tensor

from adasim.eval import fewshot_accuracy

SETS = {  # images over all splits, and classes
    "Aircraft": (10_000, 100),
    "Caltech101": (9_144, 102),
    "Cars": (16_185, 196),
    "DTD": (5_640, 47),
    "Flowers": (8_189, 102),
    "Food": (101_000, 101),
    "Pets": (7_349, 37),
    "SUN397": (108_754, 397),
}


def loop(
    features: Tensor, labels: Tensor, ways: int, shots: int, queries: int, episodes: int
) -> tuple[float, float]:
    """The protocol, one episode at a time."""
    classes = labels.unique()
    truth = torch.arange(ways).repeat_interleave(queries)
    accuracies = []
    for _ in range(episodes):
        images = []
        for label in classes[torch.randperm(len(classes))[:ways]]:
            members = (labels == label).nonzero()[:, 0]
            images.append(members[torch.randperm(len(members))[: shots + queries]])
        values = features[torch.stack(images)]  # (ways, shots + queries, D)
        prototypes = values[:, :shots].mean(dim=1)
        asked = values[:, shots:].reshape(ways * queries, -1)
        distances = (asked[:, None] - prototypes[None]).pow(2).sum(dim=2)
        accuracies.append((distances.argmin(dim=1) == truth).double().mean())
    percent = torch.stack(accuracies) * 100
    return float(percent.mean()), 1.96 * float(percent.std(correction=0)) / episodes**0.5


def main() -> None:
    args = options(__doc__, dim=384, episodes=600, repeats=5)

    rows, totals = [], [0.0, 0.0]
    for name, (images, classes) in SETS.items():
        generator = torch.Generator().manual_seed(images)
        labels = torch.arange(images) % classes
        features = torch.randn(images, args.dim, generator=generator)
        features += 0.3 * torch.randn(classes, args.dim, generator=generator)[labels]
        reference = loop(features, labels, 5, 5, 15, args.episodes)
        result = fewshot_accuracy(features, labels, episodes=args.episodes)
        assert abs(result.mean - reference[0]) <= 3 * (result.interval95 + reference[1])
        ours = seconds(partial(fewshot_accuracy, features, labels, episodes=args.episodes), args.repeats)
        theirs = seconds(partial(loop, features, labels, 5, 5, 15, args.episodes), args.repeats)
        totals = [totals[0] + ours, totals[1] + theirs]
        rows.append(row(name, images, classes, ours, theirs))
    rows.append(row("all eight", sum(n for n, _ in SETS.values()), sum(c for _, c in SETS.values()), *totals))
    report("fewshot" if args.dim == 384 else f"fewshot_{args.dim}", vars(args), rows)


def row(name: str, images: int, classes: int, ours: float, theirs: float) -> dict[str, str | int | float]:
    return {
        "data": name,
        "images": images,
        "classes": classes,
        "adasim ms": 1000 * ours,
        "loop ms": 1000 * theirs,
        "times": theirs / ours,
    }


if __name__ == "__main__":
    main()
