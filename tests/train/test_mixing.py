"""A run keeps to its own folder, its own checkpoints and its own settings, whatever happens around it."""

import errno
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import contents, forked, until
from pretrainings import STEP, Run, Runs, at, digest, small

from adasim.api import pretrain
from adasim.config import Config
from adasim.runs import checkpoint as manifest
from adasim.runs import folder as access_module
from adasim.runs.folder import RunFolder
from adasim.util.errors import UserError

pytestmark = pytest.mark.slow


@pytest.fixture
def paused(runs: Runs) -> Callable[[Path], Run]:
    """The command `adasim pretrain` on small(), stopped after its fourth step, one step into the second epoch."""

    def start(out: Path) -> Run:
        run = runs.start(small(), out, hooks=[at(STEP, 4, "pause")], command=True)
        until(lambda: Path(f"/proc/{run.pid}/stat").read_text().split(") ")[1][0] == "T")
        return run

    return start


def go_on(run: Run) -> int:
    os.kill(run.pid, signal.SIGCONT)
    return run.wait()


def without_curves(files: dict[str, bytes]) -> dict[str, bytes]:
    """Each process has a file of its own in tensorboard/, and may end it."""
    return {path: content for path, content in files.items() if "/tensorboard/" not in path}


# The folder


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_folder_made_anew_under_a_stopped_run_belongs_to_the_new_run_alone(
    paused: Callable[[Path], Run], undisturbed: str, tmp_path: Path, how: str
) -> None:
    out = tmp_path / "run"
    first = paused(out)
    shutil.rmtree(out) if how == "deleted" else out.rename(tmp_path / "elsewhere")
    pretrain(small(seed=6, epochs=2), out)
    before = contents(out)
    assert go_on(first) == 2
    assert "run holds another run now: this run's folder was deleted or moved" in " ".join(first.said.split())
    assert "Traceback" not in first.said
    assert contents(out) == before
    pretrain(small(seed=6, epochs=2), out, resume=True)
    if how == "moved":  # and the first one goes on where it is now
        pretrain(small(), tmp_path / "elsewhere", resume=True)
        assert digest(tmp_path / "elsewhere") == undisturbed


