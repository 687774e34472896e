"""Loader processes: how little they hold, what travels, what comes first, how they end; and JPEGs at reduced size."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerator import Accelerator
from helpers import until
from PIL import Image
from torch import Tensor

from adasim.config import DataConfig, ViewsConfig
from adasim.data import ArrayImages, FolderImages, ImageSet, PairLoader, pool, worker_count
from adasim.data.crop_worker import CropWorker, Task
from adasim.data.crops import CropDraws, reduction, view_uniforms
from adasim.data.pool import LostWorkerError
from adasim.util.errors import UserError
from adasim.util.rgb import _TURNED

from .pictures import smooth

CUT = ViewsConfig(size=16, in_memory=False, color=0.0, blur=0.0, solarize=0.0)


def open_loader(
    images: ImageSet, views: ViewsConfig = CUT, *, count: int = 1, **changes: object
) -> PairLoader:
    return PairLoader(images, views, **{"batch_size": 4, "seed": 3, "workers": count, **changes})  # type: ignore[arg-type]


class Slow(ArrayImages):
    """Refuses to be read by the process that made it, and takes its time in others."""

    def __init__(self, count: int) -> None:
        super().__init__("slow", smooth(count, 20, 20))
        self._home = os.getpid()

    def load(self, i: int) -> Tensor:
        assert os.getpid() != self._home
        time.sleep(0.005)
        return super().load(i)


MEMORY = """
import sys, torch
from pathlib import Path
from adasim.config import ViewsConfig
from adasim.data import FolderImages, PairLoader
from adasim.data.crop_worker import Task

