"""Pretraining on images that are handed over in Python."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from PIL import Image
from pretrainings import small
from torch import Tensor
from torch.utils.data import Dataset

import adasim
from adasim.cli.main import main
from adasim.data import open_images, synthetic
from adasim.util.errors import UserError
from adasim.util.interrupts import Stopped

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return synthetic(48, 16).images


class Pictures(Dataset[tuple[Image.Image, int]]):
    """The images as PIL has them; sends this process a signal when item number `stop` is asked for."""

    def __init__(self, pixels: Tensor, stop: int | None = None) -> None:
        self.pixels, self.asked, self.stop = pixels, 0, stop
        self.targets = [i % 4 for i in range(len(pixels))]

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        self.asked += 1
        if self.asked == self.stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return Image.fromarray(self.pixels[i, 0].numpy()), self.targets[i]


def source(out: Path) -> str:
    return json.loads((out / "config.json").read_text())["data"]["source"]


def weights(out: Path) -> bytes:
    return (out / "backbone.safetensors").read_bytes()


def test_a_tensor_a_data_set_and_a_source_of_the_same_images_train_the_same_encoder(
    tmp_path: Path, pixels: Tensor
) -> None:
    config = small(epochs=2)
    runs = {}
    for name, data in {
        "string": "synthetic:48",
        "set": open_images("synthetic:48", size=16),
        "tensor": pixels,
        "pictures": Pictures(pixels.expand(-1, 1, -1, -1)),
    }.items():
        runs[name] = adasim.pretrain(config, tmp_path / name, data=data)
    assert weights(runs["string"]) == weights(runs["set"]) == weights(runs["tensor"])
    assert [source(out) for out in runs.values()] == [
        *("synthetic:48", "python:SyntheticImages", "python:Tensor", "python:Pictures")
    ]
    assert config.data.source == small().data.source  # the caller's own
    # A grey picture has three equal channels: other roundings, the same encoder within them.
    first, second = (adasim.load_run(runs[name]).memory.cache for name in ("tensor", "pictures"))
    torch.testing.assert_close(first, second, rtol=0, atol=0.02)


def test_a_stopped_run_on_a_data_set_goes_on_to_the_same_bits(tmp_path: Path, pixels: Tensor) -> None:
    """Its items are read in every step, the second time by loader processes."""
    config = small(views__in_memory=False, epochs=2)
    data = Pictures(pixels)
    whole = adasim.pretrain(config, tmp_path / "whole", data=data)
    with pytest.raises(Stopped):
        adasim.pretrain(config, tmp_path / "run", data=Pictures(pixels, stop=data.asked - 20))
    config.data.workers = 2
    again = adasim.pretrain(config, tmp_path / "run", data=Pictures(pixels), resume=True)
    assert weights(again) == weights(whole)


@pytest.fixture
def begun(tmp_path: Path, pixels: Tensor) -> Path:
    """A run of two epochs on a tensor."""
    return adasim.pretrain(small(epochs=2, pairs="standard"), tmp_path / "run", data=pixels)


def test_to_resume_without_the_images_is_refused_in_a_sentence(
    begun: Path, pixels: Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = small(epochs=3, pairs="standard")
    with pytest.raises(
        UserError, match=r"Cannot resume with other data: .*Hand over the images .* data=\.\.\."
    ):
        adasim.pretrain(longer, begun, resume=True)  # the images that the configuration names
    longer.data.source = ""
    with pytest.raises(
        UserError, match=r"python:Tensor were handed over in Python.* data=images, resume=True"
    ):
        adasim.pretrain(longer, begun, resume=True)
    with pytest.raises(UserError, match="1 changed"):
        adasim.pretrain(longer, begun, data=pixels.flip(0), resume=True)
    with pytest.raises(SystemExit) as end:
        main(["pretrain", "--resume", str(begun), "--epochs", "3", "--no-curves"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "were handed over in Python" in said
    assert "Traceback" not in said
    adasim.pretrain(longer, begun, data=pixels, resume=True)
    assert json.loads((begun / "config.json").read_text())["epochs"] == 3


def test_labels_of_a_data_set_serve_the_oracle_and_the_online_knn(tmp_path: Path, pixels: Tensor) -> None:
    config = small(pairs="oracle", epochs=1, eval__every=1)
    adasim.pretrain(config, tmp_path / "run", data=Pictures(pixels))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert "knn_top1" in json.loads(lines[-1])
    with pytest.raises(UserError, match="python:Tensor has none"):
        adasim.pretrain(config, tmp_path / "other", data=pixels)
    assert not (tmp_path / "other").exists()
