"""Lay a data set of torchvision out as class folders: DEST/train/CLASS/00000.png, DEST/test/CLASS/00000.png.

    python -m benchmarks.paper.class_folders CIFAR10 data/cifar10
    python -m benchmarks.paper.class_folders FashionMNIST data/fashion-mnist

The number in a file's name is the image's place in the published order. Downloads what is not there yet.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchvision import datasets


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", choices=("CIFAR10", "FashionMNIST"), help="its name in torchvision")
    parser.add_argument("dest", type=Path, help="the folder to make")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "test"):
            images = getattr(datasets, args.dataset)(folder, train=split == "train", download=True)
            lay_out(images, images.classes, args.dest / split)


def lay_out(images: Iterable[tuple[Any, int]], classes: list[str], dest: Path) -> None:
    """Save (PIL image, label) pairs as DEST/CLASS/NUMBER.png."""
    names = [name.replace("/", "-") for name in classes]  # Fashion-MNIST has a "T-shirt/top"
    for name in names:
        (dest / name).mkdir(parents=True, exist_ok=True)
    for number, (image, label) in enumerate(images):
        image.save(dest / names[label] / f"{number:05d}.png")


if __name__ == "__main__":
    main()
