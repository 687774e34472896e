"""Run folders with an untrained encoder, or with numbers for curves and without training; photos of several sizes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import photograph
from PIL import Image
from pretrainings import Small

from adasim.config import Config, DataConfig, ModelConfig, ViewsConfig
from adasim.data import open_images, record
from adasim.data.identity import listing_file
from adasim.models import BACKBONE_FILE, EvalTransform, build_backbone, save_backbone
from adasim.runs.folder import RunFolder
from adasim.util import seeding


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve photos in two class folders, of several sizes."""
    for i in range(12):
        path = tmp_path / "photos" / "ab"[i % 2] / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photograph(40 + i, 60, i)).save(path)
    return tmp_path / "photos"


@pytest.fixture
def make_run(tmp_path: Path, photos: Path) -> Callable[..., Path]:
    """`make_run(model="vit_mini", size=80)`: a run folder, as of the photos."""

    def make(
        name: str = "run",
        *,
        model: str = "resnet_tiny",
        size: int = 16,
        patch_size: int = 16,
        small_stem: bool = False,
        source: str = "photos",
    ) -> Path:
        config = Config(
            method="simsiam",
            data=DataConfig(source=source),
            views=ViewsConfig(size=size, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3)),
            model=ModelConfig(name=model, patch_size=patch_size, drop_path=0.0, small_stem=small_stem),
        )
        images = open_images(str(photos))
        RunFolder.create(tmp_path / name, config, record(images), listing=listing_file(images)).close()
        with seeding.seeded(0):
            backbone = build_backbone(config.model, size, student=False)
            with torch.no_grad():
                backbone(torch.randn(8, 3, size, size))  # batch norm statistics of its own
        save_backbone(tmp_path / name / BACKBONE_FILE, backbone, EvalTransform.for_run(config))
        return tmp_path / name

    return make


Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, small: Small) -> Make:
    """A run folder of these settings with these numbers for each epoch of ten steps, as pretraining writes it."""

    def write(name: str, values: dict[str, Sequence[Any]], **changes: Any) -> Path:
        run = tmp_path / name
        run.mkdir()
        (run / "config.json").write_text(json.dumps(small(**changes).to_dict()))
        (run / "data.json").write_text("{}")
        count = max(map(len, values.values()), default=0)
        lines = [
            {"step": 10 * (e + 1), "epoch": e, **{k: v[e] for k, v in values.items() if e < len(v)}}
            for e in range(count)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run

    return write
