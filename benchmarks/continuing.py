"""What going on from trained weights brings, by k-NN on labelled test images: before, after, and what would spoil it.

    adasim pretrain photos --data clothing --model.init tf_efficientnet_lite0:weights.safetensors --out runs/clothes
    python benchmarks/continuing.py clothes --data clothing --run runs/clothes

RUN is one of `adasim pretrain photos` that has ended; weights, size and normalisation are read from its settings.
`views through batch norm` is the encoder that the run began with after one pass of training views in training mode,
as batch norms do it unless they are frozen: nothing is learnt, only their running statistics move. All features are
made anew. Labels are used to measure, and for nothing else.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from _report import report

import adasim
from adasim.config import Config
from adasim.data import open_images
from adasim.models import Backbone, build_from, read_weights
from adasim.runs.folder import RunFolder
from adasim.tools.before_after import stages
from adasim.train.state import build_loader


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="of the result: continuing_NAME")
    parser.add_argument("--data", required=True, help="train/CLASS and test/CLASS")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    config = RunFolder.open(args.run, lock=False).config
    weights = read_weights(config.model.init)

    def knn(encoder: Backbone) -> float:
        found = adasim.evaluate(
            encoder, "knn", data=args.data, k=20, save=False, no_cache=True, workers=args.workers
        )
        return found.value

    rows = [
        {"features": "as they come, at their own size", "k-NN": knn(build_from(weights, config.model.init))}
    ]
    for name, encoder in stages(config, args.run):
        rows.append({"features": name, "k-NN": knn(encoder)})
        if name == "where it began":
            let_views_through(encoder, config)
            rows.append({"features": "views through batch norm", "k-NN": knn(encoder)})
    settings = {
        "data": Path(args.data).name,
        "model": config.model.name,
        "size": config.views.size,
        "epochs": config.epochs,
        "batch": config.batch_size,
        "lr": config.optim.lr,
        "encoder_lr": config.optim.encoder_lr,
        "seed": config.seed,
    }
    report(f"continuing_{args.name}", settings, rows, script="continuing")


def let_views_through(encoder: Backbone, config: Config) -> None:
    """One epoch of the run's own views, forwards, with batch norms as they are in training."""
    images = open_images(config.data.source, size=config.views.size)
    loader = build_loader(config, images)
    encoder.freeze_norm = False
    encoder.train()
    try:
        with torch.no_grad():
            for batch in loader.epoch(0, torch.arange(len(images))):
                encoder(torch.cat(batch.views[:2]))
    finally:
        loader.close()
    encoder.eval()


if __name__ == "__main__":
    main()
