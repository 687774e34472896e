"""Encoders that a cell starts from: one that was trained with labels on other images, or somebody's weights."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adasim.config import Config
from adasim.data import open_images
from adasim.models import EvalTransform, build_backbone, save_backbone
from adasim.util.seeding import key

OTHERS = slice(500, 3000)
"""Training images of each class, by number: the first 500 are the bench's own."""
BATCH, RATE, MOMENTUM, DECAY = 128, 0.1, 0.9, 5e-4


def resolve(config: Config, data: Path, runs: Path, weights: str | None) -> str:
    """What `--model.init` is for a cell whose configuration says `supervised:EPOCHS` or `weights`."""
    if config.model.init == "weights":
        if weights is None:
            raise SystemExit(
                "This cell starts from an encoder that somebody trained. Name it with --weights."
            )
        return weights
    _, _, epochs = config.model.init.partition(":")
    file = runs / f"supervised-{epochs}.safetensors"
    if epochs and not file.exists():
        train_with_labels(config, data, int(epochs), file)
    return str(file) if epochs else config.model.init


def train_with_labels(config: Config, data: Path, epochs: int, file: Path) -> None:
    """Cross-entropy on 25,000 images of CIFAR-10 that the bench does not have; shifted by 4 pixels, and mirrored."""
    torch.manual_seed(key(0, "supervised", epochs))
    images = open_images(str(data), split="train")
    assert images.labels is not None
    places = torch.cat([(images.labels == c).nonzero()[OTHERS, 0] for c in images.labels.unique()])
    pixels = torch.stack([images.load(int(i)) for i in places])  # (n, 3, 32, 32), uint8
    labels = images.labels[places]
    transform = EvalTransform.for_run(config)
    backbone = build_backbone(config.model, 32, student=True)
    head = nn.Linear(backbone.dim, int(labels.max()) + 1)
    parameters = [*backbone.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, RATE, MOMENTUM, weight_decay=DECAY, nesterov=True)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (transform.mean, transform.std))
    steps = epochs * (len(labels) // BATCH)
    backbone.train()
    for step in range(steps):
        if step % (len(labels) // BATCH) == 0:
            order = torch.randperm(len(labels)).split(BATCH)
        ids = order[step % (len(labels) // BATCH)]
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 + math.cos(math.pi * step / steps)) / 2
        views = (shifted(pixels[ids]).float() / 255 - mean) / std
        loss = F.cross_entropy(
            head(backbone(views.contiguous(memory_format=torch.channels_last))), labels[ids]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_backbone(file, backbone.eval(), transform)


def shifted(pixels: Tensor) -> Tensor:
    """Each image (B, C, H, W) moved by up to 4 pixels over black, and mirrored every second time."""
    count, _, height, width = pixels.shape
    padded = F.pad(pixels, (4, 4, 4, 4))
    tops, lefts = torch.randint(0, 9, (2, count))
    rows = (tops[:, None] + torch.arange(height))[:, None, :, None]
    columns = lefts[:, None] + torch.arange(width)
    columns = torch.where(torch.rand(count, 1) < 0.5, columns.flip(1), columns)[:, None, None, :]
    at = torch.arange(count)[:, None, None, None]
    return padded[at, torch.arange(pixels.shape[1])[None, :, None, None], rows, columns]
