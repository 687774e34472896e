"""The command line as a person meets it: bad input is one sentence, exit code 2 and nothing half-written."""

import json
import shutil
import subprocess
import warnings
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers import command, fill, in_one_line, refusal, small_disk, snapshot
from PIL import Image

from adasim.api import load_run
from adasim.cli.main import expand_home, main
from adasim.recipes import RECIPES

SMALL = (
    "--batch-size 16 --neighbors.k 2 --views.size 16 --simsiam.proj-dim 16 --simsiam.pred-dim 8 "
    "--no-curves --no-compare"
)
PRETRAIN = f"pretrain desk-resnet --epochs 3 --neighbors.window 1 {SMALL}"
MODEL = ("run folder", "timm", "NAME:FILE", "config.json", "hf-hub:", "backbone.safetensors", "pixels")
"""What a model may be, as every command that takes one tells."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty unlabelled images."""
    place = tmp_path / "images"
    place.mkdir()
    for i in range(20):
        Image.fromarray(np.full((16, 16, 3), 12 * i, np.uint8)).save(place / f"{i}.png")
    return place


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--data {tmp}/empty", "{tmp}/empty"),
        ("--pairs oracle", "needs labels"),
        ("--neighbors.k 30", "neighbors.k=30"),
        ("--epochs 5 --neighbors.window 5", "at least 6 epochs"),
        ("--batch-size 21", "batch_size=21"),
        ("--optim.warmup-epochs 9", "optim.warmup_epochs=9"),
        ("--device abacus", "device=abacus"),
        ("--eval.every 1", "eval.every=1 needs labels"),
        ("--batch-size 1", "batch_size of at least 2"),
        ("--out {tmp}/images", "not empty and not a run"),
    ],
)
def test_what_the_images_make_impossible_is_one_sentence_and_writes_nothing(
    options: str, expected: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    before = snapshot(tmp_path)
    options = options.format(tmp=tmp_path)
    message = refusal(f"{PRETRAIN} --data {folder} --out {tmp_path / 'run'} {options}", capsys)
    assert expected.format(tmp=tmp_path) in message
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_a_run_from_the_command_line_then_its_refusals(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    first = f"{PRETRAIN} --data {folder} --pairs nearest --nearest.space=latent --out {out}"
    command(first)
    assert (out / "backbone.safetensors").exists()
    saved = json.loads((out / "config.json").read_text())
    assert saved["data"]["source"] == str(folder)
    assert saved["nearest"] == {"space": "latent"}  # a pair policy has options of its own
    assert "already holds another run" in refusal(first, capsys)
    assert "neighbors.k was 2 and is now 3" in refusal(f"pretrain --resume {out} --neighbors.k 3", capsys)
    (folder / "19.png").unlink()
    removed = refusal(f"pretrain --resume {out}", capsys)
    assert "1 removed (19.png)" in removed
    way_on = f"pretrain desk-resnet --data {folder} --model.init {out} --out"
    assert f"adasim {way_on} NEW-RUN" in removed
    command(f"{way_on} {tmp_path / 'new'} {PRETRAIN.partition('resnet')[2]}")
    assert f"starts from the weights of {out}" in in_one_line(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        *((line, ["adasim"]) for line in ("", "--help", "--version")),
        *((line, RECIPES) for line in ("pretrain", "pretrain --help")),
        ("pretrain dino-vit-s16 --help", ["--neighbors.tau", "65536", "--data ", "--out", "--resume"]),
        (
            "pretrain dino-vit-s16 -h",
            ["--data", "--out", "--resume", "--pairs", "--epochs", "--neighbors.tau", "--help", "0.2"],
        ),
        ("pretrain photos --help", ["--hours", "--from-scratch", "--optim.lr", "--model.init"]),
        ("pretrain photos -h", ["--data", "--hours", "--from-scratch", "--model.init"]),
        ("plan --help", ["adasim plan RECIPE --data DIR"]),
        ("plot --help", ["--curves", "second-nn", "--out", "curves.svg"]),
        ("eval --help", ["knn", "linear", "fewshot", "segmentation", "views", "table", *MODEL]),
        *(
            (f"{name} --help", MODEL)
            for name in ("eval knn", "embed", "similar", "export", "explore", "gallery")
        ),
    ],
)
def test_the_help_names_what_there_is(
    line: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with suppress(SystemExit):
        command(line)
    lines = capsys.readouterr().out.splitlines()
    shown = in_one_line(" ".join(line.strip("│ ") for line in lines))
    assert [word for word in words if word.strip() not in shown] == []
    if line.endswith("-h"):  # the short help fits a screen
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
    if not line.startswith("pretrain"):  # whose defaults are told as they are
        assert "None" not in shown
        assert "False" not in shown


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_of_the_help_ends_where_the_next_word_has_room(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with suppress(SystemExit):
        command("pretrain desk-vit --help")
    lines = [line.removeprefix("│ ").rstrip("│ ") for line in capsys.readouterr().out.splitlines()]
    wrapped = [(a, b) for a, b in pairwise(lines) if a[:24].isspace() and b[:24].isspace()]
    assert len(wrapped) > 20
    assert [a for a, b in wrapped if len(a) + 1 + len(b.split()[0]) <= width - 4] == []


def test_pils_own_warnings_are_kept_from_the_screen(recwarn: pytest.WarningsRecorder) -> None:
    main([])
    warnings.warn_explicit("Corrupt EXIF data", UserWarning, "TiffImagePlugin.py", 982, "PIL.TiffImagePlugin")
    assert not recwarn


def test_a_tilde_is_expanded_where_the_shell_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"No such folder: {tmp_path}/x" in refusal("pretrain desk-resnet --data=~/x --out=~/run", capsys)
    assert [expand_home(f"{kind}:~/x") for kind in ("hf", "lmdb")] == [
        f"hf:{tmp_path}/x",
        f"lmdb:{tmp_path}/x",
    ]
    assert [expand_home(word) for word in ("a~/b", "--out=x~", "-")] == ["a~/b", "--out=x~", "-"]


def test_a_resume_from_elsewhere_or_without_its_images_says_where_they_were_and_goes_on_with_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    command(f"{PRETRAIN} --data images --out {run}")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for line in ("pretrain --resume ../run", "eval knn ../run"):
        assert f"was started from {tmp_path} with --data images" in refusal(line, capsys)
    command(f"pretrain --resume ../run --data {folder} --no-curves")
    assert "is complete" in capsys.readouterr().out
    moved = folder.rename(tmp_path / "moved")
    for line in (f"pretrain --resume {run}", f"eval views {run}"):
        message = refusal(line, capsys)
        assert f"were at {folder}" in message
        assert "with --data NEW-PLACE." in message
    command(f"pretrain --resume {run} --data {moved} --epochs 4 --no-curves")
    shown = capsys.readouterr().out
    assert "step 4/4" in shown
    assert "after pretraining" in shown  # the table is of the images where they are now
    assert load_run(run).config.data.source == str(moved)
    command(f"eval views {run} --queries 8")  # and so is whatever comes next


@pytest.mark.parametrize("pairs", ["adasim", "nearest"])
def test_one_epoch_is_a_run_of_standard_pairs_and_says_so(
    pairs: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command(f"pretrain desk-resnet {SMALL} --epochs 1 --pairs {pairs} --data {folder} --out {run}")
    assert in_one_line(capsys.readouterr().out).startswith("One epoch has no earlier one")
    last = load_run(run).metrics[-1]
    assert (last["epoch"], last["bootstrap_ratio"]) == (0, 0)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ("RANK=abc WORLD_SIZE=2", "RANK=abc, which is not a whole number"),
        ("RANK=0 WORLD_SIZE=", "WORLD_SIZE="),
        ("RANK=0 WORLD_SIZE=2", "Start with torchrun; or check MASTER_ADDR"),
        ("RANK=3 WORLD_SIZE=2", "RANK=3 must be below WORLD_SIZE=2"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=no", "set MASTER_PORT to a port"),
        ("SLURM_STEP_ID=0 SLURM_PROCID=x", "SLURM_PROCID=x"),
    ],
)
def test_a_strange_environment_is_refused_in_a_sentence(
    env: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (word.split("=") for word in env.split()):
        monkeypatch.setenv(name, value)
    assert expected in refusal(f"pretrain demo --out {tmp_path / 'run'}", capsys)


@pytest.mark.slow
def test_a_resume_on_a_full_or_read_only_disk_is_refused_in_a_sentence_or_not_needed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", "32m") as disk:
        for out, epochs in (("whole", 2), ("half", 3)):
            command(f"{PRETRAIN} --data {folder} --out {disk / out} --epochs {epochs} --save.every-epochs 1")
        # The run is in its last epoch again, and has lines of metrics to drop.
        shutil.rmtree(max((disk / "half" / "checkpoints").iterdir()))
        fill(disk / "filler")
        capsys.readouterr()
        command(f"pretrain --resume {disk / 'whole'}")
        assert "is complete" in capsys.readouterr().out
        assert "Make room there, then resume." in refusal(f"pretrain --resume {disk / 'half'}", capsys)
        (disk / "filler").unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for line in (
            f"pretrain --resume {disk / 'whole'}",
            f"pretrain --resume {disk / 'half'}",
            f"{PRETRAIN} --data {folder} --out {disk / 'new'}",
        ):
            assert "Read-only file system" in refusal(line, capsys)
