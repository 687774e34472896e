"""Evaluation is fed by loader processes as training is: little shared memory is enough, and a lost one is told of."""

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import forked
from PIL import Image

import adasim
import adasim.__main__
from adasim.config import ModelConfig
from adasim.data import ArrayImages, FolderImages
from adasim.data.pool import read_batches
from adasim.eval.encoder import Encoder
from adasim.eval.evaluation import Extractor
from adasim.eval.features import extract
from adasim.eval.segmentation import PatchFeatures
from adasim.models import Backbone, EvalTransform, build_backbone, save_backbone

CLONE_NEWNS = 0x20000  # Linux: a process with mounts of its own


@pytest.fixture(scope="module")
def resnet() -> Backbone:
    return build_backbone(ModelConfig(name="resnet_tiny"), 16, student=False)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    draw = np.random.default_rng(0)
    for i in range(24):
        path = folder / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (40, 50 + i % 3, 3), dtype=np.uint8)).save(path)
    return folder


def command(*arguments: str) -> None:
    """`adasim ARGUMENTS`, and its exit code in words."""
    sys.argv = ["adasim", *arguments]
    try:
        adasim.__main__.main()
    except SystemExit as left:
        print("exit code", left.code)


def with_small_shm(work: Callable[[], None]) -> tuple[int, str]:
    """Exit code and output of a process for which /dev/shm has 64 KB, or fails after two minutes."""

    def small() -> None:
        if ctypes.CDLL(None).unshare(CLONE_NEWNS):
            return print("not permitted")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", "/dev/shm"], check=True)
        signal.alarm(120)
        work()

    code, said = forked(small)
    if "not permitted" in said:
        pytest.skip("mounting a file system needs root")
    return code, said


@pytest.mark.slow
def test_a_small_shared_memory_is_enough_for_every_evaluation(resnet: Backbone, photos: Path) -> None:
    """64 MB are Docker's default, and two batches of 256 images of 384 pixels are 226 MB."""
    images, transform = FolderImages(photos), EvalTransform.of_size(96)
    masks = torch.zeros(24, 40, 50, dtype=torch.uint8)
    masked = ArrayImages("masked", torch.zeros(24, 3, 40, 50, dtype=torch.uint8), masks=masks)

    def work() -> None:
        for workers in (0, 2):
            features = extract(resnet, images, transform, workers=workers)
            extractor = Extractor(Encoder("resnet", resnet, transform, ""), workers=workers)
            dense = PatchFeatures(extractor, masked, torch.arange(24), size=96, blocks=1, batch_size=12)
            dense.workers = workers  # as of files
            total = round(float(features.double().sum()), 9)
            print(len(features), total, sum(len(m) for _, m in dense.in_order()))

    code, said = with_small_shm(work)
    assert code == 0, said
    alone, shared = said.splitlines()
    assert alone == shared
    assert alone.startswith("24 ")


def test_nothing_is_fed_by_torchs_data_loader() -> None:
    """Its processes hand tensors over in /dev/shm, and hang where that is full."""
    texts = [path.read_text() for path in Path(adasim.__file__).parent.rglob("*.py")]
    assert not [text for text in texts if re.search(r"import .*\bDataLoader\b", text)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb",
    [
        "embed {encoder} --out {made}.npz",
        "eval knn {encoder}",
        "explore --backbone {encoder} --out {made}.html",
    ],
)
def test_a_killed_loader_process_ends_a_command_with_one_sentence(
    resnet: Backbone, photos: Path, tmp_path: Path, verb: str
) -> None:
    load, encoder = FolderImages.load, tmp_path / "encoder.safetensors"
    save_backbone(encoder, resnet, EvalTransform.of_size(16))

    def work() -> None:
        parent = os.getpid()

        def killed(images: FolderImages, i: int) -> torch.Tensor:
            if os.getpid() != parent and i > 16:
                os.kill(os.getpid(), signal.SIGKILL)
            return load(images, i)

        setattr(FolderImages, "load", killed)  # noqa: B010 - mypy allows no assignment
        line = f"{verb} --data {photos} --workers 2"
        command(*line.format(encoder=encoder, made=tmp_path / "made").split())

    code, said = forked(work)
    assert code == 0, said
    assert "Traceback" not in said
    *_, sentence, left = said.splitlines()
    assert re.match(r"adasim: A loader process ended .*SIGKILL.*the same command again", sentence), said
    assert left == "exit code 1"


def test_batches_are_in_order_and_say_which_images_could_not_be_read(photos: Path) -> None:
    images = FolderImages(photos)
    Path(images.where(5)).write_bytes(b"<html>")
    ids = torch.arange(24).flip(0)
    found = []
    shapes: list[tuple[int, ...]] = [(3, 8, 8), ()]
    crop = EvalTransform.of_size(8).crop
    for workers in (0, 3):
        batches = list(
            read_batches(lambda i: (crop(images.load(i)), torch.tensor(i)), ids.split(20), shapes, workers)
        )
        assert [len(batch) for batch, _, _ in batches] == [20, 4]
        assert [set(failed) for _, _, failed in batches] == [{5}, set()]
        numbers = torch.cat([second for _, (_, second), _ in batches])
        good = torch.cat([batch for batch, _, _ in batches]) != 5
        assert torch.equal(numbers[good].long(), ids[good])
        found.append(torch.cat([first for _, (first, _), _ in batches])[good])
    assert torch.equal(*found)
