"""Loader processes: how little they hold, what travels, what comes first, how they end, how many there are."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import Accelerator
from helpers import until
from PIL import Image
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.data import ArrayImages, FolderImages, ImageSet, PairLoader, pool, worker_count
from adasim.data.pool import LostWorkerError, WorkerPool
from adasim.util.errors import UserError

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
from adasim.data import FolderImages
from adasim.data.crops import CropWorker
from adasim.data.pool import WorkerPool

work = CropWorker(FolderImages(sys.argv[1]), ViewsConfig(size=224, reduced_jpeg=False), 0)
pool = WorkerPool(work, 1, 2 * 3 * 224**2)
out = [torch.empty(256, 3, 224, 224, dtype=torch.uint8) for _ in range(2)]
pool.begin((0, (1, 2)), [(i, (i + 1) % 256) for i in range(256)], out)[0].result()
lines = Path(f"/proc/{pool.pids[0]}/status").read_text().splitlines()
print(int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024)
pool.close()
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
    io = dict(line.split(": ") for line in Path(f"/proc/{loader.pids[0]}/io").read_text().splitlines())
    assert int(io["wchar"]) < 1000  # two or more tasks are done: 20 images
    loader.close()


def test_an_urgent_batch_is_made_ahead_of_those_that_wait() -> None:
    def work(asked: Any, rows: list[int], out: list[Tensor]) -> dict[int, str]:
        time.sleep(0.05)
        out[0][:] = torch.tensor(rows)
        return {}

    workers, rows = WorkerPool(work, 1, 1), list(range(160))
    first, second = (torch.zeros(160, dtype=torch.uint8) for _ in range(2))
    waiting = workers.begin(None, rows, [first])
    urgent = workers.begin(None, rows[:32], [second[:32]], urgent=True)
    assert [future.result() for future in urgent] == [{}, {}]
    assert sum(future.done() for future in waiting) < 6  # of 10
    assert second[:32].tolist() == rows[:32]
    assert [future.result() for future in waiting] == [{}] * 10
    assert first.tolist() == rows
    workers.close()


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
        loader.fetch(0, ids, ids)()
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


def lives(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_workers_end_with_a_pool_that_is_forgotten_and_with_a_parent_that_is_killed() -> None:
    loader = open_loader(Slow(64), batch_size=64, count=2)
    batches = loader.epoch(0, torch.arange(64))
    next(batches)
    pids = loader.pids
    del loader, batches
    assert not any(lives(pid) for pid in pids)

    def feed_for_ever(pipe: Any, begun: bool) -> None:
        loader = open_loader(Slow(64), batch_size=64, count=2)
        if begun:
            next(loader.epoch(0, torch.arange(64)))
        else:
            torch.set_num_threads = lambda nthreads: time.sleep(0.5)  # what workers call first
            loader.fetch(0, torch.arange(64), torch.arange(64))
        pipe.send(loader.pids)
        time.sleep(60)

    for begun in (True, False):
        here, there = multiprocessing.Pipe()
        parent = multiprocessing.get_context("fork").Process(target=feed_for_ever, args=(there, begun))
        parent.start()
        pids = here.recv()
        parent.kill()
        parent.join()
        until(lambda pids=pids: not any(lives(pid) for pid in pids))  # type: ignore[misc]


@pytest.mark.parametrize("starts", ["os.fork", "threading.Thread.start"])
def test_where_no_more_can_be_started_the_processes_that_were_end(
    monkeypatch: pytest.MonkeyPatch, starts: str
) -> None:
    """They ignore SIGTERM: one that is left would be waited for at exit, without end."""
    name, _, attribute = starts.rpartition(".")
    owner = {"os": os, "threading.Thread": threading.Thread}[name]
    start, calls = getattr(owner, attribute), iter(range(9))

    def second_fails(*given: Any) -> Any:
        if next(calls) == 1:
            raise BlockingIOError("no more")
        return start(*given)

    loader = open_loader(Slow(64), batch_size=64, count=3)
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, second_fails)
        with pytest.raises(BlockingIOError, match="no more"):
            next(loader.epoch(0, torch.arange(64)))
    assert not multiprocessing.active_children()
    assert len(next(loader.epoch(0, torch.arange(64))).ids) == 64  # there may be more by now
    loader.close()


@pytest.mark.parametrize("count", [0, 2])
def test_a_device_gets_the_same_views_one_batch_ahead(count: int) -> None:
    class Counted(ArrayImages):
        loads = 0

        def load(self, i: int) -> Tensor:
            self.loads += 1
            return super().load(i)

    images, views = Counted("arrays", smooth(40, 40, 40)), ViewsConfig(size=24, in_memory=False)
    partners = torch.arange(40).roll(3)
    whole = list(open_loader(images, views, count=0, batch_size=8).epoch(1, partners))
    with Accelerator():
        loader = open_loader(images, views, count=count, batch_size=8, device="cuda")
        images.loads = 0
        for step, (ours, theirs) in enumerate(zip(loader.epoch(1, partners), whole, strict=True)):
            if not count:  # the next batch is on its way before this one is used
                assert images.loads == 16 * min(step + 2, 5)
            assert ours.views[0].device.type == "cuda"
            assert all(torch.equal(a.cpu(), b) for a, b in zip(ours.views, theirs.views, strict=True))
            fetched = loader.fetch(1, ours.ids, ours.partners)()
            assert torch.equal(fetched.cpu(), theirs.views[1])
            images.loads -= 0 if count else 8
        loader.close()


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [(1, "", 1), (2, "", 1), (8, "", 7), (8, "4", 1), (64, "8", 7), (96, "", 16)],
)
def test_the_number_of_workers_is_a_ranks_share_of_the_cores_less_one(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: str, expected: int
) -> None:
    monkeypatch.setattr(pool, "usable_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert worker_count("auto") == expected
    assert worker_count(5) == 5


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(pool, "_QUOTA", tmp_path / "cpu.max")
    assert pool.usable_cores() == 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert pool.usable_cores() == 8
