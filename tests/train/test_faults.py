"""Whole runs under faults: signals, full disks, changed data, broken images, lost workers."""

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import contents, photos_of_patterns, small_disk
from pretrainings import STEP, Runs, at, digest, metrics, newest, small
from torch import Tensor

from adasim.api import pretrain
from adasim.data import open_images
from adasim.methods import Dino, Step
from adasim.neighbors import Oracle
from adasim.runs import checkpoint as checkpoint_module
from adasim.util.errors import UserError
from adasim.util.seeding import permutation

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed_per_image(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    pretrain(small(views__in_memory=False), out)
    return digest(out)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """48 photographs of 16 pixels in two classes, as files."""
    photos_of_patterns(tmp_path / "photos", "class{c}/{i:02d}.png")
    return tmp_path / "photos"


# Signals


@pytest.mark.parametrize(("kind", "code"), [("terminate", 143), ("interrupt", 130)])
def test_a_signal_saves_within_a_step_and_the_resumed_run_ends_the_same(
    runs: Runs, undisturbed_per_image: str, tmp_path: Path, kind: str, code: int
) -> None:
    """To the whole group, with the loader processes in it."""
    config = small(views__in_memory=False, data__workers=2)
    run = runs.start(config, tmp_path / "run", hooks=[at(STEP, 4, f"{kind} the group")]).ended(code)
    assert re.search(r"Stopped after step [45]\. Continue with: adasim pretrain --resume", run.said)
    pretrain(config, tmp_path / "run", resume=True)
    assert digest(tmp_path / "run") == undisturbed_per_image


# Disks and folders


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "64m") as place:
        yield place


def test_a_full_disk_does_not_stop_training_and_the_save_is_tried_again(
    runs: Runs, undisturbed: str, disk: Path
) -> None:
    filler = disk / "filler"
    run = runs.start(
        small(),
        disk / "run",
        hooks=[at(STEP, 4, f"fill {filler}"), at(STEP, 8, f"remove {filler}")],
    ).ended()
    assert "Step 6 is not saved yet: " in run.said
    assert "No space left on device" in run.said
    assert digest(disk / "run") == undisturbed
    lines = metrics(disk / "run")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
    names = sorted(path.name for path in (disk / "run" / "checkpoints").iterdir())
    assert names == ["step-000000009", "step-000000012"]


def test_a_disk_still_full_at_the_end_is_an_error_and_nothing_is_lost(
    undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = checkpoint_module._write, 0

    def full(path: Path, tensors: dict[str, Tensor]) -> None:
        nonlocal written
        written += 1
        if written > 12:  # the first two epochs fit, and some of the third
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, tensors)

    monkeypatch.setattr(checkpoint_module, "_write", full)
    with pytest.raises(UserError, match=r"Step 12 could not be saved .* newest checkpoint is of step 6"):
        pretrain(small(), tmp_path / "run")
    monkeypatch.undo()
    assert newest(tmp_path / "run").step == 6
    pretrain(small(), tmp_path / "run", resume=True)
    assert digest(tmp_path / "run") == undisturbed


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dino, "forward", lambda *_: pytest.fail("a step was taken"))
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "run", Path("/proc/adasim-run")):
        with pytest.raises(UserError, match=r"Cannot write to .* another --out"):
            pretrain(small(), out)


# A resume of something else


def test_a_resume_with_other_data_is_refused_with_the_difference(tmp_path: Path, photos: Path) -> None:
    config = small(epochs=2, data__source=str(photos))
    pretrain(config, tmp_path / "run")
    before = contents(tmp_path / "run")
    victim, aside, more = photos / "class0" / "04.png", tmp_path / "aside.png", tmp_path / "more.png"
    more.write_bytes(b"?")
    for here, there, difference in (
        (victim, aside, r"1 removed \(class0/04.png\)"),
        (victim, photos / "class0" / "new.png", r"1 renamed \(class0/04.png -> class0/new.png\)"),
        (more, photos / "class1" / "99.png", r"1 added \(class1/99.png\)"),
    ):
        here.rename(there)
        with pytest.raises(UserError, match=f"Cannot resume with other data: of 48 entries, {difference}"):
            pretrain(config, tmp_path / "run", resume=True)
        there.rename(here)
    assert contents(tmp_path / "run") == before
    pretrain(config, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("neighbors__window", 2),
        ("method", "simsiam"),
        ("settings__out_dim", 16),
        ("epochs", 2),
    ],
)
def test_a_resume_with_other_settings_is_refused(finished: Path, field: str, value: Any) -> None:
    before = contents(finished)
    name = field.replace("settings__", "dino__").replace("__", ".")
    with pytest.raises(UserError, match=f"Cannot resume with other settings: .*{name} was .* is now {value}"):
        pretrain(small(**{"epochs": 3, field: value}), finished, resume=True)
    assert contents(finished) == before


# Numbers