images = FolderImages(sys.argv[1])
loader = PairLoader(images, ViewsConfig(size=224, reduced_jpeg=False), batch_size=256, seed=0, workers=1)
ids = torch.arange(256)
cut = loader._crops.cut(Task(0, ids, ids.roll(1), (1, 2)))
cut._made[0].result()
folder = Path(f"/proc/{loader.pids[0]}")
peak = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak.split()[1]) / 1024)
loader.close()
"""


def test_a_worker_stays_under_600_mb_with_photos_of_12_megapixels_at_batch_256(tmp_path: Path) -> None:
    """All of its memory, the libraries and what it shares included, after 32 of the 512 decodings of a batch."""
    pixels = smooth(1, 3024, 4032)[0].permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(tmp_path / "000.jpg", quality=85)
    for i in range(1, 256):
        (tmp_path / f"{i:03d}.jpg").symlink_to("000.jpg")
    ran = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert 100 < float(ran.stdout) < 600


def test_through_the_pipe_of_a_worker_go_some_numbers_alone() -> None:
    views = ViewsConfig(size=32, local_crops=2, local_size=16, in_memory=False)
    loader = open_loader(ArrayImages("arrays", smooth(40, 40, 40)), views, batch_size=20)
    next(iter(loader.epoch(0, torch.arange(40))))
    io = dict(
        line.split(": ") for line in Path(f"/proc/{loader.pids[0]}/io").read_text().splitlines()
    )  # two or more tasks are done: 20 images
    assert int(io["wchar"]) < 1000
    loader.close()
    everything = torch.arange(100_000)
    task = Task(0, everything[5:21], everything[7:23], (1, 2))
    assert len(pickle.dumps(task)) < 600  # not the storage of all ids
    assert torch.equal(pickle.loads(pickle.dumps(task)).partners, task.partners)


def test_a_partner_is_fetched_by_a_worker_ahead_of_batches_in_flight() -> None:
    loader = open_loader(Slow(320), batch_size=160)
    assert loader._crops is not None
    ids = torch.arange(160)
    ahead = [loader._crops.cut(Task(0, ids, ids, (1,))) for _ in range(2)]  # 1.6 s of work
    fetched = loader.fetch(0, ids[:32], ids[:32] + 100)
    assert fetched().shape == (32, 3, 16, 16)
    assert sum(future.done() for cut in ahead for future in cut._made) < 10  # of 20
    whole = next(iter(loader.epoch(0, ids.new_full((320,), 7))))
    late = loader.fetch(0, whole.ids, whole.partners)()
    assert torch.equal(late, whole.views[1])
    loader.close()


def test_a_lost_worker_is_told_of_to_whoever_fetches_partners_or_waits_for_a_batch() -> None:
    loader = open_loader(Slow(128), batch_size=64)
    ids = torch.arange(64)
    batches = iter(loader.epoch(0, torch.arange(128)))
    next(batches)
    fetched = loader.fetch(0, ids, ids)
    os.kill(loader.pids[0], signal.SIGKILL)
    with pytest.raises(LostWorkerError, match=r"SIGKILL.* resume the run"):
        fetched()
    with pytest.raises(LostWorkerError):
        loader.fetch(0, ids, ids)
    with pytest.raises(LostWorkerError):
        next(batches)
    loader.close()


def test_an_error_in_a_worker_reaches_the_loop_with_its_words(folder: Callable[..., Path]) -> None:
    class Broken(ArrayImages):
        def load(self, i: int) -> Tensor:
            raise ZeroDivisionError("in the worker")

    loader = open_loader(Broken("broken", smooth(8, 20, 20)))
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*ZeroDivisionError: in the worker"):
        next(iter(loader.epoch(0, torch.arange(8))))
    loader.close()
    images = FolderImages(folder(8))
    for i in range(8):
        os.unlink(images.where(i))
    loader = open_loader(images)
    with pytest.raises(UserError, match="100 images of photos in a row cannot be read"):
        next(iter(loader.epoch(0, torch.arange(8))))
    loader.close()


def test_workers_take_three_descriptors_each_whatever_is_in_flight() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    loader = open_loader(ArrayImages("arrays", smooth(200, 20, 20)), count=3, batch_size=40)
    for _ in loader.epoch(0, torch.arange(200)):
        assert descriptors() - before <= 3 * 3 + 2
    loader.close()
    del loader
    assert descriptors() <= before


def feed_for_ever(pipe: object) -> None:
    loader = open_loader(Slow(64), batch_size=64, count=2)
    batches = loader.epoch(0, torch.arange(64))
    next(batches)
    pipe.send(loader.pids)  # type: ignore[attr-defined]
    time.sleep(60)


def test_workers_end_with_a_parent_that_is_killed() -> None:
    here, there = multiprocessing.Pipe()
    parent = multiprocessing.get_context("fork").Process(target=feed_for_ever, args=(there,))
    parent.start()
    pids = here.recv()
    parent.kill()
    parent.join()
    until(lambda: not any(_lives(pid) for pid in pids))


def _lives(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("count", [0, 2])
def test_a_device_gets_the_same_views_one_batch_ahead(count: int) -> None:
    images, views = ArrayImages("arrays", smooth(40, 40, 40)), ViewsConfig(size=24, in_memory=False)
    partners = torch.arange(40).roll(3)
    whole = list(open_loader(images, views, count=0, batch_size=8).epoch(1, partners))
    with Accelerator():
        loader = open_loader(images, views, count=count, batch_size=8, device="cuda")
        assert loader._crops is not None
        sent, send = [], loader._crops.send

        def counted(memory: Tensor) -> tuple[Tensor, None]:
            sent.append(memory)
            return send(memory)[0], None

        loader._crops.send = counted  # type: ignore[method-assign]
        for step, (ours, theirs) in enumerate(zip(loader.epoch(1, partners), whole, strict=True)):
            assert len(sent) == min(step + 2, 5)  # the next batch is on its way before this one is used
            assert sent[-1].dtype == torch.uint8
            assert ours.views[0].device.type == "cuda"
            assert all(torch.equal(a.cpu(), b) for a, b in zip(ours.views, theirs.views, strict=True))
            fetched = loader.fetch(1, ours.ids, ours.partners)()
            assert torch.equal(fetched.cpu(), theirs.views[1])
            sent.pop()
        loader.close()


# JPEGs at reduced size


def test_a_reduced_image_is_no_smaller_than_any_view_of_it_needs() -> None:
    assert reduction([(448, 900, 224)]) == 1
    assert reduction([(895, 896, 224)]) == 1
    assert reduction([(896, 896, 224)]) == 4
    assert reduction([(1792, 2000, 224)]) == 8
    assert reduction([(9000, 9000, 224), (700, 384, 96)]) == 4  # the local crop decides
    assert reduction([(9000, 9000, 224), (100, 100, 224)]) == 1  # enlarged anyway: by no more than before


@pytest.mark.parametrize("size", [(800, 1200), (801, 1203)])
@pytest.mark.parametrize("orientation", [1, *_TURNED])
def test_a_reduced_crop_shows_the_same_box(tmp_path: Path, orientation: int, size: tuple[int, int]) -> None:
    """On an image without fine detail, where only a shift or a stretch of the box could make a difference: half a
    pixel of the reduced image would be two levels."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = smooth(1, *size)[0].permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(tmp_path / "0.jpg", quality=98, exif=exif, subsampling=0)
    images, ids = FolderImages(tmp_path), torch.zeros(4, dtype=torch.int64)
    made = []
    for reduced in (False, True):
        views = ViewsConfig(size=32, local_crops=1, local_size=32, reduced_jpeg=reduced)
        worker = CropWorker(images, views, 0)
        made.append(worker.crops((1, 3), 4))
        worker.work(Task(1, ids, ids, (1, 3)), made[-1])
    upright = orientation == 1 or size == (800, 1200)
    for exact, close in zip(*made, strict=True):
        difference = (exact.int() - close.int()).abs().float()
        assert difference.mean() < 0.6
        assert (difference.max() > 0) == upright  # a turned photo of odd sides is decoded whole
    _, scale = images.load_reduced(0, lambda height, width: 8)
    assert scale == (8 if upright else 1)


