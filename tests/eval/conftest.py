"""Run folders with an untrained encoder, made in no time: evaluations ask for weights, not for good ones."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from adasim.config import Config, DataConfig, ModelConfig, ViewsConfig
from adasim.models import BACKBONE_FILE, EvalTransform, build_backbone, save_backbone
from adasim.runs.folder import RunFolder
from adasim.util import seeding


def _make_run_in(
    parent: Path,
    name: str = "run",
    *,
    model: str = "resnet_tiny",
    size: int = 16,
    source: str = "synthetic:320",
    method: str = "simsiam",
    seed: int = 0,
) -> Path:
    config = Config(
        method=method,
        data=DataConfig(source=source),
        views=ViewsConfig(size=size, mean=(0.5,), std=(0.25,)),
        model=ModelConfig(name=model, patch_size=4, drop_path=0.0),
    )
    RunFolder.create(parent / name, config, {"fingerprint": "", "listing": []}).close()
    with seeding.seeded(seed):
        backbone = build_backbone(config.model, size, student=False)
    save_backbone(parent / name / BACKBONE_FILE, backbone, EvalTransform.for_run(config))
    return parent / name


@pytest.fixture(scope="session")
def make_run_in() -> Callable[..., Path]:
    return _make_run_in


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run("name", model="vit_mini", size=16, source="synthetic:320", method="dino")`: a run folder."""
    return partial(_make_run_in, tmp_path)
