"""When a run saves, how much disk that takes, and how it gets over damaged lists of neighbours."""

import errno
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import flip, in_one_line
from pretrainings import Runs, digest, kill_at, newest, saved_steps, small

from adasim.api import pretrain
from adasim.data import Batch, open_images
from adasim.dist.processes import ALONE
from adasim.models import EvalTransform, build_backbone, save_backbone
from adasim.models.io import backbone_bytes, snapshots
from adasim.runs.checkpoint import CheckpointStore, seal, unseal
from adasim.tools.plan import lines
from adasim.train.budget import disk_needed
from adasim.train.loop import Training
from adasim.train.state import TrainState, build_state
from adasim.util.errors import UserError

pytestmark = pytest.mark.slow


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps at which runs save."""
    steps: list[int] = []
    save = Training.save

    def recorded(self: Training, snapshot: bool = False) -> None:
        steps.append(self.state.step)
        save(self, snapshot)

    monkeypatch.setattr(Training, "save", recorded)
    return steps


# When


def test_a_run_saves_by_epochs_by_the_clock_and_at_its_end(tmp_path: Path, saves: list[int]) -> None:
    """With a window of two epochs, of which a checkpoint may have written neither."""
    often = {"save__every_epochs": 0, "save__every_minutes": 0.0}
    for name, changes, expected in (
        ("every other epoch", {"save__every_epochs": 2}, [6, 12, 15]),
        ("by the clock", {"save__every_epochs": 0}, [15]),  # a few seconds are less than ten minutes
        ("after every step", often, list(range(1, 16))),
    ):
        saves.clear()
        pretrain(small(epochs=5, neighbors__window=2, **changes), tmp_path / name)
        assert saves == expected
        assert [name[:12] for name in newest(tmp_path / name).history] == ["epoch-000003", "epoch-000004"]
        assert digest(tmp_path / name) == digest(tmp_path / "every other epoch")


def test_snapshots_are_the_encoders_of_their_epochs_and_one_that_a_full_disk_refuses_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(epochs=4, save__every_epochs=0, save__encoder_every=2)
    encoders = {}

    def watch(state: TrainState, batch: Batch, loss: float) -> None:
        encoders[state.step] = backbone_bytes(state.method.eval_encoder, EvalTransform.for_run(config))

    def full_at_first(path: Path, *encoder: Any) -> None:
        if path.name == "epoch-0002.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        save_backbone(path, *encoder)

    monkeypatch.setattr("adasim.train.loop.save_backbone", full_at_first)
    run = pretrain(config, tmp_path / "run", on_step=watch)
    lost = "epoch-0002.safetensors could not be written and is lost: No space left on device."
    assert lost in in_one_line(capsys.readouterr().out)
    assert {epoch: file.read_bytes() for epoch, file in snapshots(run).items()} == {4: encoders[12]}
    assert (run / "backbone.safetensors").read_bytes() == encoders[12]
    pretrain(small(epochs=5, save__encoder_every=5), run, resume=True)  # another number from here on
    assert [*snapshots(run)] == [4, 5]


# How much


@pytest.mark.parametrize("method", ["dino", "simsiam"])
def test_the_disk_that_a_run_will_take_is_told_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    changes: dict[str, Any] = {"method": method, "optim__name": "sgd"} if method == "simsiam" else {}
    changes |= {"epochs": 4, "neighbors__window": 2, "neighbors__k": 40, "save__keep": 3}
    out = tmp_path / "run"
    pretrain(small(**changes), out)
    said = in_one_line(capsys.readouterr().out)
    found = re.search(
        r"Checkpoints: (\S+) MB each, 3 kept, plus neighbour lists of (\S+) kB: about (\S+) MB in", said
    )
    assert found, said
    assert found.start() < said.index("step 1/12")
    one, lists, total = (float(number) for number in found.groups())
    sizes = [sum(f.stat().st_size for f in path.iterdir()) for path in (out / "checkpoints").iterdir()]
    assert len(sizes) == 3
    features = 4 * (2048 - 4 * 48) * 96  # of images that so short a run has not met
    assert 1e6 * one == pytest.approx(sizes[0] + features, rel=0.03)
    assert 1e3 * lists == pytest.approx(sum(f.stat().st_size for f in (out / "history").iterdir()), rel=0.05)
    assert total == pytest.approx(3 * one + lists / 1e3, rel=0.01)
    pretrain(small(**changes), out, resume=True)
    assert "Checkpoints:" not in capsys.readouterr().out  # there is nothing left to do


@pytest.mark.parametrize(
    ("disk", "words"),
    [((10**9, 0, 20_000_000), "Only 20 MB are free there."), ((0, 0, 0), "MB in {out}.")],
    ids=["small", "does not tell its size"],  # as some network and FUSE mounts
)
def test_a_disk_that_is_too_small_is_told_of(
    disk: tuple[int, int, int], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adasim.train.budget.shutil.disk_usage", lambda path: disk)
    said = disk_needed(build_state(small(), 48), small(), tmp_path, ALONE)
    assert said.endswith(words.format(out=tmp_path))


def test_a_disk_without_room_for_one_checkpoint_is_refused_before_the_first_step_and_leaves_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=9_000)
    with monkeypatch.context() as patched:
        patched.setattr("adasim.train.budget.shutil.disk_usage", lambda path: full)
        with pytest.raises(
            UserError, match=rf"Only 9 kB are free in {tmp_path}, and one .* another --out\.$"
        ):
            pretrain(small(epochs=2), tmp_path / "runs" / "one")
    assert not (tmp_path / "runs").exists()
    assert "step 1/" not in capsys.readouterr().out
    pretrain(small(epochs=2), tmp_path / "run")
    monkeypatch.setattr("adasim.train.budget.shutil.disk_usage", lambda path: full)
    pretrain(small(epochs=2), tmp_path / "run", resume=True)  # nothing is left to save
    with pytest.raises(UserError, match=r"Make room there, then resume\.$"):
        pretrain(small(epochs=3), tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["epochs"] == 2
    pretrain(small(epochs=2), tmp_path / "run", overwrite=True)  # the old run's room is the new one's


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "simsiam", "optim__name": "sgd", "neighbors__window": 3, "save__keep": 3},
        {"pairs": "nearest", "neighbors__cache": "float16"},
        {"pairs": "standard", "save__encoder_every": 2},
    ],
)
def test_the_plan_and_the_run_tell_the_same_disk(changes: dict[str, Any], tmp_path: Path) -> None:
    config = small(**changes)
    planned = {
        what: value for what, value, _ in lines(config, open_images("synthetic:48"), "cpu", 1e9, 1, 16)
    }
    said = disk_needed(build_state(config, 48), config, tmp_path, ALONE)
    assert f": {planned['disk']} in {tmp_path}." in said


def test_equal_encoders_are_equal_files(tmp_path: Path) -> None:
    """safetensors itself writes its header in an order that changes from file to file."""
    backbone = build_backbone(small().model, 16, student=False)
    for i in range(12):
        save_backbone(tmp_path / f"{i}.safetensors", backbone)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


# Damaged lists


DAMAGE: dict[str, Callable[[Path], None]] = {
    "one bit flipped": flip,
    "truncated": lambda path: os.truncate(path, 40),
    "missing": lambda path: path.unlink(),
}


@pytest.fixture(scope="module")
def killed(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a window of three epochs that was killed in its fourth."""
    out = tmp_path_factory.mktemp("killed") / "run"
    runs.start(small(epochs=6, neighbors__window=3), out, hooks=kill_at(10)).ended(-signal.SIGKILL)
    return out


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_lists_that_every_checkpoint_needs_count_as_those_of_images_not_visited(
    killed: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Those of the first epoch, on which the checkpoints after epochs 2 and 3 look back."""
    out, config = Path(shutil.copytree(killed, tmp_path / "run")), small(epochs=6, neighbors__window=3)
    whole, maimed = build_state(config, 48), build_state(config, 48)
    whole.load(newest(out))
    victim = min((out / "history").iterdir())
    assert victim.name.startswith("epoch-000000")
    damage(victim)
    said: list[str] = []
    checkpoint = newest(out, said.append)
    assert (checkpoint.step, list(checkpoint.lost)) == (9, [victim.name])
    assert "Going on from step-000000009 without the lists of epoch 1:" in said[0]
    maimed.load(checkpoint)
    assert whole.memory is not None
    assert (whole.memory.history_ids[:, 0] >= 0).any()
    whole.memory.history_ids[:, 0], whole.memory.history_similarities[:, 0] = -1, 0
    assert maimed.digest() == whole.digest()


def test_a_run_that_lost_lists_goes_on_and_loses_no_more(runs: Runs, killed: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(killed, tmp_path / "run"))
    flip(min((out / "history").iterdir()))
    again = runs.start(
        small(epochs=6, neighbors__window=3, save__every_minutes=0.0), out, resume=True, hooks=kill_at(2)
    ).ended(-signal.SIGKILL)
    assert "without the lists of epoch 1" in in_one_line(again.said)
    resumed = runs.start(small(epochs=6, neighbors__window=3), out, resume=True).ended()
    assert "without the lists" not in in_one_line(resumed.said)


def test_lists_damaged_during_the_run_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, save = tmp_path / "run", Training.save

    def damaging(self: Training, snapshot: bool = False) -> None:
        if self.state.step == 9:  # the second epoch's lists, which the last checkpoint will need
            flip(max((out / "history").iterdir()))
        save(self, snapshot)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "save", damaging)
        pretrain(small(neighbors__window=3), out)
    pretrain(small(neighbors__window=3), tmp_path / "undisturbed")
    assert digest(out) == digest(tmp_path / "undisturbed")


def test_retention_keeps_an_incomplete_checkpoint_until_there_are_enough_whole_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    state = {"g": {"x": torch.zeros(1)}}
    lists = [store.write_history(0, {"x": torch.tensor([0])})]
    store.save(1, state, {}, lists)
    flip(tmp_path / "history" / lists[0])
    lists.append(store.write_history(1, {"x": torch.tensor([1])}))
    store.save(2, state, {}, lists[1:])
    assert saved_steps(tmp_path) == [1, 2]
    store.save(3, state, {}, lists[1:])
    assert saved_steps(tmp_path) == [2, 3]
    assert [p.name for p in (tmp_path / "history").iterdir()] == lists[1:]


def test_lists_that_are_named_outside_their_folder_are_no_mere_loss(tmp_path: Path) -> None:
    """Hostile names make the whole checkpoint unusable; nothing is read at that place."""
    store = CheckpointStore(tmp_path, keep=2)
    path = store.save(1, {"g": {"x": torch.zeros(1)}}, {}, [])
    values = unseal(path / "manifest.json")
    values["history"] = [{"name": "../lists.safetensors", "size": 1, "sha256": "0"}]
    (path / "manifest.json").write_bytes(seal(values))
    with pytest.raises(UserError, match="not a plain file name"):
        store.load_latest()
    assert json.loads((path / "manifest.json").read_bytes())["history"]
