"""What a table or figure of the paper takes on a cluster: data, commands and GPU hours, as a shell script."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from adasim.cli.pretrain import configured
from adasim.config import Config
from adasim.models import build_backbone
from adasim.recipes import get_recipe
from adasim.tools.plan import Plan
from adasim.train.budget import Footprint
from adasim.train.state import memory_options

from .cluster import MEASURES, PAPER, SUPERVISED, TRAININGS, Cluster, Command, afterwards, commands
from .names import arm_name
from .prepare import CLASSES
from .tables import Cell

WIDTH = 100
GPUS = {
    "V100": (125.0, 15.7),
    "A100": (312.0, 19.5),
    "H100": (989.0, 67.0),
    "MI250X": (191.5, 23.9),
    "RTX4090": (165.0, 82.6),
}
"""The makers' TFLOP/s in fp16 and in fp32; of an MI250X, of one of its two devices."""
SHARES = (0.2, 0.5)
"""How much of that a step reaches: fp16 is set by the paper's own step (0.256 s for 128 images), fp32 is a guess."""
PREPARE = "python -m benchmarks.paper.prepare {name} downloads/{name} {data}/{name}"
DATA: dict[str, tuple[str, str]] = {
    "imagenet": (
        "ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz in {data}/imagenet",
        'python -c "from torchvision.datasets import ImageNet\n'
        "for split in ('train', 'val'): ImageNet('{data}/imagenet', split)\"",
    ),
    "coco": ("train2017.zip of COCO", "unzip -q downloads/train2017.zip -d {data}/coco"),
    "voc": ("VOC2012 and SBD", PREPARE),
    "coco-things": (
        "pictures, stuffthingmaps and annotations of COCO 2017, unpacked in downloads/coco",
        PREPARE.replace("downloads/{name}", "downloads/coco"),
    ),
    "coco-stuff": ("the same", PREPARE.replace("downloads/{name}", "downloads/coco")),
    **{name: ("its archive, unpacked in downloads/{name}", PREPARE) for name in CLASSES},
}
"""Each data set: what one needs to have, and how it becomes a folder of {data}."""
IMAGES = {"imagenet": 1_281_167, "coco": 118_287}
CALTECH = 9_144  # images, which differ between releases
PASSES = {
    "knn": (1_331_167, 224),
    "snapshots": (16 * 1_331_167, 224),
    "linear": (100 * 1_331_167, 224),
    "fewshot": (sum(images or CALTECH for _, (_, images) in CLASSES.values()), 224),
    "voc": (60 * (10_582 + 1_449), 448),
    "coco-things": (60 * (118_287 + 5_000), 448),
    "coco-stuff": (60 * (118_287 + 5_000), 448),
}
"""Images that a measure takes through the encoder, training and test ones in every epoch, and their side."""


def show(names: list[str], cluster: Cluster, gpu: str) -> None:
    """The script. What an earlier table has run already is not run again."""
    print(*wrapped_comment(how_estimated(gpu)), sep="\n")
    shown: set[str] = set()
    total = 0.0
    summary = []
    for name in names:
        lines, hours, repeated = script(name, cluster, gpu, shown)
        total += hours
        summary.append((name, PAPER[name].title, hours))
        print(f"\n# {'-' * (WIDTH - 2)}")
        print(*wrapped_comment(f"{PAPER[name].title} [{name}]"), sep="\n")
        again = f"; {repeated} commands of tables above serve here, too" if repeated else ""
        print(*wrapped_comment(f"About {rounded(hours)} hours of one {gpu}{again}"), sep="\n")
        print(*lines, sep="\n")
    if len(names) > 1:
        print(f"\n# {'-' * (WIDTH - 2)}")
        for name, title, hours in summary:
            print(f"# {rounded(hours):>9} h  {name:14}{title[: WIDTH - 29]}")
        print(f"# {total:9,.0f} h  in all, of one {gpu}")


def script(name: str, cluster: Cluster, gpu: str, shown: set[str]) -> tuple[list[str], float, int]:
    """The lines of a table, their GPU hours, and how many of its commands stand in `shown` already."""
    item, lines, hours, repeated = PAPER[name], [], 0.0, 0

    def new(command: str) -> bool:
        nonlocal repeated
        repeated += command in shown
        before = len(shown)
        shown.add(command)
        return len(shown) > before

    for data in needed(name):
        what, made_by = (text.format(name=data, data=cluster.data) for text in DATA[data])
        if new(made_by):
            lines += ["", *wrapped_comment(f"Data: {what}"), made_by]
    for cell in item.cells:
        todo = commands(cell, item.measures, cluster)
        parts = ["", *item.measures.split()]
        parts = parts[len(parts) - len(todo) :]  # a finished run is only measured
        fresh = [
            (command, gpu_hours(cell, measure, command, gpu))
            for measure, command in zip(parts, todo, strict=True)
            if new(shlex.join(command))
        ]
        if fresh:
            spent = sum(time for _, time in fresh)
            hours += spent
            lines += ["", *wrapped_comment(f"{title_of(cell)}: {rounded(spent)} h")]
            lines += [line for command, _ in fresh for line in wrapped(command)]
    lines += ["", "# All together" if item.cells else "# Minutes"]
    if item.afterwards not in ("table", "runtime"):
        lines.append(f"mkdir -p {cluster.results / 'figures'}")
    lines += [line for command in afterwards(item, cluster) for line in wrapped(command)]
    return lines, hours, repeated