def test_only_jpegs_are_reduced_and_only_if_asked(tmp_path: Path) -> None:
    pixels = Image.fromarray(smooth(1, 800, 1000)[0].permute(1, 2, 0).numpy())
    pixels.save(tmp_path / "0.png")
    pixels.save(tmp_path / "1.jpg")
    images = FolderImages(tmp_path)
    shapes = [tuple(images.load_reduced(i, lambda height, width: 8)[0].shape) for i in (0, 1)]
    assert shapes == [(3, 800, 1000), (3, 100, 125)]
    ids = torch.tensor([1])
    views = ViewsConfig(size=32, reduced_jpeg=False)
    worker = CropWorker(images, views, 0)
    (crop,) = worker.crops((1,), 1)
    worker.work(Task(0, ids, ids, (1,)), [crop])
    top, left, height, width = CropDraws.of(worker.settings[1], view_uniforms(0, 1, 0, ids)).box(0, 800, 1000)
    part = images.load(1)[None, :, top : top + height, left : left + width]
    whole = torch.nn.functional.interpolate(part, size=(32, 32), mode="bicubic", antialias=True)
    assert torch.equal(crop, whole)


# How many


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [(1, "", 1), (2, "", 1), (8, "", 7), (8, "4", 1), (64, "8", 7), (96, "", 16)],
)
def test_the_number_of_workers_is_a_ranks_share_of_the_cores_less_one(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: str, expected: int
) -> None:
    monkeypatch.setattr(pool, "usable_cores", lambda: cores)
    assert worker_count("auto", {"LOCAL_WORLD_SIZE": ranks}) == expected
    assert worker_count(5, {"LOCAL_WORLD_SIZE": ranks}) == 5


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(pool, "_QUOTA", tmp_path / "cpu.max")
    assert pool.usable_cores() == 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert pool.usable_cores() == 8


def test_a_number_of_workers_is_a_count_or_auto() -> None:
    assert DataConfig().workers == "auto"
    with pytest.raises(UserError, match=r"data\.workers=-1 must be at least 0"):
        DataConfig(workers=-1)
    with pytest.raises(UserError, match=r"data\.workers='many' is unknown.*auto"):
        DataConfig(workers="many")  # type: ignore[arg-type]
