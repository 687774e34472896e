"""`adasim demo`: pretrain on generated images, then show that it worked."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text

from adasim import terminal
from adasim.api import pretrain
from adasim.curves.writing import plot
from adasim.data import ImageSet, open_images
from adasim.eval import knn_accuracy
from adasim.eval.features import extract
from adasim.explore.collection import collect
from adasim.explore.exploring import explore
from adasim.explore.opening import Options, open_run
from adasim.explore.writing import write_page
from adasim.files import atomic_write
from adasim.gallery.figure import render
from adasim.gallery.opening import supports_of_memory
from adasim.gallery.picking import pick
from adasim.gallery.tables import rows_of
from adasim.models.transforms import EvalTransform
from adasim.recipes import for_epochs, get_recipe
from adasim.run import load_run
from adasim.train.state import build_state


def run_demo(out: Path | None = None, seed: int = 0, epochs: int = 60) -> None:
    """Pretrain a small ResNet on generated images with AdaSim pairs, then compare its k-NN accuracy with that of raw
    pixels and of the untrained encoder. `adasim demo --help` explains the arguments."""
    out = out or _free_folder(Path("runs"), "demo")
    console = terminal.console()
    config = get_recipe("demo")
    if epochs != config.epochs:
        config = for_epochs(config, epochs)
    config.seed = seed
    config.eval.every = max(1, epochs // 12)  # for the curves: about five seconds in all
    train, test = open_images(config.data.source), open_images(config.data.source, split="test")
    assert train.labels is not None
    assert test.labels is not None
    console.print(
        f"Pretraining a small ResNet on {len(train):,} generated images of {len(train.classes)} patterns, "
        f"with AdaSim pairs and without labels, for {config.epochs} epochs."
    )
    pretrain(config, out)

    run = load_run(out)
    untrained = build_state(config, len(train)).method
    transform = EvalTransform.for_run(config)
    encoders = {"untrained encoder": untrained.eval_encoder, "after pretraining": run.encoder}
    rows = {"raw pixels": _centred_pixels(train, test)}
    for name, encoder in encoders.items():
        rows[name] = [extract(encoder, images, transform, progress=False) for images in (train, test)]
    table = Table(title="k-NN accuracy on unseen images (k = 20)", title_justify="left", title_style="bold")
    table.add_column("features")
    table.add_column("accuracy", justify="right")
    for name, (known, asked) in rows.items():
        accuracy = knn_accuracy(known, train.labels, asked, test.labels).top1
        table.add_row(name, f"{accuracy:.1f}%", style="bold" if name == "after pretraining" else "")
    table.caption = f"chance is {100 / len(train.classes):.1f}%"
    console.print(table)

    last = run.metrics[-1]
    console.print(
        f"Bootstrapping ratio: {last['bootstrap_ratio']:.0%} of the last epoch's pairs joined two different images."
    )
    assert run.memory is not None
    supports = supports_of_memory(run.memory, collect([train]), config.neighbors.tau, out.name)
    picked = pick(supports, "random", 6, seed)
    picture = render(supports, rows_of(supports, picked.ids), picked, show=10, format="png")
    atomic_write(out / "neighbours.png", picture)
    plot(out, out / "curves.png")
    explored = explore(open_run(out, Options(workers=0, no_cache=True), lambda sentence: None))
    write_page(out / "explore.html", explored)
    for file, what in (
        ("backbone.safetensors", "the encoder: adasim.load_backbone(...), a timm model in .net"),
        ("curves.png", "how it went: loss, k-NN accuracy, neighbours of the same class, ..."),
        ("neighbours.png", "some images and those that resemble them most; more: adasim gallery"),
        ("explore.html", "open it in a browser: neighbours, duplicates, suspicious labels, outliers"),
        ("metrics.jsonl", f"the numbers behind the curves; or: tensorboard --logdir {out}"),
    ):
        console.print(Text.assemble(f"  {out / file}  ", (what, "dim")), soft_wrap=True)


def _centred_pixels(*sets: ImageSet) -> list[torch.Tensor]:
    """Raw pixels less the first set's mean image, without which a vote by cosine would do much worse."""
    arrays = [array.flatten(1).float() for images in sets if (array := images.as_array()) is not None]
    return [array - arrays[0].mean(0) for array in arrays]


def _free_folder(parent: Path, name: str) -> Path:
    """parent/name, or the first of parent/name-2, parent/name-3, ... that does not exist."""
    number = 1
    while (path := parent / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path
