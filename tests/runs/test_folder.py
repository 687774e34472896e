"""A run folder describes itself, belongs to one process at a time, and refuses what is not its own."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from helpers import names, snapshot

from adasim.config import Config, NeighborsConfig, SaveConfig
from adasim.runs import folder as module
from adasim.runs.folder import RunFolder, changed_settings, check_same, check_source, decisive
from adasim.util.errors import UserError
from adasim.util.files import TEMPORARY

LISTING = [f"cats/{i:03d}.png {1000 + i}" for i in range(50)]
FACTS: dict[str, Any] = {"fingerprint": "f00d", "listing": LISTING, "device": "cpu"}


def create(out: Path) -> RunFolder:
    return RunFolder.create(out, Config(epochs=7, neighbors=NeighborsConfig(window=3)), FACTS)


# Creation


def test_a_run_describes_itself_and_opens_again(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    with create(out) as run:
        assert run.path == out
    assert names(out) == [
        "checkpoints", "config.json", "data.json", "history", "lock", "run.json", "tensorboard", "versions.json",
    ]  # fmt: skip
    versions = json.loads((out / "versions.json").read_text())
    assert versions["torch"] == torch.__version__
    assert versions["numpy"] == np.__version__
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions["threads"] == torch.get_num_threads()
    assert versions["device"] == "cpu"
    assert {"torchvision", "timm", "adasim"} <= versions.keys()
    with RunFolder.open(out) as again:
        assert again.config == Config(epochs=7, neighbors=NeighborsConfig(window=3))
        assert again.facts == {"fingerprint": "f00d", "listing": LISTING}
        assert again.version_changes() == []
        check_same(again.config, Config(epochs=7, neighbors=NeighborsConfig(window=3)))


def test_other_processes_join_the_run_that_the_first_holds_and_no_other(tmp_path: Path) -> None:
    """A folder of that name on a disk of their own may be absent, or hold an older run."""
    with create(tmp_path / "old"):
        pass
    (tmp_path / "old" / "lock").write_text("process 1 on another machine\n")
    with create(tmp_path / "run") as run:
        assert RunFolder.join(tmp_path / "run", run.owner()).config == run.config
        for name in ("old", "absent"):
            with pytest.raises(UserError, match=rf"{name} is not the same folder on .* --out on a disk"):
                RunFolder.join(tmp_path / name, run.owner())


def test_an_empty_folder_may_become_a_run_and_another_run_is_left_as_it_is(tmp_path: Path) -> None:
    create(tmp_path).close()
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match=r"another run\. Continue it with --resume .* another --out"):
        create(tmp_path)
    assert snapshot(tmp_path) == before


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_text("precious")
    (tmp_path / "config.json").write_text("{}")  # many programs have one
    with pytest.raises(UserError, match=r"is not empty and not a run \(it holds config.json, holiday.jpg\)"):
        create(tmp_path)
    assert names(tmp_path) == ["config.json", "holiday.jpg"]
    with pytest.raises(UserError, match="is a file"):
        create(tmp_path / "holiday.jpg")


def test_a_creation_cut_short_can_be_repeated(tmp_path: Path) -> None:
    """A kill before config.json, which is written last, leaves no run and nothing in the way of one."""
    create(tmp_path).close()
    (tmp_path / "config.json").rename(tmp_path / f"config.json.1-1{TEMPORARY}")
    with pytest.raises(UserError, match="is not the folder of a run"):
        RunFolder.open(tmp_path)
    create(tmp_path).close()
    RunFolder.open(tmp_path).close()
    assert not any(name.endswith(TEMPORARY) for name in names(tmp_path))


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("file", ["versions.json", "data.json", "run.json", "config.json"])
def test_a_creation_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool, file: str
) -> None:
    out = tmp_path / "run"
    if existed:
        out.mkdir()
    real = module.atomic_write

    def full(path: Path, data: bytes) -> None:
        if path.name == file:
            raise OSError(28, "No space left on device")
        real(path, data)

    monkeypatch.setattr(module, "atomic_write", full)
    with pytest.raises(UserError, match=r"Cannot write to .*run: No space left on device"):
        create(out)
    assert names(out) == [] if existed else not out.exists()
    monkeypatch.undo()
    create(out).close()


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that even root cannot write to."""
    folder = tmp_path / "disk"
    folder.mkdir()
    create(folder / "run").close()
    for options in (["--bind", str(folder)], ["-o", "remount,bind,ro"]):
        if subprocess.run(["mount", *options, str(folder)], capture_output=True).returncode:
            pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_an_unwritable_folder_is_refused_at_once(read_only: Path) -> None:
    with pytest.raises(UserError, match=r"Cannot write to .*: Read-only file system"):
        create(read_only / "new")
    with pytest.raises(UserError, match=r"Cannot write to .*: Read-only file system"):
        RunFolder.open(read_only / "run")
    assert RunFolder.open(read_only / "run", lock=False).config.epochs == 7  # looking is allowed


# Opening


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"[" * 100_000, pickle.dumps({"epochs": 3})])
@pytest.mark.parametrize("file", ["config.json", "data.json", "run.json"])
def test_a_damaged_description_is_refused_in_a_sentence(tmp_path: Path, file: str, content: bytes) -> None:
    create(tmp_path).close()
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=file):
        RunFolder.open(tmp_path)


