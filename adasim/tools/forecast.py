"""What a run will take on this machine, told before it is started: memory of a step, speed, time and disk.

adasim plan dino-vit-s16 --data ~/photos --batch-size 64
"""

from __future__ import annotations

import os

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from adasim.config import Config
from adasim.data import ImageSet, Unreadable, describe, leave_out, open_images, worker_count
from adasim.dist.processes import Distributed
from adasim.models import build_backbone
from adasim.registry import PAIRS
from adasim.tools.plan import Plan
from adasim.train.budget import OVERHEAD, Footprint, choose_micro_batches, free_bytes, time_steps
from adasim.train.state import bytes_on_disk, memory_options
from adasim.util.errors import UserError
from adasim.util.units import duration, scaled

Line = tuple[str, str, str]
"""What, how much, why."""
_LOOKED_AT = 24  # images whose size is looked up
# On 5,000 photographs of CIFAR-10, 200 times each, a small ResNet got well past raw pixels (docs/results.md); on
# 3,068 of clothes it did not (docs/use.md).
_ENOUGH_IMAGES, _ENOUGH_VIEWS = 5_000, 1_000_000


def forecast(config: Config, console: Console) -> None:
    """Open the images, count what a step needs, time a few steps, and show all of it as a table."""
    with Distributed.start(config.device) as ranks:
        if ranks.world > 1:
            raise UserError(
                "`adasim plan RECIPE` measures in one process. Start it without torchrun or srun."
            )
        images = leave_out(open_images(config.data.source, size=config.views.size), config.data.exclude)
        config.check(len(images), images.labels is not None)
        console.print(describe(images), soft_wrap=True)
        free = free_bytes(ranks.device)
        count, note = choose_micro_batches(config, ranks, free)
        at_once = config.batch_size // count
        if note:
            console.print(note, soft_wrap=True)
        console.print("Timing a few steps ...")
        speed = time_steps(config, images, ranks, at_once=at_once).images_per_second
    console.print()
    show(lines(config, images, str(ranks.device), free, speed, at_once), console)
    if told := warning(config, len(images)):
        console.print(told, soft_wrap=True)


def warning(config: Config, images: int) -> str | None:
    """A sentence where the encoder will probably be no better than raw pixels."""
    drawn = config.data.source.startswith("synthetic")
    if config.model.init or drawn or (images >= _ENOUGH_IMAGES and images * config.epochs >= _ENOUGH_VIEWS):
        return None
    return (
        f"{images:,} images, {config.epochs} times each, are little to learn from: the encoder will hardly be better "
        f"than raw pixels. Go on from trained weights instead (--model.init, see docs/use.md), or use such "
        f"weights as they are: adasim explore --backbone NAME --data {config.data.source}"
    )


def lines(
    config: Config, images: ImageSet, device: str, free: float, speed: float, at_once: int
) -> list[Line]:
    """The table of a run that takes `at_once` images through the network at a time, at a measured speed."""
    footprint = Footprint.count(config, device=torch.device(device))
    epoch = len(images) / speed
    found: list[Line] = [
        (
            "images",
            f"{len(images):,}",
            f"about {median_size(images)} pixels; read by {_processes(config)}",
        ),
        ("machine", device, f"{os.cpu_count()} cores, {scaled(free, 'B')} of memory free"),
        (
            "model",
            f"{config.model.name} at {config.views.size} pixels",
            f"{config.method}, from {config.model.init or 'scratch'}",
        ),
        (
            "batch",
            str(config.batch_size),
            f"{at_once} at once, which takes about {scaled(OVERHEAD * footprint.training_bytes(at_once), 'B')}",
        ),
        ("speed", f"{speed:,.3g} images/s", f"measured; {duration(epoch)} an epoch"),
        ("epochs", str(config.epochs), f"{duration(config.epochs * epoch)} in all"),
    ]
    with torch.device("meta"):
        width = build_backbone(config.model, config.views.size, student=False).dim
    keep, weights = config.save.keep, footprint.checkpoint_bytes
    one, history = bytes_on_disk(weights, width)
    options = memory_options(config)
    if options is not None:
        on_cpu = torch.device(device).type == "cpu"
        cache = config.neighbors.cache
        dtype = cache if cache != "auto" else "float32" if on_cpu else "float16"
        plan = Plan(len(images), width, 1, options["window"], options["k"], config.batch_size, dtype)
        means = 4 * len(images) * width if "mean_decay" in options else 0
        held = plan.cache_bytes + means
        if options["lists"]:
            held += plan.history_bytes + (plan.int8_bytes if on_cpu else 0)
            sizes = f"w = {options['window']}, K = {options['k']}"
        else:
            sizes = "a running mean of each image's features"
        told, policy = scaled(held, "B"), PAIRS[config.pairs]
        if policy.draws_from_memory and policy.reads_lists and options["window"] < config.epochs:
            told += f"; partners are drawn from epoch {options['window'] + 1} on"
        found.append(("neighbours", sizes, told))
        memory = plan.checkpoint_bytes + means
        one, history = bytes_on_disk(weights, width, memory, plan.epoch_file_bytes, options["window"], keep)
    found.append(("disk", f"about {scaled(keep * one + history, 'B')}", f"{keep} checkpoints"))
    return found


def show(found: list[Line], console: Console) -> None:
    """The table."""
    table = Table(box=None, padding=(0, 2), show_header=False)
    for what, value, why in found:
        table.add_row(Text(what, "bold"), value, Text(why, "dim"))
    console.print(table)


def _processes(config: Config) -> str:
    count = worker_count(config.data.workers)
    return f"{count} process" if count == 1 else f"{count} processes"


def median_size(images: ImageSet) -> str:
    """Of the median image of a few, by number of pixels."""
    sizes = []
    for i in range(0, len(images), max(1, len(images) // _LOOKED_AT)):
        try:
            sizes.append(tuple(images.load(i).shape[-2:]))
        except Unreadable:
            continue
    if not sizes:
        return "unknown"
    height, width = sorted(sizes, key=lambda size: size[0] * size[1])[len(sizes) // 2]
    return f"{width} x {height}"