def rounded(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 1 else "<1"


def title_of(cell: Cell) -> str:
    """A run in words."""
    if cell.method == SUPERVISED:
        return f"Trained with labels, {cell.arm}"
    return f"{TRAININGS[cell.method].title}, {arm_name(cell.arm)}"


def needed(name: str) -> list[str]:
    """The data sets of a table, by name, in the order of their use."""
    item = PAPER[name]
    trained = [TRAININGS[c.method].data.split("/")[0] for c in item.cells if c.method in TRAININGS]
    words = [word for measure in item.measures.split() for word in MEASURES[measure].split()]
    measured = [word.removeprefix("{data}/") for word in words if word.startswith("{data}/")]
    return list(dict.fromkeys([*trained, *measured]))


def how_estimated(gpu: str) -> str:
    """In words, what the hours are."""
    fp16, fp32 = GPUS[gpu]
    return (
        f"Hours are estimates: the operations of every step, counted as `adasim plan` does, at {SHARES[0]:.0%} "
        f"of the {fp16:g} TFLOP/s of an {gpu} in fp16, or {SHARES[1]:.0%} of its {fp32:g} in fp32 (ResNet-50, "
        f"ViT-B/16, evaluations). Images must be read as fast. --gpu names another, --gpus says how many share "
        f"the work."
    )


def gpu_hours(cell: Cell, measure: str, command: Command, gpu: str) -> float:
    """Of one command; `measure` is empty for a pretraining."""
    if measure:
        recipe = TRAININGS[cell.method].recipe if cell.method in TRAININGS else "simsiam-resnet50"
        images, side = PASSES[measure]
        return _hours(images * _forward(recipe, side), "fp32", gpu)
    if "--resume" in command:
        return 0.0  # how far it has come is not known here
    training = TRAININGS[cell.method]
    begin = command.index("pretrain") + 2
    config = configured(training.recipe, command[begin:]).config
    return _hours(pretraining_flops(config, IMAGES[training.data.split("/")[0]]), config.precision, gpu)


def pretraining_flops(config: Config, images: int) -> float:
    """Of all steps, and of the search for neighbours in each."""
    flops = float(_step(config.recipe) * images)
    options = memory_options(config)
    if options is not None:
        plan = Plan(images, _width(config.recipe), 1, options["window"], options["k"], config.batch_size)
        flops += plan.search_flops * (images // config.batch_size)
    return flops * config.epochs


def _hours(flops: float, precision: str, gpu: str) -> float:
    place = 0 if precision in ("fp16", "bf16") else 1
    return flops / (1e12 * GPUS[gpu][place] * SHARES[place]) / 3600


@cache  # it takes seconds, and pairs do not change it
def _step(recipe: str) -> int:
    """Operations of one image in a step without the memory."""
    return Footprint.count(get_recipe(recipe)).flops(1)


@cache
def _forward(recipe: str, side: int) -> int:
    """Operations of one image in the encoder."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        build_backbone(get_recipe(recipe).model, side, student=False)(torch.empty(2, 3, side, side))
    return counter.get_total_flops() // 2


@cache
def _width(recipe: str) -> int:
    """Of the features that the memory keeps."""
    config = get_recipe(recipe)
    with torch.device("meta"):
        return build_backbone(config.model, config.views.size, student=False).dim


def wrapped(command: Command) -> list[str]:
    r"""A command in lines that a shell reads as one, broken before options.

    >>> print(*wrapped(["adasim", "pretrain", *["--some.option", "value"] * 4]), sep="\n")
    adasim pretrain --some.option value --some.option value --some.option value \
        --some.option value
    """
    groups: list[str] = []
    for word in map(shlex.quote, command):
        if groups and not word.startswith("--") and len(groups[-1]) + len(word) < WIDTH - 12:
            groups[-1] += f" {word}"
        else:
            groups.append(word)
    lines = [groups[0]]
    for group in groups[1:]:
        if len(lines[-1]) + len(group) < WIDTH - 2:
            lines[-1] += f" {group}"
        else:
            lines.append(f"    {group}")
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def wrapped_comment(text: str) -> Iterator[str]:
    """The text as comments of a shell."""
    return iter(textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# "))
