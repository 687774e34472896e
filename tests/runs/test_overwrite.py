"""--overwrite replaces a run that nobody uses, and never touches anything else."""

import json
import os
from pathlib import Path

import pytest
from pretrainings import small

from adasim.api import pretrain
from adasim.config import Config
from adasim.runs import folder as module
from adasim.runs.folder import RunFolder, began_here
from adasim.util.errors import UserError
from adasim.util.files import TEMPORARY, remove


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A run with everything that a run may hold, and its evaluations."""
    out = tmp_path / "run"
    RunFolder.create(out, Config(epochs=7), {}).close()
    in_checkpoints = ("1/manifest.json", "1/memory-00001.safetensors", f"1.2-2{TEMPORARY}/a.safetensors")
    for name in (
        *("metrics.jsonl", "backbone.safetensors", "results.jsonl", f"x.1-1{TEMPORARY}"),
        *(f"checkpoints/step-000000012.{name}" for name in in_checkpoints),
        *("history/epoch-000003-0123456789abcdef.safetensors", "tensorboard/events.out.tfevents.17.vm.1.0"),
        *(f"features/{'0' * 32}.safetensors", "encoders/epoch-0100.safetensors"),
    ):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("old")
    return out


def overwrite(out: Path) -> RunFolder:
    return RunFolder.create(out, Config(epochs=8), {}, overwrite=True)


def files(folder: Path) -> dict[str, bytes]:
    regular = {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}
    return regular | {str(p): os.readlink(p).encode() for p in folder.rglob("*") if p.is_symlink()}


def test_a_run_is_replaced_whole_and_the_loss_is_told(old: Path) -> None:
    before = json.loads((old / "run.json").read_text())["id"]
    with overwrite(old) as run:
        assert run.notes == [f"Overwrote the run in {old} (1 checkpoint(s), an encoder)."]
        assert run.id != before
    assert "old" not in {p.read_text() for p in old.rglob("*") if p.is_file()}
    assert RunFolder.open(old, lock=False).config.epochs == 8


@pytest.mark.parametrize(
    "name",
    [
        *("notes.txt", "checkpoints/notes.txt", "checkpoints/step-000000012.1/best.pt", "history/notes.txt"),
        *("tensorboard/notes.txt", "features/notes.txt", "photos/1.png", "checkpoints/step-000000012.1/a/b"),
    ],
)
def test_a_run_that_somebody_keeps_other_things_in_is_left_as_it_is(old: Path, name: str) -> None:
    (old / name).parent.mkdir(parents=True, exist_ok=True)
    (old / name).write_text("precious")
    before = files(old)
    with pytest.raises(UserError, match=rf"deletes runs alone, and .* also holds {name.split('/')[0]}"):
        overwrite(old)
    assert files(old) == before


@pytest.mark.parametrize(
    "name", ["checkpoints", "backbone.safetensors", "history/epoch-000009-00.safetensors"]
)
def test_links_in_a_run_are_not_followed_and_not_deleted(old: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "elsewhere"
    if (old / name).exists():
        (old / name).rename(target)
    else:
        target.write_text("precious")
    (old / name).symlink_to(target)
    before = files(tmp_path)
    with pytest.raises(UserError, match=f"also holds {name}"):
        overwrite(old)
    assert files(tmp_path) == before


@pytest.mark.parametrize("versions", [b"", b"[]", b'{"node": "22.1"}', None])
def test_what_is_not_a_run_is_not_overwritten(tmp_path: Path, versions: bytes | None) -> None:
    """Other programs, too, have a config.json, and perhaps a versions.json."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "backbone.safetensors").write_text("precious")
    if versions is not None:
        (tmp_path / "versions.json").write_bytes(versions)
    before = files(tmp_path)
    with pytest.raises(UserError, match=r"not the folder of a run of adasim|not empty and not a run"):
        overwrite(tmp_path)
    assert files(tmp_path) == before


def test_a_damaged_run_can_be_overwritten(old: Path) -> None:
    (old / "config.json").write_bytes(b"")
    (old / "run.json").unlink()
    overwrite(old).close()
    assert RunFolder.open(old, lock=False).config.epochs == 8


def test_a_run_in_use_is_not_overwritten(old: Path) -> None:
    with RunFolder.open(old):
        before = files(old)
        with pytest.raises(UserError, match="is in use by process"):
            overwrite(old)
        assert files(old) == before


def test_bad_input_does_not_cost_the_old_run(old: Path) -> None:
    before = files(old)
    for change in ({"data__source": "/nowhere"}, {"batch_size": 99}, {"neighbors__k": 60}):
        with pytest.raises(UserError):
            pretrain(small(**change), old, overwrite=True)
    with pytest.raises(UserError, match="resumed or overwritten, not both"):
        pretrain(small(), old, overwrite=True, resume=True)
    assert files(old) == before


def test_a_restarted_process_goes_on_instead_of_overwriting_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun starts the very same command again."""
    out = pretrain(small(epochs=2), tmp_path / "run", overwrite=True)
    before = files(out)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    pretrain(small(epochs=2), out, overwrite=True)
    assert {p: c for p, c in files(out).items() if "/tensorboard/" not in p} == {
        p: c for p, c in before.items() if "/tensorboard/" not in p
    }


@pytest.fixture
def requeued(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be job 5 of Slurm, started for the second time, which did not begin the old run."""
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")


@pytest.mark.usefixtures("requeued")
def test_a_restart_from_before_its_run_was_made_does_not_go_on_with_an_older_one(old: Path) -> None:
    with pytest.raises(UserError, match="already holds another run"):
        pretrain(small(epochs=2), old)
    pretrain(small(epochs=2), old, overwrite=True)
    assert RunFolder.open(old, lock=False).config.epochs == 2
    assert began_here(old, {"SLURM_JOB_ID"})


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"])
def test_only_the_launch_that_began_a_run_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "5")
    RunFolder.create(tmp_path / "run", Config(), {}).close()
    assert began_here(tmp_path / "run", {name})
    assert not began_here(tmp_path / "run", set())
    assert not began_here(tmp_path / "absent", {name})
    monkeypatch.setenv(name, "6")
    assert not began_here(tmp_path / "run", {name})
    for content in ("", "[]", '{"id": "put back after run.json was lost"}'):  # nobody can say
        (tmp_path / "run" / "run.json").write_text(content)
        assert began_here(tmp_path / "run", {name})


@pytest.mark.usefixtures("requeued")
@pytest.mark.parametrize("before_the_end", [11, 4, 3, 2, 1, 0])
def test_an_overwriting_cut_short_is_not_taken_for_ones_own_run_and_can_be_repeated(
    old: Path, monkeypatch: pytest.MonkeyPatch, before_the_end: int
) -> None:
    calls = 0
    total = len((*module._CONTENTS, *module._PRODUCTS, *module._DESCRIPTION))

    def interrupted(path: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == total - before_the_end:
            raise KeyboardInterrupt
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(module, "remove", interrupted)
        with pytest.raises(KeyboardInterrupt):
            overwrite(old)
    assert not began_here(old, {"SLURM_JOB_ID"})
    overwrite(old).close()
    assert RunFolder.open(old, lock=False).config.epochs == 8