def test_a_changed_character_in_data_json_blames_the_file_and_not_the_images(tmp_path: Path) -> None:
    facts = {"images": 2, "fingerprint": "abc", "labels": "", "sample": ["61e1", "fd65"]}
    RunFolder.create(tmp_path, Config(), facts).close()
    file = tmp_path / "data.json"
    assert RunFolder.open(tmp_path, lock=False).facts == facts
    file.write_text(file.read_text().replace("61e1", "61e0"))
    with pytest.raises(UserError, match=r"data\.json is damaged"):
        RunFolder.open(tmp_path)
    file.write_text(json.dumps(facts))  # as written before there was a checksum
    assert RunFolder.open(tmp_path, lock=False).facts == facts


@pytest.mark.parametrize("name", ["config.json", "run.json", "data.json", "versions.json", "metrics.jsonl"])
@pytest.mark.timeout(120)
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    RunFolder.create(tmp_path / "run", Config(), {"device": "cpu"}).close()
    (tmp_path / "run" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "run" / name)
    with pytest.raises(UserError, match=r"is not a regular file|is not the folder of a run"):
        RunFolder.open(tmp_path / "run")


def test_what_is_not_a_run_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "bomb.pt").write_bytes(pickle.dumps(print))
    for path in (tmp_path, tmp_path / "absent", tmp_path / "bomb.pt"):
        with pytest.raises(UserError, match="is not the folder of a run"):
            RunFolder.open(path)
    assert names(tmp_path) == ["bomb.pt"]


def test_opening_to_train_cleans_up_and_opening_to_look_does_not(tmp_path: Path) -> None:
    create(tmp_path).close()
    left = [tmp_path / sub / f"x.1-1{TEMPORARY}" for sub in ("", "checkpoints", "history")]
    for path in left:
        path.write_text("half")
    RunFolder.open(tmp_path, lock=False)
    assert all(path.exists() for path in left)
    RunFolder.open(tmp_path).close()
    assert not any(path.exists() for path in left)


def test_other_versions_are_named(tmp_path: Path) -> None:
    create(tmp_path).close()
    versions = json.loads((tmp_path / "versions.json").read_text())
    (tmp_path / "versions.json").write_text(json.dumps({**versions, "torch": "1.0"}))
    with RunFolder.open(tmp_path) as run:
        assert run.version_changes() == [
            f"This run began with torch 1.0 and goes on with {torch.__version__}."
        ]


@pytest.mark.parametrize("content", [None, b"", b"[1]", b"{", b"[" * 100_000, b"\xff"])
def test_versions_that_cannot_be_read_only_inform_and_do_not_stop_a_resume(
    tmp_path: Path, content: bytes | None
) -> None:
    create(tmp_path).close()
    (tmp_path / "versions.json").unlink()
    if content is not None:
        (tmp_path / "versions.json").write_bytes(content)
    with RunFolder.open(tmp_path) as run:
        [sentence] = run.version_changes()
        assert sentence.startswith(f"{tmp_path / 'versions.json'} is lost or damaged: ")
    with pytest.raises(UserError, match=r"was started from another folder with --data photos, and here"):
        check_source(tmp_path, "photos")


# The lock


def hold(folder: Path, told: int) -> NoReturn:
    """Be a process that has the run and a worker, whose id it tells."""
    try:
        run = RunFolder.create(folder, Config(), {})
        worker = os.fork()  # as a loader worker is
        if worker:
            os.write(told, str(worker).encode())
        time.sleep(60)
        run.close()
    finally:
        os._exit(1)


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    hear, tell = os.pipe()
    if not (holder := os.fork()):
        hold(tmp_path / "run", tell)
    os.close(tell)
    worker = int(os.read(hear, 20))
    try:
        with pytest.raises(UserError, match=f"is in use by process {holder} on .* another --out"):
            RunFolder.open(tmp_path / "run")
        before = snapshot(tmp_path)
        with pytest.raises(UserError, match="already holds another run"):
            create(tmp_path / "run")
        assert snapshot(tmp_path) == before
        assert RunFolder.open(tmp_path / "run", lock=False).config == Config()
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        RunFolder.open(tmp_path / "run").close()  # although its worker still lives
        os.kill(worker, 0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(holder, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        os.close(hear)


# Resuming with something else


def test_the_same_run_is_accepted_also_with_other_ways_to_run_it() -> None:
    now = Config(device="cuda", deterministic=True, save=SaveConfig(keep=5), micro_batch=8, epochs=200)
    now.data.workers, now.data.source, now.eval.every = 7, "/moved/elsewhere", 3
    check_same(Config(), now)
    old = {"pairs": "nearest"}  # a checkpoint from before there was this setting
    assert not changed_settings(old, old | {"nearest.space": "image"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "simsiam"), ("pairs", "nearest"), ("epochs", 99), ("batch_size", 8), ("seed", 1),
        ("precision", "bf16"), ("neighbors.window", 11), ("neighbors.k", 4), ("neighbors.tau", 0.1),
        ("neighbors.timing", "current"), ("model.name", "vit_tiny"), ("views.scale", [0.2, 1.0]),
        ("optim.lr", 1e-3), ("dino.out_dim", 128),
    ],
)  # fmt: skip
def test_a_setting_that_shapes_the_result_may_not_change(field: str, value: Any) -> None:
    before, now = decisive(Config()), decisive(Config()) | {field: value}
    only = " (it can only be raised)" if field == "epochs" else ""
    assert changed_settings(before, now) == f"{field} was {before[field]} and is now {value}{only}"
