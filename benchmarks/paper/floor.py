"""What any arm must beat: k-NN accuracy of raw pixels and of untrained encoders on the same images.

python -m benchmarks.paper.floor --data cifar10
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from adasim.data import open_images
from adasim.eval import knn_accuracy
from adasim.eval.features import extract
from adasim.methods import build_method
from adasim.models import EvalTransform

from .cell import RESULTS, append, prepare, stamp
from .settings import build


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the images: train/CLASS and test/CLASS")
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"), help="where run folders are kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are appended")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = str(prepare(args.data, args.runs))
    train, test = (open_images(bench, split=split) for split in ("train", "test"))
    assert train.labels is not None
    assert test.labels is not None
    features: dict[str, Any] = {}
    pixels = [images.as_array().flatten(1).float() for images in (train, test)]  # type: ignore[union-attr]
    features["raw pixels, less their mean"] = [x - pixels[0].mean(0) for x in pixels]
    for method in ("simsiam", "dino-vit"):
        config = build(method, "standard", 0)
        encoder, transform = build_method(config, 32).eval_encoder.eval(), EvalTransform.for_run(config)
        found = [extract(encoder, images, transform, progress=False) for images in (train, test)]
        features[f"untrained encoder of {method}"] = found
    for name, (bank, asked) in features.items():
        top1 = knn_accuracy(bank, train.labels, asked, test.labels, k=20).top1
        print(f"{name:36}{top1:6.2f}")
        append(args.results / "floor.jsonl", {"features": name, "knn": top1} | stamp())


if __name__ == "__main__":
    main()
