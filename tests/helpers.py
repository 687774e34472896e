"""What tests of several folders ask for: what a folder holds, damage, full disks, refusals of the command line."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from adasim.cli.main import main
from adasim.config import Config
from adasim.data import ImageSet, open_images
from adasim.dist.processes import Distributed
from adasim.train.budget import Speed, time_steps

# Folders and files


def names(folder: Path) -> list[str]:
    """What stands in the folder itself."""
    return sorted(path.name for path in folder.iterdir())


def snapshot(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of everything in the folder and below: equal if nothing was touched."""
    return sorted((str(p), p.lstat().st_size, p.lstat().st_mtime_ns) for p in folder.rglob("*"))


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a run but the lock, which names its last holder."""
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


def flip(path: Path, bit: int = 3) -> None:
    """Flip one bit of the last byte, which belongs to the payload."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1 << bit
    path.write_bytes(content)


def photos_of_patterns(folder: Path, name: str) -> list[Path]:
    """48 generated images of 16 pixels as files, in the order of their ids.

    `name` may use {i} and the class {c} of two: "class{c}/{i:02d}.png".
    """
    pixels = open_images("synthetic:48", size=16).as_array()
    assert pixels is not None
    paths = [folder / name.format(i=i, c=i % 2) for i in range(48)]
    for path, image in zip(paths, pixels, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.repeat(image.numpy()[0][:, :, None], 3, 2)).save(path)
    return paths


def photograph(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A smooth coloured pattern, uint8 (height, width, 3)."""
    coarse = torch.rand(1, 3, 7, 7, generator=torch.Generator().manual_seed(seed))
    fine = F.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 1)[0]
    return (fine * 255).byte().permute(1, 2, 0).numpy()


def hub_cache(monkeypatch: pytest.MonkeyPatch, cache: Path, repository: str) -> Path:
    """Where a download of "owner/name" from the Hugging Face hub would lie; nothing is downloaded any more."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder / "snapshots" / ("0" * 40)


# Disks


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of that size ("64m") mounted on the folder, where the machine lets us have one."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write a file until the disk has no room for another byte."""
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


# Tensors


def on_grid(x: Tensor) -> Tensor:
    """Unit rows whose values are multiples of 2^-24, as the memory keeps them."""
    return (F.normalize(x, dim=1) * 2**24).round() / 2**24


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """The same ids and, to the bit, similarities."""
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0], expected[0])


# Processes, words and waiting


def of_known_speed(
    config: Config, images: ImageSet, ranks: Distributed, *, at_once: int | None = None
) -> Speed:
    """`time_steps` of a machine that trains 100 images a second: two real steps, whatever they take here."""
    time_steps(config, images, ranks, at_once=at_once, seconds=0)
    return Speed(100, 0.01)


def forked(work: Callable[[], None]) -> tuple[int, str]:
    """Exit code and output of a process of its own that does this: it is spared the seconds of importing torch."""
    with tempfile.TemporaryFile("w+") as said:
        if not (child := os.fork()):
            code = 1
            try:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                with open(1, "w", closefd=False) as out, redirect_stdout(out), redirect_stderr(out):
                    work()
                code = 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return code, said.read()


def command(line: str) -> None:
    """`adasim LINE`, where no word has a space."""
    main(line.split())


def refusal(arguments: list[str] | str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `adasim ARGUMENTS` says on standard error, one line, having exited with code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(arguments.split() if isinstance(arguments, str) else arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.count("\n") == 1, error
    return error


def json_lines(path: Path) -> list[dict[str, Any]]:
    """What stands in a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def in_one_line(text: str) -> str:
    """The text without the line breaks and spaces of a terminal."""
    return " ".join(text.split())


def free_port() -> int:
    """A port that nobody uses at the moment, and that nobody is given who asks for any port, as gloo does.

    Tests that run side by side choose among different ones.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 10_000 + 1_000 * worker + secrets.randbelow(1_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def until(true: Callable[[], bool], seconds: float = 240) -> None:
    """Wait for it to be so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
