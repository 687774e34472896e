"""`adasim demo`: pretrain on generated images, then show that it worked."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import normalize

from adasim.data import EmbeddedImages, embedded
from adasim.eval import knn_accuracy
from adasim.eval.features import extract
from adasim.eval.transforms import EvalTransform
from adasim.models import load_backbone
from adasim.plots import gallery
from adasim.recipes import get_recipe
from adasim.train.checkpoint import CheckpointStore
from adasim.train.loop import pretrain
from adasim.train.state import build_state

_IMAGES = 3000


def run_demo(out: Path | None = None, seed: int = 0) -> None:
    """Pretrain a small ResNet on generated images with AdaSim pairs (two to three minutes on two cores), then
    compare its k-NN accuracy with that of raw pixels and of the untrained encoder.

    Args:
        out: the run folder to make; by default the first free one of runs/demo, runs/demo-2, ...
        seed: names every random choice.
    """
    out = out or _free_folder(Path("runs"), "demo")
    console = Console(highlight=False)
    config = get_recipe("demo")
    config.seed = seed
    config.data.source = f"embedded:{_IMAGES}"
    train, test = embedded(_IMAGES), embedded(_IMAGES // 5, split="test")
    console.print(
        f"Pretraining a small ResNet on {_IMAGES:,} generated images of {len(train.classes)} patterns, with AdaSim "
        f"pairs and without labels, for {config.epochs} epochs."
    )
    pretrain(config, out)

    transform = EvalTransform.for_run(config)
    state = build_state(config, _IMAGES, torch.device("cpu"))  # as it was before the first step
    rows = {"raw pixels": [_pixels(images) for images in (train, test)]}
    for name, encoder in (
        ("untrained encoder", state.method.exported),
        ("after pretraining", load_backbone(out)),
    ):
        rows[name] = [extract(encoder, images, transform, progress=False) for images in (train, test)]
    table = Table(title="k-NN accuracy on unseen images (k = 20)", title_justify="left", title_style="bold")
    table.add_column("features")
    table.add_column("accuracy", justify="right")
    for name, (known, asked) in rows.items():
        accuracy = knn_accuracy(known, train.labels, asked, test.labels).top1
        table.add_row(name, f"{accuracy:.1f}%", style="bold" if name == "after pretraining" else "")
    table.caption = f"chance is {100 / len(train.classes):.1f}%"
    console.print(table)

    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    console.print(
        f"Bootstrapping ratio: {last['bootstrap_ratio']:.0%} of the last epoch's pairs joined two different images."
    )
    checkpoint = CheckpointStore(out, config.save.keep).load_latest()
    assert checkpoint is not None
    assert state.memory is not None
    state.load(checkpoint)
    gallery(out / "neighbours.png", train, state.memory, tau=config.neighbors.tau, seed=seed)
    for what, file in (
        ("encoder", "backbone.safetensors"),
        ("neighbours", "neighbours.png"),
        ("metrics", "metrics.jsonl"),
    ):
        console.print(f"  {what:<10} {out / file}")
    console.print(f"  {'use it':<10} python -c 'import adasim; print(adasim.load_backbone(\"{out}\"))'")


def _pixels(images: EmbeddedImages) -> torch.Tensor:
    """Raw pixels as features, each image at zero mean: without that a vote by cosine sees brightness alone."""
    return normalize(images.as_array().flatten(1).float(), dim=1)


def _free_folder(parent: Path, name: str) -> Path:
    """parent/name, or the first of parent/name-2, parent/name-3, ... that does not exist."""
    number = 1
    while (path := parent / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path
