"""Views per second at 32 pixels on one core: torchvision's pipelines, our per-image path, our batched path.

    python benchmarks/views.py            # prints the table, writes benchmarks/results/views.{json,md}

The contenders take turns (so that a busy moment of the machine hits all of them), each makes views 1 and 2 of
the same 256 images, and the median over the rounds counts. All run in one thread and are charged for
processor time, so that other programs count little. Ratios are to the fastest per-image path.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torchvision
from torch import Tensor
from torchvision.transforms import v2

from adasim.config import ViewsConfig
from adasim.data import BatchedViews, Views
from adasim.data.views.parameters import ViewSettings, view_uniforms
from adasim.registry import METHODS

RESULTS = Path(__file__).parent / "results"
BATCH, SIZE = 256, 32


def torchvision_pipeline(settings: ViewSettings, config: ViewsConfig) -> Callable[..., Tensor]:
    """The recipe as torchvision's documentation would write it; takes a PIL image or a uint8 tensor."""
    return v2.Compose(
        [
            v2.RandomResizedCrop(
                settings.size,
                scale=settings.scale,
                interpolation=v2.InterpolationMode(settings.interpolation),
            ),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(*settings.jitter)], settings.jitter_p),
            v2.RandomGrayscale(settings.grey_p),
            v2.RandomApply([v2.GaussianBlur(13, (0.1, 2.0))], settings.blur_p),
            v2.RandomSolarize(128, settings.solarize_p),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(config.mean), list(config.std)),
        ]
    )


def contenders(config: ViewsConfig, channels: int) -> dict[str, Callable[[], object]]:
    """Functions that each make views 1 and 2 of the same 256 images."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(BATCH, channels, 8, 8, generator=generator)
    images = (torch.nn.functional.interpolate(coarse, size=(SIZE, SIZE)) * 255).to(torch.uint8)
    colour = [image.expand(3, -1, -1).contiguous() for image in images]
    pil = [v2.functional.to_pil_image(image) for image in colour]
    ids = torch.arange(BATCH)
    ours, batched = Views(config), BatchedViews(config)
    pipelines = [torchvision_pipeline(ViewSettings.of(config, view), config) for view in (1, 2)]

    def per_image() -> list[Tensor]:
        names = [view_uniforms(0, view, 0, ids) for view in (1, 2)]
        return [ours.batch(colour, view, u) for view, u in zip((1, 2), names, strict=True)]

    return {
        "torchvision v2, PIL": lambda: [torch.stack([p(image) for image in pil]) for p in pipelines],
        "torchvision v2, tensor": lambda: [torch.stack([p(image) for image in colour]) for p in pipelines],
        "adasim per image": per_image,
        "adasim batched": lambda: [batched(images, view, 0, 0, ids) for view in (1, 2)],
    }


def measure(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median views per second of each, the contenders taking turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            start = time.process_time()
            function()
            if turn:  # the first turn warms up
                times[name].append(time.process_time() - start)
    return {name: 2 * BATCH / statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    cases = []
    for recipe, blur in (("dino", 1.0), ("dino", 0.0), ("simsiam", 1.0)):
        for channels in (3, 1):
            config = ViewsConfig(**METHODS[recipe].VIEWS, size=SIZE, blur=blur)
            rates = measure(contenders(config, channels), rounds)
            best = max(rate for name, rate in rates.items() if name != "adasim batched")
            cases.append(
                {
                    "recipe": recipe + ("" if blur else ", no blur"),
                    "channels": channels,
                    "views_per_second": {name: round(rate) for name, rate in rates.items()},
                    "batched_against_fastest_per_image": round(rates["adasim batched"] / best, 1),
                }
            )
    machine = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, 1 thread used",
        "versions": f"torch {torch.__version__}, torchvision {torchvision.__version__}",
    }
    table = as_markdown(cases, machine)
    print(table)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "views.json").write_text(json.dumps({**machine, "cases": cases}, indent=2) + "\n")
    (RESULTS / "views.md").write_text(table + "\n")


def as_markdown(cases: list[dict], machine: dict[str, str]) -> str:
    names = list(cases[0]["views_per_second"])
    lines = [
        f"Views per second of processor time, {SIZE} pixels, batch {BATCH} "
        f"({machine['date']}; {machine['machine']}; {machine['versions']}).",
        "",
        f"| recipe | channels | {' | '.join(names)} | batched / fastest per image |",
        "|---|---|" + "---|" * (len(names) + 1),
    ]
    for case in cases:
        rates = " | ".join(f"{case['views_per_second'][name]:,}" for name in names)
        ratio = case["batched_against_fastest_per_image"]
        lines.append(f"| {case['recipe']} | {case['channels']} | {rates} | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
