"""Views per second of one core: photos as loader processes and the device share them, and small images in memory.

    python benchmarks/views.py            # prints two tables, writes benchmarks/results/views*.{json,md}

Photos: two views of 224 pixels of JPEG files, made by DINO's published pipeline (PIL and torchvision, written from
its description), and by adasim's two halves: what a loader process does (decode, crop, resize) and what the training
device does (flip, jitter, grey, blur, solarise, normalise), here on the same CPU core, too. Small images: views 1
and 2 of 256 images of 32 pixels, by torchvision's pipelines and by `BatchedViews`.

The contenders take turns (so that a busy moment of the machine hits all of them), and the median over the rounds
counts. All run in one thread and are charged for processor time, so that other programs count little.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _report import options, report, take_turns
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor
from torchvision import transforms
from torchvision.transforms import v2

from adasim.config import ViewsConfig
from adasim.data import BatchedViews, FolderImages
from adasim.data.crops import CropWorker, ViewSettings
from adasim.data.pool import TASK
from adasim.registry import METHODS

BATCH, SIZE = 256, 32
PHOTOS = {"500 x 375": (375, 500, 32), "1024 x 768": (768, 1024, 16), "4032 x 3024 (12 MP)": (3024, 4032, 2)}
"""Height, width, and how many of them."""


def photo(height: int, width: int, seed: int) -> Image.Image:
    """Noise with the spectrum of photographs (amplitude 1 / frequency), in colours that belong together."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    amplitude = 1 / np.maximum(frequency, 1 / max(height, width))

    def plane() -> np.ndarray:
        noise = rng.standard_normal((2, *amplitude.shape))
        field = np.fft.irfft2((noise[0] + 1j * noise[1]) * amplitude, s=(height, width))
        return field / field.std()

    common = plane()
    levels = np.stack([128 + 45 * (0.9 * common + 0.4 * plane()) for _ in range(3)], axis=-1)
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8))


def dino_view(config: ViewsConfig, view: int) -> Callable[[Image.Image], Tensor]:
    """As DINO describes its augmentation: on PIL images, one after the other."""
    settings = ViewSettings.of(config, view)

    def blur(image: Image.Image) -> Image.Image:
        if random.random() >= settings.blur_p:
            return image
        return image.filter(ImageFilter.GaussianBlur(radius=random.uniform(0.1, 2.0)))

    def solarize(image: Image.Image) -> Image.Image:
        return ImageOps.solarize(image) if random.random() < settings.solarize_p else image

    bicubic = transforms.InterpolationMode.BICUBIC
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(settings.size, scale=settings.scale, interpolation=bicubic),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply([transforms.ColorJitter(*settings.jitter)], settings.jitter_p),
            transforms.RandomGrayscale(settings.grey_p),
            blur,
            solarize,
            transforms.ToTensor(),
            transforms.Normalize(config.mean, config.std),
        ]
    )


def photo_contenders(folder: Path) -> tuple[int, dict[str, Callable[[], object]]]:
    """How many photos there are, and functions that each do their part for two views of all of them."""
    images = FolderImages(folder)
    config = ViewsConfig(**METHODS["dino"].VIEWS, size=224)
    dino = [dino_view(config, view) for view in (1, 2)]
    ids, finish = torch.arange(len(images)), BatchedViews(config)

    def published() -> None:
        for i in range(len(images)):
            with open(images.where(i), "rb") as file:
                image = Image.open(file).convert("RGB")
            for view in dino:
                view(image)

    def cutter(reduced: bool) -> Callable[[], list[Tensor]]:
        work = CropWorker(images, ViewsConfig(**METHODS["dino"].VIEWS, size=224, reduced_jpeg=reduced), 0)
        crops = [torch.empty(len(ids), 3, 224, 224, dtype=torch.uint8) for _ in (1, 2)]

        def cut() -> list[Tensor]:
            for rows, *parts in zip(ids.split(TASK), *(view.split(TASK) for view in crops), strict=True):
                work((0, (1, 2)), [(i, i) for i in rows.tolist()], parts)
            return crops

        return cut

    exact, reduced = cutter(False), cutter(True)
    crops = [view.clone() for view in exact()]
    return len(images), {
        "DINO's pipeline": published,
        "decoding alone": lambda: [images.load(i) for i in range(len(images))],
        "loader process, JPEGs at full size": exact,
        "loader process": reduced,
        "device's half, on the CPU": lambda: [
            finish.of_crops(crop.clone(), view, 0, 0, ids) for view, crop in zip((1, 2), crops, strict=True)
        ],
    }


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


def small_contenders(config: ViewsConfig, channels: int) -> dict[str, Callable[[], object]]:
    """Functions that each make views 1 and 2 of the same 256 images."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(BATCH, channels, 8, 8, generator=generator)
    images = (torch.nn.functional.interpolate(coarse, size=(SIZE, SIZE)) * 255).to(torch.uint8)
    colour = [image.expand(3, -1, -1).contiguous() for image in images]
    pil = [v2.functional.to_pil_image(image) for image in colour]
    ids, batched = torch.arange(BATCH), BatchedViews(config)
    pipelines = [torchvision_pipeline(ViewSettings.of(config, view), config) for view in (1, 2)]
    return {
        "torchvision, PIL": lambda: [torch.stack([p(image) for image in pil]) for p in pipelines],
        "torchvision, tensors": lambda: [torch.stack([p(image) for image in colour]) for p in pipelines],
        "adasim": lambda: [batched(images, view, 0, 0, ids) for view in (1, 2)],
    }


def main() -> None:
    rounds = options(__doc__, rounds=15).rounds
    torch.set_num_threads(1)

    rows: list[dict[str, Any]] = []
    for name, (height, width, count) in PHOTOS.items():
        with tempfile.TemporaryDirectory() as folder:
            for i in range(count):
                photo(height, width, i).save(Path(folder) / f"{i:03d}.jpg", quality=90)
            number, functions = photo_contenders(Path(folder))
            turns = rounds if count > 2 else max(3, rounds // 3)
            taken = take_turns(functions, turns, time.process_time)
        for contender, seconds in taken.items():
            rows.append(
                {
                    "photos": name,
                    "who": contender,
                    "images per second and core": round(number / seconds, 1),
                    "ms per image": round(1000 * seconds / number, 2),
                    "times DINO's pipeline": round(taken["DINO's pipeline"] / seconds, 2),
                }
            )
    settings = {"views": 2, "size": 224, "JPEG quality": 90, "images in a task": TASK}
    report("views_photos", settings, rows, script="views")

    rows = []
    for recipe, blur in (("dino", 1.0), ("dino", 0.0), ("simsiam", 1.0), ("simsiam", 0.0)):
        for channels in (3, 1):
            config = ViewsConfig(**METHODS[recipe].VIEWS, size=SIZE, blur=blur)
            taken = take_turns(small_contenders(config, channels), rounds, time.process_time)
            best = min(seconds for name, seconds in taken.items() if name != "adasim")
            rows.append(
                {
                    "recipe": recipe + ("" if blur else ", no blur"),
                    "channels": channels,
                    **{f"views/s: {name}": round(2 * BATCH / seconds) for name, seconds in taken.items()},
                    "adasim over torchvision's faster": round(best / taken["adasim"], 1),
                }
            )
    report("views", {"size": SIZE, "batch": BATCH}, rows)


if __name__ == "__main__":
    main()
