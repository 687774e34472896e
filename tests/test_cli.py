"""The command line as a person meets it: bad input is one sentence, exit code 2 and nothing half-written."""

import json
import shlex
import shutil
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers import fill, in_one_line, refusal, small_disk
from PIL import Image

from adasim.cli.main import expand_home, main
from adasim.cli.pretrain import configured
from adasim.recipes import RECIPES
from adasim.run import load_run

TINY = [
    *(
        "--epochs",
        "3",
        "--batch-size",
        "16",
        "--neighbors.window",
        "1",
        "--neighbors.k",
        "2",
        "--views.size",
        "16",
    ),
    *("--simsiam.proj-dim", "16", "--simsiam.pred-dim", "8", "--no-curves"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty unlabelled images."""
    place = tmp_path / "images"
    place.mkdir()
    for i in range(20):
        Image.fromarray(np.full((16, 16, 3), 12 * i, np.uint8)).save(place / f"{i}.png")
    return place


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data", "{tmp}/nowhere"], "No such folder: {tmp}/nowhere"),
        (["--data", "{tmp}/empty"], "{tmp}/empty"),
        (["--data", "{tmp}/images", "--pairs", "oracle"], "needs labels"),
        (["--data", "{tmp}/images", "--neighbors.k", "30"], "neighbors.k=30 is more than the 20 images"),
        (
            ["--data", "{tmp}/images", "--epochs", "5", "--neighbors.window", "5"],
            "needs at least 6 epochs; this run has 5",
        ),
        (["--data", "{tmp}/images", "--neighbors.tau", "-0.1"], "neighbors.tau=-0.1"),
        (["--data", "{tmp}/images", "--batch-size", "21"], "batch_size=21 is more than the 20 images"),
        (["--data", "{tmp}/images", "--optim.warmup-epochs", "9"], "optim.warmup_epochs=9"),
        (["--data", "{tmp}/images", "--device", "abacus"], "device=abacus"),
        (
            ["--data", "{tmp}/images", "--pairs", "confident", "--confident.share", "1.5"],
            "confident.share=1.5 must be between 0 and 1",
        ),
        (["--data", "{tmp}/images", "--eval.every", "1"], "eval.every=1 needs labels"),
        (["--data", "{tmp}/images", "--batch-size", "1"], "method=simsiam needs a batch_size of at least 2"),
        (["--data", "{tmp}/images", "--out", "{tmp}/images"], "not empty and not a run"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    arguments: list[str], expected: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    before = sorted(p.name for p in folder.iterdir())
    filled = [a.format(tmp=tmp_path) for a in arguments]
    out = [] if "--out" in filled else ["--out", str(tmp_path / "run")]
    message = refusal(["pretrain", "desk-resnet", *TINY, *out, *filled], capsys)
    assert expected.format(tmp=tmp_path) in message
    assert not (tmp_path / "run").exists()
    assert sorted(p.name for p in folder.iterdir()) == before


def test_an_unknown_recipe_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "desk-resnet" in refusal(["pretrain", "desk-resnat"], capsys)


def test_an_unknown_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert "pretrain" in refusal(["pretrian"], capsys)


def test_resume_needs_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not the folder of a run" in refusal(["pretrain", "--resume", str(tmp_path)], capsys)
    assert "--resume needs the folder" in refusal(["pretrain", "--resume"], capsys)


@pytest.mark.slow
def test_a_run_from_the_command_line_then_its_refusals(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    main(["pretrain", "desk-resnet", *TINY, "--data", str(folder), "--out", str(out)])
    assert (out / "backbone.safetensors").exists()
    config = json.loads((out / "config.json").read_text())
    assert config["data"]["source"] == str(folder)
    capsys.readouterr()

    again = ["pretrain", "desk-resnet", *TINY, "--data", str(folder), "--out", str(out)]
    assert "already holds another run" in refusal(again, capsys)
    other_shape = refusal(["pretrain", "--resume", str(out), "--neighbors.k", "3"], capsys)
    assert "neighbors.k was 2 and is now 3" in other_shape
    (folder / "19.png").unlink()
    removed = refusal(["pretrain", "--resume", str(out)], capsys)
    assert "1 removed (19.png)" in removed
    new_run = f"adasim pretrain desk-resnet --data {folder} --model.init {out} --out NEW-RUN"
    assert new_run in removed
    capsys.readouterr()
    main([*new_run.split()[1:-1], str(tmp_path / "new"), *TINY])  # the way on that was offered is one
    assert f"starts from the weights of {out}" in in_one_line(capsys.readouterr().out)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["pretrain"], ["pretrain", "--help"], ["--version"]])
def test_help_needs_no_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(arguments)
    assert "adasim" in capsys.readouterr().out


def test_pils_own_warnings_are_kept_from_the_screen(recwarn: pytest.WarningsRecorder) -> None:
    main([])
    warnings.warn_explicit("Corrupt EXIF data", UserWarning, "TiffImagePlugin.py", 982, "PIL.TiffImagePlugin")
    assert not recwarn


def test_help_lists_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    main(["pretrain", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in RECIPES)


def test_help_of_a_recipe_shows_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["pretrain", "dino-vit-s16", "--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--neighbors.tau" in shown
    assert "65536" in shown


def test_the_short_help_fits_a_screen_and_names_what_people_type(capsys: pytest.CaptureFixture[str]) -> None:
    main(["pretrain", "dino-vit-s16", "-h"])
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 24
    assert max(map(len, shown.splitlines())) <= 80
    for option in (
        "--data",
        "--out",
        "--resume",
        "--pairs",
        "--epochs",
        "--neighbors.tau",
        "--device",
        "--help",
    ):
        assert option in shown
    assert "0.2" in shown


@pytest.mark.parametrize(
    "command", ["embed", "similar", "export", "explore", "gallery", "plot", "plan", "eval knn", "eval views"]
)
def test_the_help_shows_what_an_option_takes_and_no_python(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert "--" in text
    assert "None" not in text
    assert "False" not in text


def test_the_long_help_names_the_special_options_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["pretrain", "desk-vit", "--help"])
    shown = capsys.readouterr().out
    for option in ("--data ", "--data.source", "--out", "--resume"):
        assert option in shown


@pytest.mark.parametrize("words", [["--data=~/photos"], ["--data", "~/photos"], ["--data.source=~/photos"]])
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
    main(["pretrain", "desk-resnet", *TINY, "--data", "images", "--out", str(tmp_path / "run")])
    capsys.readouterr()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for words in (["pretrain", "--resume", "../run"], ["eval", "knn", "../run"]):
        message = refusal(words, capsys)
        assert f"was started from {tmp_path} with --data images" in message
        assert "with --data NEW-PLACE." in message
    main(["pretrain", "--resume", "../run", "--data", "../images", "--no-curves"])
    assert "is complete" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "run")
    main(["pretrain", "--resume", ".", "--data", "../images", "--no-curves"])
    assert "is complete" in capsys.readouterr().out


def test_a_resume_without_its_images_says_where_they_were_and_goes_on_with_them_elsewhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    main(["pretrain", "desk-resnet", *TINY, "--data", str(folder), "--out", run])
    moved = folder.rename(tmp_path / "moved")
    for words in (["pretrain", "--resume", run], ["eval", "views", run]):
        message = refusal(words, capsys)
        assert f"The images of {run} were at {folder}, and there is nothing now." in message
        assert "say where they are now with --data NEW-PLACE." in message
        assert "Check --data" not in message
    main(["pretrain", "--resume", run, "--data", str(moved), "--epochs", "4", "--no-curves"])
    shown = capsys.readouterr().out
    assert "step 4/4" in shown
    assert "after pretraining" in shown  # the table is of the images where they are now
    assert load_run(run).config.data.source == str(moved)
    main(["eval", "views", run, "--queries", "8"])  # and so is whatever comes next


def test_a_path_where_a_recipe_belongs_is_answered_with_the_command_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent)
    for path in (str(folder), "images", "no/such place"):
        message = refusal(["pretrain", path, "--out", "run"], capsys)
        assert f"{path} is a path, not a recipe." in message
        assert f"adasim pretrain photos --data {shlex.quote(path)}\n" in message


@pytest.mark.parametrize("pairs", ["adasim", "nearest", "confident"])
def test_one_epoch_is_a_run_of_standard_pairs_and_says_so(
    pairs: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [*TINY[2:4], *TINY[6:]]  # neither epochs nor window
    words = [*few, "--epochs", "1", "--pairs", pairs, "--data", str(folder), "--device", "cpu"]
    main(["pretrain", "desk-resnet", *words, "--out", str(tmp_path / "run")])
    said = in_one_line(capsys.readouterr().out)
    assert said.startswith("One epoch has no earlier one to draw partners from: all its pairs are standard.")
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["epoch"], last["bootstrap_ratio"]) == (0, 0)


def test_a_few_epochs_have_a_few_before_confident_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    asked = configured("desk-resnet", ["--epochs", "8", "--pairs", "confident"], "test")
    assert asked.config.pair_settings.start == 2
    assert "--confident.start 2" in capsys.readouterr().out
    asked.config.check(1000, has_labels=False)


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
    assert expected in refusal(["pretrain", "demo", "--out", str(tmp_path / "run")], capsys)


@pytest.mark.slow
def test_a_resume_on_a_full_or_read_only_disk_is_refused_in_a_sentence_or_not_needed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", "32m") as disk:
        for out, epochs in (("whole", "2"), ("half", "3")):
            words = ["pretrain", "desk-resnet", *TINY, "--data", str(folder), "--out", str(disk / out)]
            main([*words, "--epochs", epochs, "--save.every-epochs", "1"])
        metrics = disk / "half" / "metrics.jsonl"
        for newest in sorted((disk / "half" / "checkpoints").iterdir())[-1:]:
            shutil.rmtree(newest)  # the run is in its last epoch again, and has lines of metrics to drop
        assert metrics.stat().st_size
        fill(disk / "filler")
        capsys.readouterr()
        main(["pretrain", "--resume", str(disk / "whole")])
        assert "is complete" in capsys.readouterr().out
        message = refusal(["pretrain", "--resume", str(disk / "half")], capsys)
        assert f"are free in {disk / 'half'}, and one checkpoint takes" in message
        assert "Make room there, then resume." in message
        (disk / "filler").unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for out in ("whole", "half"):
            message = refusal(["pretrain", "--resume", str(disk / out)], capsys)
            assert f"Cannot write to {disk / out}: Read-only file system" in message
        assert "Read-only" in refusal([*words[:-1], str(disk / "new")], capsys)


@pytest.mark.slow
def test_a_pair_policy_has_options_of_its_own(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = ["--pairs", "confident", "--confident.share", "0.5", "--confident.start=1", "--device", "cpu"]
    main(["pretrain", "desk-resnet", "--data", str(folder), *TINY, *options, "--out", str(run)])
    saved = json.loads((run / "config.json").read_text())
    late = ["--pairs", "confident", "--confident.start", "5"]
    message = refusal(["pretrain", "desk-resnet", "--data", str(folder), *TINY, *late], capsys)
    assert "confident.start=5 leaves none of the" in message
    assert saved["confident"] == {"share": 0.5, "share_end": None, "start": 1, "partners": 1, "decay": 0.8}
    main(["pretrain", "--resume", str(run), "--epochs", "4", "--no-curves"])
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["epoch"] == 3
    assert last["bootstrap_ratio"] > 0