def test_a_feature_that_is_not_finite_never_enters_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of images 7 and 9 are broken in every epoch, and nothing else is."""
    config, forward, step = small(), Dino.forward, 0
    sound = (torch.arange(48) != 7) & (torch.arange(48) != 9)

    def broken(self: Dino, views: list[Tensor], epoch: int) -> Step:
        nonlocal step
        result = forward(self, views, epoch)
        b = step % 3
        ids = permutation(config.seed, "order", epoch, 48)[16 * b : 16 * (b + 1)]
        result.feature[ids == 7, 3], result.feature[ids == 9, 5] = torch.nan, torch.inf
        step += 1
        return result

    monkeypatch.setattr(Dino, "forward", broken)
    pretrain(config, tmp_path / "run")
    checkpoint = newest(tmp_path / "run")
    cache = checkpoint.tensors("memory-00000")["cache"]
    assert cache.isfinite().all()
    assert torch.equal(cache.norm(dim=1) > 0.5, sound)
    lists = checkpoint.history_tensors(checkpoint.history[-1])
    assert lists["similarities"].isfinite().all()
    assert (lists["ids"][~sound] == -1).all()
    assert (lists["ids"][sound] >= 0).all()


def test_the_same_seed_twice_gives_the_same_bits_and_another_seed_does_not(
    undisturbed: str, tmp_path: Path
) -> None:
    pretrain(small(), tmp_path / "again")
    pretrain(small(seed=6), tmp_path / "other")
    assert digest(tmp_path / "again") == undisturbed
    assert digest(tmp_path / "other") != undisturbed


def test_another_number_of_threads_is_reported_and_drifts_by_rounding_alone(
    runs: Runs, tmp_path: Path
) -> None:
    changes = {"epochs": 2, "model__name": "resnet_tiny", "method": "simsiam", "optim__name": "sgd"}
    one = runs.start(small(**changes), tmp_path / "one")
    two = runs.start(small(**changes), tmp_path / "two", hooks=[at(STEP, 4, "terminate")], threads=2)
    assert one.wait() == 0, one.said
    assert two.wait() == 143, two.said
    resumed = runs.start(small(**changes), tmp_path / "two", resume=True, threads=1).ended()
    assert re.search(r"threads 2 and goes on with 1", resumed.said)
    assert "goes on with" not in one.said
    losses = [[line["loss"] for line in metrics(tmp_path / n) if "loss" in line] for n in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3, abs=1e-5)


# Images and loader processes

BROKEN = {
    "empty": b"",
    "a web page": b"<!DOCTYPE html><html><body>404</body></html>",
    "no image": bytes(range(256)) * 4,
}


@pytest.mark.parametrize("in_memory", [False, True])
def test_unreadable_images_are_replaced_counted_and_told_of_as_queries_and_as_partners(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str], in_memory: bool
) -> None:
    files = sorted(photos.rglob("*.png"))
    broken = [2, 5, 30, 40]
    for i, content in zip(broken, BROKEN.values(), strict=False):
        files[i].write_bytes(content)
    files[40].write_bytes(files[40].read_bytes()[:80])  # truncated
    config = small(
        epochs=3,
        pairs="oracle",
        neighbors__oracle_p=0.0,
        data__source=str(photos),
        data__max_unreadable=0.1,
        views__in_memory=in_memory,
    )
    labels = open_images(str(photos)).labels
    assert labels is not None
    partners = Oracle(labels, 3, 0.0, config.seed).partners(2)
    drawn = {int(partners[i]) for i in range(48) if i not in broken}
    assert drawn & set(broken)  # some are drawn as partners of sound images

    pretrain(config, tmp_path / "none")
    assert [line["unreadable"] for line in metrics(tmp_path / "none") if "epoch_loss" in line] == [4, 4, 4]
    assert capsys.readouterr().out.count("4 of 48 images cannot be read and are replaced by others") == 1
    config.data.workers = 2
    pretrain(config, tmp_path / "two")
    assert digest(tmp_path / "two") == digest(tmp_path / "none")

    config.data.max_unreadable = 0.01
    with pytest.raises(UserError, match=r"images cannot be read, more than .*\.png.*--data\.max-unreadable"):
        pretrain(config, tmp_path / "strict")


def test_an_image_deleted_during_the_run_is_replaced_and_named(
    runs: Runs, tmp_path: Path, photos: Path
) -> None:
    victim = sorted(photos.rglob("*.png"))[7]
    config = small(data__source=str(photos), data__workers=2, views__in_memory=False)
    config.data.max_unreadable = 0.05
    tolerant = runs.start(config, tmp_path / "tolerant", hooks=[at(STEP, 3, f"remove {victim}")]).ended()
    assert "1 of 48 images cannot be read" in tolerant.said
    assert f"{victim}: the file is gone" in tolerant.said


def test_a_killed_loader_process_ends_the_run_with_a_message_and_it_can_be_resumed(
    runs: Runs, undisturbed_per_image: str, tmp_path: Path
) -> None:
    config = small(views__in_memory=False, data__workers=2)
    run = runs.start(config, tmp_path / "run", hooks=[at(STEP, 5, "kill a worker")], command=True).ended(1)
    assert re.search(r"\nadasim: A loader process ended .*SIGKILL.* resume the run.*\n$", run.said), run.said
    assert "Traceback" not in run.said
    pretrain(config, tmp_path / "run", resume=True)
    assert digest(tmp_path / "run") == undisturbed_per_image
