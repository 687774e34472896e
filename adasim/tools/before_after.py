"""What a run was good for: raw pixels, the untrained encoder, where the run began and where it ended, in one table.

By k-NN accuracy where the images have labels; else by how often an encoder finds an image by another view of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from adasim.api import evaluate
from adasim.config import Config
from adasim.data import Subset, open_images, relabel, with_verdicts
from adasim.eval.results import COMPARED, RESULTS_FILE, Result, append_result
from adasim.eval.splits import open_split
from adasim.methods import build_method
from adasim.models import Backbone, EvalTransform, load_backbone, pixels, read_weights, start_from
from adasim.runs.folder import RunFolder
from adasim.util import seeding

_MOST = {"train": 3000, "test": 1000}  # images that are looked at: a minute or two on a laptop
AFTER = "after pretraining"


def show(out: Path, console: Console) -> None:
    """Measure the run's stages on (a part of) its own images, and print them as a table."""
    config = RunFolder.open(out, lock=False).config
    source, size, exclude = config.data.source, config.views.size, config.data.exclude
    images = with_verdicts(open_images(source, size=size), config.data)
    options: dict[str, Any]
    if labelled := images.labels is not None and bool((images.labels >= 0).all()):
        verdicts = Path(exclude) if exclude else None
        split = open_split(source, None, None, size=size, seed=config.seed, exclude=verdicts)
        train = Subset(relabel(split.train, config.data.labels), _some(split.train_ids, "train", config))
        test = Subset(relabel(split.test, config.data.labels), _some(split.test_ids, "test", config))
        title = f"k-NN accuracy on {len(test):,} images by {len(train):,} others (k = 20)"
        how, options = "knn", {"k": 20, "train": train, "test": test}
    else:
        some = Subset(images, _some(torch.arange(len(images)), "train", config))
        title = f"Own image nearest to a view of it, of {len(some):,} images"
        how, options = "views", {"data": some, "queries": 500}
    table = Table("features", title=title, title_justify="left", title_style="bold")
    table.add_column("accuracy" if labelled else "found", justify="right")
    values: dict[str, float] = {}
    for name, encoder in stages(config, out):
        report = evaluate(encoder, how, no_cache=True, save=False, **options)
        values[name] = report.value
        table.add_row(name, f"{report.value:.1f}%", style="bold" if name == AFTER else "")
    if labelled:
        table.caption = f"chance is {100 / len(images.classes):.1f}%"
    console.print(table)
    console.print(
        verdict(values, len(test))
        if labelled
        else "Without labels this tells whether an encoder knows an image again, not whether it puts like with like: "
        "one that is worse than raw pixels in use may well be ahead here. A few labelled folders and `adasim eval "
        "knn` tell.",
        soft_wrap=True,
    )
    del values[AFTER]
    keep(out, report.results[0], values)  # last: a full disk must not cost the table


def keep(out: Path, after: Result, others: dict[str, float]) -> None:
    """Add it to the run's results, with what the other stages gave, for model cards and for `open_encoder`."""
    model = after.model | {"name": out.resolve().name, "origin": "the run's own table"}
    result = replace(after, model=model, metrics=after.metrics | {COMPARED: others})
    append_result(out / RESULTS_FILE, result, "cpu")


def verdict(accuracy: dict[str, float], asked: int) -> str:
    """Whether the run was worth it, by accuracies in percent on so many images that were asked about.

    >>> verdict({"raw pixels": 40.0, "where it began": 70.0, "after pretraining": 71.0}, 100)
    'The run changed nothing that 100 images can show (below about 13 points): the weights as they were do as well.'
    """
    after = accuracy[AFTER]
    # Two standard deviations of a difference, as if each encoder had been asked about other images: on the safe side.
    noise = 200 * math.sqrt(2 * max(after * (100 - after), 1) / 1e4 / asked)
    others = "go on from trained weights (--model.init), or use such weights as they are (adasim explore --backbone)"
    if after < accuracy["raw pixels"]:
        return f"The encoder is worse than raw pixels: do not use it. Better {others}."
    start = "where it began" if "where it began" in accuracy else "raw pixels"
    gain = after - accuracy[start]
    if abs(gain) < noise:
        otherwise = "the weights as they were do as well" if start == "where it began" else others
        return f"The run changed nothing that {asked} images can show (below about {noise:.0f} points): {otherwise}."
    if gain < 0:
        return f"The run lost {-gain:.1f} points: use the weights that it began with, or a lower --optim.lr."
    return f"The run gained {gain:.1f} points over {start}."


def stages(config: Config, out: Path) -> Iterator[tuple[str, Backbone]]:
    """What to compare, by name."""
    yield "raw pixels", pixels()
    untrained = build_method(config, config.views.size).eval_encoder  # `model.init` is not read there
    untrained.transform = EvalTransform.for_run(config)
    yield "untrained encoder", untrained.eval()
    if config.model.init:
        start_from([untrained], read_weights(config.model.init), config.model.init)
        yield "where it began", untrained
    yield AFTER, load_backbone(out)


def _some(ids: Tensor, part: str, config: Config) -> Tensor:
    order = seeding.permutation(config.seed, f"before and after, {part}", 0, len(ids))
    return ids[order[: _MOST[part]].sort().values]
