"""The command line as a person meets it: bad input is one sentence, exit code 2 and nothing half-written."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from adasim.cli import main
from adasim.recipes import RECIPES

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
    *("--simsiam.proj-dim", "16", "--simsiam.pred-dim", "8"),
]


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `adasim ARGUMENTS` says on standard error, having exited with code 2."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


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
        (["--data", "{tmp}/images", "--eval.every", "1"], "eval.every=1 needs labels"),
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
    assert "1 removed (19.png)" in refusal(["pretrain", "--resume", str(out)], capsys)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["pretrain"], ["pretrain", "--help"], ["--version"]])
def test_help_needs_no_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(arguments)
    assert "adasim" in capsys.readouterr().out


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
