"""The command line as a person meets it: bad input is one sentence, exit code 2 and nothing half-written."""

import json
import shlex
import shutil
import subprocess
import warnings
from contextlib import suppress
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
        ("--neighbors.k 30", "neighbors.k=30 is more than the 20 images"),
        ("--epochs 5 --neighbors.window 5", "needs at least 6 epochs; this run has 5"),
        ("--neighbors.tau -0.1", "neighbors.tau=-0.1"),
        ("--batch-size 21", "batch_size=21 is more than the 20 images"),
        ("--optim.warmup-epochs 9", "optim.warmup_epochs=9"),
        ("--device abacus", "device=abacus"),
        ("--pairs nearest --nearest.space latin", "nearest.space"),
        ("--eval.every 1", "eval.every=1 needs labels"),
        ("--batch-size 1", "method=simsiam needs a batch_size of at least 2"),
        ("--out {tmp}/images", "not empty and not a run"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
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
    first = f"{PRETRAIN} --data {folder} --out {out}"
    command(first)
    assert (out / "backbone.safetensors").exists()
    assert json.loads((out / "config.json").read_text())["data"]["source"] == str(folder)
    assert "already holds another run" in refusal(first, capsys)
    other_shape = refusal(f"pretrain --resume {out} --neighbors.k 3", capsys)
    assert "neighbors.k was 2 and is now 3" in other_shape
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
        ("", ["adasim"]),
        ("--help", ["adasim"]),
        ("--version", ["adasim"]),
        ("pretrain", RECIPES),
        ("pretrain --help", RECIPES),
        ("pretrain dino-vit-s16 --help", ["--neighbors.tau", "65536", "--data ", "--out", "--resume"]),
        ("pretrain photos --help", ["--hours", "--from-scratch", "--optim.lr", "--model.init"]),
        ("plan --help", ["adasim plan RECIPE --data DIR"]),
        ("eval --help", ["knn", "linear", "fewshot", "segmentation", "views", "table", *MODEL]),
        *((name, MODEL) for name in ("eval knn --help", "embed --help", "similar --help", "export --help")),
        *((name, MODEL) for name in ("explore --help", "gallery --help")),
    ],
)
def test_the_help_names_what_there_is(
    line: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(SystemExit):
        command(line)
    shown = capsys.readouterr().out
    assert [word for word in words if word not in shown] == []
    if not line.startswith("pretrain"):  # whose defaults are told as they are
        assert "None" not in shown
        assert "False" not in shown


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "pretrain dino-vit-s16 -h",
            "--data --out --resume --pairs --epochs --neighbors.tau --device --help 0.2",
        ),
        ("pretrain photos -h", "--data --hours --from-scratch --model.init"),
        ("plot --help", "--curves second-nn --out curves.svg"),
    ],
)
def test_the_short_help_fits_a_screen_and_names_what_people_type(
    line: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with suppress(SystemExit):
        command(line)
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 24
    assert not line.endswith("-h") or max(map(len, shown.splitlines())) <= 80
    assert [word for word in words.split() if word not in shown] == []


def test_pils_own_warnings_are_kept_from_the_screen(recwarn: pytest.WarningsRecorder) -> None:
    main([])
    warnings.warn_explicit("Corrupt EXIF data", UserWarning, "TiffImagePlugin.py", 982, "PIL.TiffImagePlugin")
    assert not recwarn


@pytest.mark.parametrize("words", [["--data=~/photos"], ["--data", "~/photos"]])
def test_a_tilde_is_expanded_where_the_shell_does_not(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    message = refusal(["pretrain", "desk-resnet", *words, "--out=~/run"], capsys)
    assert f"No such folder: {tmp_path}/photos" in message
    assert [expand_home(f"{kind}:~/x") for kind in ("hf", "lmdb")] == [
        f"hf:{tmp_path}/x",
        f"lmdb:{tmp_path}/x",
    ]
    assert [expand_home(word) for word in ("a~/b", "--out=x~", "-")] == ["a~/b", "--out=x~", "-"]


def test_a_resume_from_another_folder_says_where_the_run_was_started(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command(f"{PRETRAIN} --data images --out {tmp_path / 'run'}")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for line in ("pretrain --resume ../run", "eval knn ../run"):
        message = refusal(line, capsys)
        assert f"was started from {tmp_path} with --data images" in message
        assert "with --data NEW-PLACE." in message
    for place, run in (("elsewhere", "../run"), ("run", ".")):
        monkeypatch.chdir(tmp_path / place)
        command(f"pretrain --resume {run} --data ../images --no-curves")
        assert "is complete" in capsys.readouterr().out


def test_a_resume_without_its_images_says_where_they_were_and_goes_on_with_them_elsewhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    command(f"{PRETRAIN} --data {folder} --out {run}")
    moved = folder.rename(tmp_path / "moved")
    for line in (f"pretrain --resume {run}", f"eval views {run}"):
        message = refusal(line, capsys)
        assert f"The images of {run} were at {folder}, and there is nothing now." in message
        assert "say where they are now with --data NEW-PLACE." in message
        assert "Check --data" not in message
    command(f"pretrain --resume {run} --data {moved} --epochs 4 --no-curves")
    shown = capsys.readouterr().out
    assert "step 4/4" in shown
    assert "after pretraining" in shown  # the table is of the images where they are now
    assert load_run(run).config.data.source == str(moved)
    command(f"eval views {run} --queries 8")  # and so is whatever comes next


def test_a_path_where_a_recipe_belongs_is_answered_with_the_command_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent)
    for path in (str(folder), "images", "no/such place"):
        message = refusal(["pretrain", path, "--out", "run"], capsys)
        assert f"{path} is a path, not a recipe." in message
        assert f"adasim pretrain photos --data {shlex.quote(path)}\n" in message


@pytest.mark.parametrize("pairs", ["adasim", "nearest"])
def test_one_epoch_is_a_run_of_standard_pairs_and_says_so(
    pairs: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command(
        f"pretrain desk-resnet {SMALL} --epochs 1 --pairs {pairs} --data {folder} --device cpu --out {run}"
    )
    said = in_one_line(capsys.readouterr().out)
    assert said.startswith("One epoch has no earlier one to draw partners from: all its pairs are standard.")
    last = load_run(run).metrics[-1]
    assert (last["epoch"], last["bootstrap_ratio"]) == (0, 0)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RANK": "abc", "WORLD_SIZE": "2"}, "RANK=abc, which is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE="),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 must be below WORLD_SIZE=0"),
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK=3 must be below WORLD_SIZE=2"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "no"},
            "MASTER_PORT=no, which is not a whole number",
        ),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "x"}, "SLURM_PROCID=x"),
    ],
)
def test_a_strange_environment_is_refused_in_a_sentence(
    env: dict[str, str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
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
        message = refusal(f"pretrain --resume {disk / 'half'}", capsys)
        assert f"are free in {disk / 'half'}, and one checkpoint takes" in message
        assert "Make room there, then resume." in message
        (disk / "filler").unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for out in ("whole", "half"):
            message = refusal(f"pretrain --resume {disk / out}", capsys)
            assert f"Cannot write to {disk / out}: Read-only file system" in message
        assert "Read-only" in refusal(f"{PRETRAIN} --data {folder} --out {disk / 'new'}", capsys)


@pytest.mark.slow
def test_a_pair_policy_has_options_of_its_own(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = "--pairs nearest --nearest.space latent --device cpu"
    command(f"{PRETRAIN} --data {folder} {options} --out {run}")
    saved = json.loads((run / "config.json").read_text())
    assert saved["nearest"] == {"space": "latent"}
    command(f"pretrain --resume {run} --epochs 4 --no-curves --no-compare")
    last = load_run(run).metrics[-1]
    assert last["epoch"] == 3
    assert last["bootstrap_ratio"] > 0