def test_a_run_whose_folder_is_gone_stops_and_does_not_make_it_again(
    paused: Callable[[Path], Run], tmp_path: Path
) -> None:
    first = paused(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert go_on(first) == 2
    assert "run is gone: this run's folder was deleted or moved" in " ".join(first.said.split())
    assert not (tmp_path / "run").exists()


def test_a_lock_file_deleted_under_a_run_is_put_back(
    paused: Callable[[Path], Run], undisturbed: str, tmp_path: Path
) -> None:
    first = paused(tmp_path / "run")
    (tmp_path / "run" / "lock").unlink()
    assert go_on(first) == 0, first.said
    assert (tmp_path / "run" / "lock").read_text().startswith(f"process {first.pid} on ")
    assert digest(tmp_path / "run") == undisturbed


def test_of_two_processes_on_one_run_the_first_stops_when_its_lock_was_taken_from_it(
    paused: Callable[[Path], Run], undisturbed: str, tmp_path: Path
) -> None:
    first = paused(tmp_path / "run")
    (tmp_path / "run" / "lock").unlink()
    pretrain(small(), tmp_path / "run", resume=True)
    before = contents(tmp_path / "run")
    assert go_on(first) == 2
    assert "has opened the run" in first.said
    assert without_curves(contents(tmp_path / "run")) == without_curves(before)
    assert digest(tmp_path / "run") == undisturbed


def test_a_second_run_is_refused_also_through_a_link(
    paused: Callable[[Path], Run], undisturbed: str, tmp_path: Path
) -> None:
    first = paused(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for name, how in (("run", "resume"), ("link", "resume"), ("link", "overwrite")):
        with pytest.raises(UserError, match=f"in use by process {first.pid} "):
            pretrain(small(), tmp_path / name, resume=how == "resume", overwrite=how == "overwrite")
    with pytest.raises(UserError, match="already holds another run"):
        pretrain(small(), tmp_path / "run")
    assert go_on(first) == 0, first.said
    assert digest(tmp_path / "run") == undisturbed


# Checkpoints


def test_checkpoints_of_another_run_are_neither_used_nor_deleted(
    runs: Runs, undisturbed: str, tmp_path: Path
) -> None:
    """The other run has the same settings but for its seed, and is further on."""
    pretrain(small(seed=6), tmp_path / "other")
    runs.start(small(), tmp_path / "run", hooks=[at(STEP, 7, "kill")]).ended(-signal.SIGKILL)
    for part in ("checkpoints", "history"):
        shutil.copytree(tmp_path / "other" / part, tmp_path / "run" / part, dirs_exist_ok=True)
    theirs = contents(tmp_path / "other" / "checkpoints") | contents(tmp_path / "other" / "history")
    resumed = runs.start(small(), tmp_path / "run", resume=True).ended()
    said = " ".join(resumed.said.split())
    assert "Checkpoint step-000000012 is not usable: it belongs to another run. Going back" in said
    for path, content in theirs.items():
        assert Path(path.replace("/other/", "/run/")).read_bytes() == content
    assert (tmp_path / "run" / "checkpoints" / "step-000000012.1").is_dir()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000000012")
    assert digest(tmp_path / "run") == undisturbed


def test_a_lost_run_json_is_made_again_from_the_checkpoints(copied: Path) -> None:
    described = json.loads((copied / "run.json").read_bytes())
    (copied / "run.json").unlink()
    pretrain(small(epochs=4), copied, resume=True)
    del described["launch"]  # of which checkpoints know nothing
    assert json.loads((copied / "run.json").read_bytes()) == described


def test_a_checkpoint_of_an_older_format_is_refused_by_the_version_that_made_it(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for damage: none is gone back to, and nothing is changed."""
    newest = max((copied / "checkpoints").iterdir()) / "manifest.json"
    values = manifest.unseal(newest)
    del values["adasim"], values["run"]
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "__version__", "0.1.0")
        newest.write_bytes(manifest.seal({**values, "format": 2}))
    (copied / "run.json").unlink()
    before = contents(copied)
    with pytest.raises(
        UserError, match=r"written by adasim 0\.1\.0 \(checkpoint format 2\).* Finish the run with"
    ):
        pretrain(small(epochs=3), copied, resume=True)
    newest.write_bytes(manifest.seal({**values, "format": 4, "adasim": "7.1"}))
    with pytest.raises(UserError, match=r"written by adasim 7\.1 \(checkpoint format 4\)"):
        pretrain(small(epochs=3), copied, resume=True)
    newest.write_bytes(before[str(newest)])
    assert contents(copied) == before


# Settings


@pytest.mark.parametrize(("field", "value"), [("neighbors.tau", 0.5), ("epochs", 2)])
def test_an_edited_config_is_refused_with_the_name_of_the_field(copied: Path, field: str, value: Any) -> None:
    """The command line takes the settings of a resumed run from that file."""
    values = json.loads((copied / "config.json").read_text())
    *parents, name = field.split(".")
    for tree in [values[parent] for parent in parents] or [values]:
        tree[name] = value
    (copied / "config.json").write_text(json.dumps(values))
    before = contents(copied)
    with pytest.raises(
        UserError, match=rf"{field} was .* and is now {value}.* Has config.json been edited\?"
    ):
        pretrain(Config.from_dict(values), copied, resume=True)
    assert contents(copied) == before


# Disks without flock, and systems without it


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(access_module.fcntl, "flock", refuse)


@pytest.mark.usefixtures("no_flock")
def test_a_disk_without_flock_takes_runs_and_refuses_a_second_on_the_same_machine(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", Config(), {}) as run:
        assert any("has no file locks" in note for note in run.notes)
        run.check_ours()
        with pytest.raises(UserError, match=f"in use by process {os.getpid()} "):
            RunFolder.open(tmp_path / "run")
    RunFolder.open(tmp_path / "run").close()
    # A process that was killed: its number may be another's by now.
    lock = f"process {os.getpid()} on {socket.gethostname()}\n0123456789abcdef 1\n"
    (tmp_path / "run" / "lock").write_text(lock)
    RunFolder.open(tmp_path / "run").close()


@pytest.mark.usefixtures("no_flock")
def test_without_flock_the_earlier_of_two_machines_stops_before_its_next_save(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, Config(), {}) as run:
        (tmp_path / "lock").write_text("process 7 on another\n0123456789abcdef 99\n")
        with pytest.raises(UserError, match="process 7 on another has opened the run"):
            run.check_ours()
    (tmp_path / "lock").write_text("process 7 on another\n0123456789abcdef 99\n")
    with pytest.raises(UserError, match="may be in use by process 7 on another"):
        RunFolder.create(tmp_path, Config(), {}, overwrite=True)
    RunFolder.open(tmp_path).close()


def test_a_system_without_fcntl_looks_at_runs_and_says_that_it_cannot_train(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", Config(epochs=7), {}).close()

    def as_on_windows() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "adasim"]:
            del sys.modules[name]
        sys.modules["fcntl"] = None  # type: ignore[assignment]
        del os.register_at_fork
        from adasim.config import Config
        from adasim.runs.folder import RunFolder
        from adasim.util.errors import UserError

        print(RunFolder.open(tmp_path / "run", lock=False).config.epochs)
        for attempt in (
            lambda: RunFolder.create(tmp_path / "run2", Config(), {}),
            lambda: RunFolder.open(tmp_path / "run"),
        ):
            try:
                attempt()
            except UserError as error:
                print(error)

    code, said = forked(as_on_windows)
    sentence = "Training needs file locks as Linux and macOS have them. On Windows, run adasim inside WSL."
    assert (code, said.splitlines()) == (0, ["7", sentence, sentence])
    assert not (tmp_path / "run2").exists()
