"""Every file of a run damaged, and every command that reads it: the same result, or the damage is told.

Which files a command opens is asked of the kernel (inotify), so a file that a command begins to read one day is
damaged for it, too. Commands run in processes that are spared the seconds of importing torch, see driver.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import shutil
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers import photos_of_patterns
from pretrainings import Runs

import adasim
from adasim.cli.main import main
from adasim.util.errors import UserError

if __name__ == "ranks_work":  # in driver.py: its processes then need not
    import matplotlib.pyplot  # noqa: F401
    import openTSNE  # noqa: F401

    import adasim.explore.page

pytestmark = pytest.mark.slow

PRETRAIN = """pretrain desk-vit --data photos --out run --epochs 2 --views.size 16 --batch-size 16 --data.workers 0
    --model.name vit_mini --model.patch-size 8 --dino.out-dim 24 --dino.hidden-dim 32 --dino.bottleneck-dim 16
    --neighbors.k 3 --save.every-epochs 1 --save.log-every 1 --no-curves --no-compare"""
COMMANDS = {
    "pretrain --resume run --epochs 3 --no-curves --no-compare": (
        "run/backbone.safetensors",
        "run/history/*",
    ),
    "eval knn run --k 3": (),
    "embed run --data photos --out made/features.npz": ("made/*",),
    "similar run photos/class0/00.png --in photos --out made/similar.png": ("made/*",),
    "export run --to timm --out made/timm": ("made/timm/*.safetensors", "made/timm/*.json", "made/timm/*.py"),
    "explore run --out made/page.html": ("made/*",),
    "gallery run --count 1 --out made/gallery": ("made/*",),
    "plot run --out made/curves.png": ("made/*",),
    "eval table run": (),
    "load_run": (),
}
"""What is typed, and the files that hold its result, beside what it says. (An export's README.md is a summary.)"""
LOGS = ("metrics.jsonl", "results.jsonl", "versions.json")
"""Plain text that informs people. Lines that cannot be read are told, but nobody knows how many there should be, or
notices another digit."""


class Hostile:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("the pickle was run",)


def flip_in_the_middle(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes] | None] = {
    "truncated": lambda content: content[: len(content) * 2 // 3],
    "emptied": lambda content: b"",
    "zeroed in part": lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
    "one bit flipped": flip_in_the_middle,
    "replaced by a pickle": lambda content: pickle.dumps(Hostile()),
    "removed": None,
}


def load_run() -> None:
    run = adasim.load_run("run")
    warnings.showwarning = lambda message, *_: print(message)
    print(run, run.metrics, run.results, len(run.images()))
    for tensor in run.encoder.state_dict().values():
        print(hashlib.sha256(tensor.numpy().tobytes()).hexdigest())
    memory = run.memory
    if memory is not None:
        print([value.tolist() for value in memory.distribution(torch.arange(48), tau=0.2)])


def perform(command: str) -> None:
    try:
        load_run() if command == "load_run" else main(command.split())
    except UserError as error:  # which is what Python gets
        print(error)
        sys.exit(2)


def outcome(command: str) -> dict[str, str]:
    """What it made: of each file, and of what it said, the hash."""
    made = {str(path): path.read_bytes() for pattern in COMMANDS[command] for path in Path().glob(pattern)}
    return {name: hashlib.sha256(content).hexdigest() for name, content in made.items()}


@contextmanager
def opened(folder: Path) -> Iterator[set[str]]:
    """The files below the folder that are opened meanwhile, by whomever."""
    libc, names, folders = ctypes.CDLL(None), set[str](), dict[int, Path]()
    handle = libc.inotify_init1(os.O_NONBLOCK)
    for one in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        folders[libc.inotify_add_watch(handle, bytes(one), 0x20)] = one  # IN_OPEN
    yield names
    events = b""
    try:
        while True:
            events += os.read(handle, 1 << 16)
    except BlockingIOError:
        os.close(handle)
    while events:
        watch, _, _, length = struct.unpack_from("iIII", events)
        name = events[16 : 16 + length].rstrip(b"\0").decode()
        if name and (folders[watch] / name).is_file():
            names.add(str((folders[watch] / name).relative_to(folder)))
        events = events[16 + length :]


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all that commands leave in it, to be copied."""
    folder = tmp_path_factory.mktemp("whole")
    photos_of_patterns(folder / "photos", "class{c}/{i:02d}.png")
    for command in (PRETRAIN, "eval knn run --k 3"):
        code, said = runs.call(__file__, "perform", command, folder)
        assert code == 0, said
    return folder


def renew(whole: Path) -> None:
    """Here, the run as it was. Large files are never written in place: a link to them is as good as a copy."""
    for name in ("run", "made"):
        shutil.rmtree(name, ignore_errors=True)
    large = 100_000
    shutil.copytree(
        whole / "run",
        "run",
        copy_function=lambda a, b: (os.link if os.stat(a).st_size > large else shutil.copy2)(a, b),
    )
    os.mkdir("made")


def is_right(name: str, damage: str, code: int, same: bool, told: bool) -> bool:
    if code == 2:  # a file that is not there may never have been: then it is enough to say what is wanted
        return told or damage == "removed" or (damage == "emptied" and name in LOGS)
    unnoticed = name in LOGS and damage in ("truncated", "emptied", "one bit flipped", "removed")
    return code == 0 and (same or told or unnoticed or name == "versions.json")


@pytest.mark.parametrize("command", COMMANDS)
def test_damage_in_any_file_that_a_command_reads_changes_nothing_or_is_told(
    command: str, whole: Path, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole / "photos", "photos")
    renew(whole)
    with opened(Path("run")) as read:
        code, normal = runs.call(__file__, "perform", command, tmp_path)
    assert code == 0, normal
    expected = outcome(command)
    renew(whole)
    _, again = runs.call(__file__, "perform", command, tmp_path)
    stable = {name for name, content in outcome(command).items() if expected.get(name) == content}
    assert stable or again == normal
    faults = []
    before = {str(path.relative_to(whole / "run")) for path in (whole / "run").rglob("*")}
    for i, name in enumerate(sorted(read & before)):
        # Each file takes turns in half of the damages; tensors, which are all verified by hashes, in two.
        turns = 3 if name.endswith(".safetensors") and "/" in name else 2
        for damage in list(DAMAGES)[i % turns :: turns]:
            change = DAMAGES[damage]
            renew(whole)
            path = Path("run") / name
            content = path.read_bytes()
            path.unlink()
            if change is not None:
                path.write_bytes(change(content))
            code, said = runs.call(__file__, "perform", command, tmp_path)
            made = outcome(command)
            same = all(made.get(one) == expected[one] for one in stable) and (
                again != normal or said == normal
            )
            told = path.name in said or (path.parent.name in said and path.parent.name != "run")
            if not is_right(name, damage, code, same, told):
                faults.append(f"{name} {damage}: exit code {code}, said {said[-600:]!r}")
            assert not Path("the pickle was run").exists(), name
    assert not faults, "\n".join(faults)
