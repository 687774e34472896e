"""Small pictures for tests to work on."""

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from adasim.data import ImageSet


def smooth(count: int, height: int, width: int, seed: int = 0, channels: int = 3) -> Tensor:
    """Images with soft colours, uint8 (count, channels, height, width)."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, channels, 6, 6, generator=generator)
    fine = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")
    return (fine * 255).round().to(torch.uint8)


def picture(pixels: Tensor) -> Image.Image:
    """uint8 (3, height, width) as PIL's image."""
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def save_image(pixels: Tensor, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(pixels).save(path)


def labels_of(images: ImageSet) -> list[int] | None:
    return None if images.labels is None else images.labels.tolist()
