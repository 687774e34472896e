"""The paper's arms at desk scale: standard pairs, +NN and AdaSim on the synthetic images, by k-NN accuracy.

    python benchmarks/desk_arms.py                        # desk-resnet, 150 epochs, three seeds: about an hour
    python benchmarks/desk_arms.py --epochs 60 --seeds 0  # as long as the demo: some minutes
    python benchmarks/desk_arms.py --lr 0.4 --weight-decay 5e-4 --arms standard adasim      # a faster baseline

Runs are kept in --runs and resumed, so this may be stopped at any time and started again. k = 20, and the test split
of the generated images, which no run has seen.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from _report import report

from adasim.api import pretrain
from adasim.data import open_images
from adasim.eval import knn_accuracy
from adasim.eval.features import extract
from adasim.models import load_backbone
from adasim.models.transforms import EvalTransform
from adasim.recipes import get_recipe


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=["standard", "nearest", "adasim"])
    parser.add_argument("--lr", type=float, help="per 256 images; by default the recipe's")
    parser.add_argument("--weight-decay", type=float, help="by default the recipe's")
    parser.add_argument("--runs", type=Path, default=Path("runs/desk"))
    args = parser.parse_args()

    rows = []
    for seed in args.seeds:
        for pairs in args.arms:
            config = get_recipe("desk-resnet")
            config.data.source = "synthetic:3000"
            config.pairs, config.epochs, config.seed = pairs, args.epochs, seed
            optim = config.optim
            optim.lr = args.lr or optim.lr
            optim.weight_decay = optim.weight_decay_end = args.weight_decay or optim.weight_decay
            out = args.runs / f"{pairs}-{args.epochs}-{optim.lr}-{optim.weight_decay}-{seed}"
            pretrain(config, out, resume=(out / "config.json").exists())
            sets = [open_images(config.data.source, split=split) for split in ("train", "test")]
            encoder, transform = load_backbone(out), EvalTransform.for_run(config)
            train, test = (extract(encoder, images, transform, progress=False) for images in sets)
            last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
            rows.append(
                {
                    "pairs": pairs,
                    "seed": seed,
                    "k-NN top-1": knn_accuracy(train, sets[0].labels, test, sets[1].labels).top1,
                    "bootstrapping ratio": last["bootstrap_ratio"],
                    "RankMe": last["epoch_rankme"],
                }
            )
            name = "desk_arms" + (f"_{args.epochs}" if args.epochs != 150 else "")
            name += f"_lr{args.lr}" if args.lr else ""
            settings = {"epochs": args.epochs, "lr per 256": optim.lr, "weight decay": optim.weight_decay}
            settings["data"] = config.data.source
            report(name, settings, rows, "desk_arms")  # as they come


if __name__ == "__main__":
    main()
