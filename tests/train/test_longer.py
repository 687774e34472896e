"""Beginning again and going on for longer: resumes without a checkpoint, and with more epochs."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from helpers import contents, flip, in_one_line, refusal
from pretrainings import Runs, arguments, digest, kill_at, metrics, small

import adasim
from adasim.api import pretrain
from adasim.cli.main import main
from adasim.util.errors import UserError

pytestmark = pytest.mark.slow

# No checkpoint yet


def test_a_run_that_died_before_its_first_checkpoint_is_resumed_from_step_0(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert runs.start(small(epochs=2), out, hooks=kill_at(2)).wait() == -signal.SIGKILL
    with pytest.raises(
        UserError, match=r"already holds another run\. Continue it with --resume .*--overwrite"
    ):
        pretrain(small(epochs=2), out)
    pretrain(small(epochs=2), out, resume=True)
    assert f"{out} has no checkpoint yet: the run begins at step 0." in in_one_line(capsys.readouterr().out)
    assert [line["step"] for line in metrics(out) if "loss" in line] == [1, 2, 3, 4, 5, 6]
    pretrain(small(epochs=2), tmp_path / "whole")
    assert "no checkpoint yet" not in capsys.readouterr().out
    assert digest(out) == digest(tmp_path / "whole")


def test_a_run_whose_checkpoints_were_deleted_is_not_silently_begun_again(copied: Path) -> None:
    for part in ("checkpoints", "history"):
        shutil.rmtree(copied / part)
    before = contents(copied)
    with pytest.raises(UserError, match=r"The checkpoints of .* are gone, and it had saved some\."):
        pretrain(small(epochs=3), copied, resume=True)
    assert contents(copied) == before


@pytest.mark.parametrize("damage", ["missing", "zeroed", "one bit", "empty"])
def test_a_complete_run_whose_encoder_is_lost_or_damaged_writes_it_again_at_a_resume(
    copied: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    file = copied / "backbone.safetensors"
    before = contents(copied)
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "one bit":
        flip(file)
    else:
        file.write_bytes(whole[: len(whole) // 2].ljust(len(whole), b"\0") if damage == "zeroed" else b"")
    with pytest.raises(UserError) as error:
        adasim.load_backbone(copied)
    assert str(error.value).endswith(f"adasim pretrain --resume {copied}")
    capsys.readouterr()
    main(["pretrain", "--resume", str(copied), "--no-curves", "--no-compare"])
    said = in_one_line(capsys.readouterr().out)
    was = "missing" if damage == "missing" else "damaged, or of an earlier version"
    assert f"{file} was {was}: it is written again, from the checkpoint of step 9." in said
    assert f"{copied} is complete: nothing is left of its 3 epochs." in said
    assert contents(copied) == before
    pretrain(small(epochs=3), copied, resume=True)
    assert "written again" not in capsys.readouterr().out


def test_a_lost_encoder_that_cannot_be_written_again_is_one_sentence(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copied / "backbone.safetensors").unlink()

    def full(path: Path, *encoder: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("adasim.train.loop.save_backbone", full)
    with pytest.raises(UserError, match=r"Could not write the encoder to .*: No space left on device\."):
        pretrain(small(epochs=3), copied, resume=True)


def test_the_command_line_overwrites_only_when_told_to(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments(small(epochs=2), copied)
    first = json.loads((copied / "run.json").read_text())["id"]
    assert "already holds another run" in refusal(words, capsys)
    main([*words, "--overwrite"])
    assert "Overwrote the run in" in capsys.readouterr().out
    assert json.loads((copied / "run.json").read_text())["id"] != first
    assert "resumed or overwritten, not both" in refusal(
        ["pretrain", "--resume", str(copied), "--overwrite"], capsys
    )


# More epochs


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "in mid-run"])
def test_epochs_may_be_raised_at_a_resume_and_the_schedules_follow_from_there(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], finished: bool
) -> None:
    short, long, out = small(epochs=3), small(epochs=5), tmp_path / "run"
    if finished:
        pretrain(short, out)
    else:
        assert runs.start(short, out, hooks=kill_at(7)).wait() == -signal.SIGKILL
    step = 9 if finished else 6
    capsys.readouterr()
    pretrain(long, out, resume=True)
    said = in_one_line(capsys.readouterr().out)
    rates = [f"{config.learning_rate(step, 3):.3g}" for config in (long, short)]
    assert (
        f"from step {step} on, the schedule of 5 epochs holds for learning rate, weight decay, teacher's momentum "
        f"(the learning rate goes on at {rates[0]} instead of {rates[1]})." in said
    )
    assert "not that of a run which had 5 epochs from its start" in said
    lines = [line for line in metrics(out) if "loss" in line]
    expected = [(short if s < step else long).learning_rate(s, 3) for s in range(15)]
    assert [line["lr"] for line in lines] == pytest.approx(expected, rel=1e-12)
    assert json.loads((out / "config.json").read_text())["epochs"] == 5
    pretrain(long, out, resume=True)
    assert "now has" not in capsys.readouterr().out
    with pytest.raises(UserError, match=r"epochs was 5 and is now 3 \(it can only be raised\)"):
        pretrain(short, out, resume=True)
