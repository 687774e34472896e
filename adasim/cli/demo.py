"""`adasim demo`: pretraining on generated images, and proof that it worked."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.text import Text

from adasim.cli.options import read_options
from adasim.runs.folder import check_out
from adasim.tools.outputs import first_free
from adasim.util import terminal
from adasim.util.fields import Range

FILES = {
    "backbone.safetensors": "the encoder: adasim.load_backbone(...), a timm model in .net",
    "curves.png": "how it went: loss, k-NN accuracy, neighbours of the same class, ...",
    "neighbours.png": "some images and those that resemble them most; more: adasim gallery",
    "explore.html": "open it in a browser: neighbours, duplicates, suspicious labels, outliers",
    "metrics.jsonl": "the numbers behind the curves; or: tensorboard --logdir RUN",
}


_PATIENCE_S = 200
"""All epochs are trained where that takes less, about three minutes on two free cores; else as many as take:"""
_TRAINING_S = 150
_FEWEST = 20
_TIMINGS = 3  # at most: somebody else's burst of a few seconds makes no slow machine


@dataclass(kw_only=True)
class DemoArguments:
    """Pretrain a small ResNet on generated images with AdaSim pairs (about three minutes on two cores), then
    compare its k-NN accuracy with that of raw pixels and of the untrained encoder."""

    out: Path | None = None
    """The run folder to make; by default the first free one of runs/demo, runs/demo-2, ..."""
    seed: int = 0
    """The random seed."""
    epochs: Annotated[int, Range(2)] | None = None  # the first has no partners
    """By default 60, or as many as end in three minutes where the machine is slow or busy. Fewer learn less; two are
    the least."""


def main(arguments: Sequence[str]) -> None:
    """`adasim demo ...`"""
    asked = read_options(DemoArguments, arguments, "demo")
    out = asked.out or first_free(Path("runs/demo"))
    check_out(out, overwrite=False)
    tell_if_busy(os.getloadavg()[0], os.cpu_count() or 1)

    from adasim.api import load_run, pretrain
    from adasim.data import open_images
    from adasim.dist.processes import Distributed
    from adasim.explore.gallery import pick, render, rows_of, supports_of_run
    from adasim.explore.open import open_run
    from adasim.explore.page import explore, write_page
    from adasim.options import ExploreOptions
    from adasim.recipes import for_epochs, get_recipe
    from adasim.tools.before_after import show as show_gain
    from adasim.tools.plot import plot
    from adasim.train.budget import time_steps
    from adasim.util.files import atomic_write

    config = get_recipe("demo")
    epochs, reason = asked.epochs, ""
    if epochs is None:
        images = open_images(config.data.source, size=config.views.size)
        with Distributed.start() as ranks:
            epochs, speed = timed_epochs(
                lambda: time_steps(config, images, ranks, seconds=3.0).images_per_second,
                len(images),
                config.epochs,
            )
        if epochs < config.epochs:
            reason = (
                f" instead of {config.epochs}: this machine trains {speed:,.0f} images/s now, and three minutes "
                f"are to be enough. `--epochs {config.epochs}` learns more"
            )
    if epochs != config.epochs:
        config = for_epochs(config, epochs)
    config.seed = asked.seed
    config.eval.every = max(1, epochs // 12)  # for the curves: about five seconds in all
    terminal.say(
        f"Pretraining a small ResNet on 3,000 generated images, with AdaSim pairs and without labels, for "
        f"{epochs} epochs{reason}."
    )
    pretrain(config, out)

    console = terminal.console()
    show_gain(out, console)
    ratio = load_run(out).metrics[-1]["bootstrap_ratio"]
    terminal.say(f"Bootstrapping ratio: {ratio:.0%} of the last epoch's pairs joined two different images.")

    def quiet(sentence: str) -> None:
        """The page and the gallery have nothing to say about generated images."""

    supports = supports_of_run(out, quiet)
    picked = pick(supports, "random", 6, asked.seed)
    picture = render(supports, rows_of(supports, picked.ids), picked, show=10, format="png")
    atomic_write(out / "neighbours.png", picture)
    plot(out, out / "curves.png")
    explored = explore(open_run(out, ExploreOptions(workers=0, no_cache=True), quiet))
    write_page(out / "explore.html", explored)
    for file, what in FILES.items():
        console.print(Text.assemble(f"  {out / file}  ", (what, "dim")), soft_wrap=True)


def timed_epochs(images_per_second: Callable[[], float], images: int, most: int) -> tuple[int, float]:
    """How many epochs to train, and the best speed that was timed; again where that is not enough for all of them."""
    epochs, best = 0, 0.0
    for _ in range(_TIMINGS):
        best = max(best, images_per_second())
        epochs = epochs_in_time(best, images, most)
        if epochs == most:
            break
    return epochs, best


def epochs_in_time(images_per_second: float, images: int, most: int) -> int:
    """How many epochs to train: `most`, or what ends in time, but no fewer than learn something."""
    seconds = most * images / images_per_second
    return most if seconds < _PATIENCE_S else max(_FEWEST, int(_TRAINING_S * images_per_second / images))


def tell_if_busy(load: float, cores: int) -> None:
    """Say that the demo is disturbed where others use more than a quarter of the machine's cores."""
    if load > cores / 4:
        terminal.say(
            f"Other processes use {load:.1f} of this machine's {cores} cores: the demo learns more without them."
        )
