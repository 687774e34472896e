"""`adasim plot` and the figure at a run's end, as a person meets them."""

from __future__ import annotations

import json
import os
import shutil
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import command, names, refusal, snapshot
from PIL import Image

import adasim
from adasim.cli.pretrain import finish
from adasim.tools.curves import PANELS
from adasim.tools.plot import MOST_LINES
from adasim.util.errors import UserError
from adasim.util.files import TEMPORARY

Make = Callable[..., Path]


def test_one_run_is_drawn_into_its_folder_and_again_to_the_same_bytes(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make("run", {"epoch_loss": [3, 2, 1], "knn_top1": [10, 20, 30]})
    command(f"plot {run}")
    assert capsys.readouterr().out == f"Curves: {run / 'curves.png'}, {run / 'curves.svg'}\n"
    with Image.open(run / "curves.png") as picture:
        assert picture.size == (1920, 1080)
    svg = ET.parse(run / "curves.svg")
    texts = {"".join(element.itertext()) for element in svg.iter() if element.tag.endswith("text")}
    title = "run: DINO, vit_mini, AdaSim pairs, synthetic:48, epoch 3 of 4"
    assert {"k-NN accuracy (%)", "epochs", title} <= texts
    before = [(run / f"curves.{kind}").read_bytes() for kind in ("png", "svg")]
    command(f"plot {run}")  # replaces its own figures without a word
    assert [(run / f"curves.{kind}").read_bytes() for kind in ("png", "svg")] == before


def test_several_runs_are_drawn_where_one_stands_or_where_it_is_said(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make(f"r{tau}", {"epoch_loss": [3, 2]}, neighbors__tau=tau) for tau in (0.1, 0.2)]
    early = make("early", {}, neighbors__tau=0.3)
    (early / "metrics.jsonl").write_text('{"step": 5, "epoch": 0, "loss": 1.0, "lr": 0.1}\n')
    before = [snapshot(run) for run in runs]
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    command(f"plot {runs[0]} {runs[1]} {early} {runs[0]}")  # one of them twice, one too young
    assert capsys.readouterr().out.splitlines() == [
        f"{early} has not finished an epoch yet, and is left out.",
        f"tau 0.1: {runs[0]}",
        f"tau 0.2: {runs[1]}",
        "Curves: curves.png, curves.svg",
    ]
    assert names(here) == ["curves.png", "curves.svg"]
    for _ in range(2):
        command(f"plot {runs[0]} --out one.pdf --curves loss")
        assert names(here) == ["curves.png", "curves.svg", "one.pdf"]
    assert [snapshot(run) for run in runs] == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("{tmp}", "{tmp} is not the folder of a run"),
        ("{tmp}/good {tmp}/nowhere", "there is no such folder"),
        ("{tmp}/silent", "{tmp}/silent has not finished an epoch yet"),
        ("{tmp}/young", "{tmp}/young has not finished an epoch yet"),
        ("{tmp}/young {tmp}/silent", "These runs have not finished an epoch yet"),
        ("{tmp}/old", "There is nothing to draw"),
        ("{tmp}/good --curves teacher-entropy", "There is nothing to draw for teacher-entropy"),
        ("{tmp}/good --curves los", "Did you mean loss?"),
        ("{tmp}/good --out {tmp}/figure.gif", "must end in .png, .svg or .pdf"),
        ("{tmp}/good --out {tmp}/nowhere/figure.png", "There is no folder {tmp}/nowhere"),
        (
            "{tmp}/good --out {tmp}/mine.png",
            "{tmp}/mine.png is no figure of adasim plot, and is not replaced",
        ),
        ("{tmp}/good --out {tmp}/link.svg", "{tmp}/link.svg is no figure of adasim plot"),
        ("", "Which runs?"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    words: str, expected: str, make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make("good", {"loss": [3, 2], "epoch_loss": [3, 2]})
    make("old", {"train_loss": [3, 2]})
    young = make("young", {})
    (young / "metrics.jsonl").write_text('{"step": 5, "epoch": 0, "loss": 1.0}\n')
    (make("silent", {}) / "metrics.jsonl").unlink()
    (tmp_path / "mine.png").write_bytes(b"a photo")
    (tmp_path / "link.svg").symlink_to(tmp_path / "absent.svg")
    before = snapshot(tmp_path)
    message = refusal(f"plot {words.format(tmp=tmp_path)}", capsys)
    assert expected.format(tmp=tmp_path) in message
    assert snapshot(tmp_path) == before


def test_as_many_settings_as_fit_leave_room_for_the_curves_and_more_are_refused(
    make: Make, tmp_path: Path
) -> None:
    whole = {metric: [1, 2] for panel in PANELS.values() for line in panel.lines for metric in line.metrics}
    runs = [make("x" * 99 + str(i), {"epoch_loss": [1, 2]} if i else whole) for i in range(MOST_LINES + 1)]
    with pytest.raises(UserError, match="25 different settings, and a figure has room for 24"):
        adasim.plot(runs, tmp_path / "all.svg")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns if there is no room
        adasim.plot(runs[:-1], tmp_path / "all.svg")


def test_any_number_that_was_logged_can_be_drawn_whatever_its_name(make: Make, tmp_path: Path) -> None:
    run = make("old", {"train_loss": [3, 2], "note": ["a", "b"]})
    (svg,) = adasim.plot(run, tmp_path / "x.svg", curves=["train_loss"])
    assert ">train loss</text>" in svg.read_text()
    with pytest.raises(UserError, match="nothing of that name"):
        adasim.plot(run, tmp_path / "x.svg", curves=["note"])


def test_a_disk_that_refuses_leaves_the_earlier_figure(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make("run", {"epoch_loss": [3, 2]})
    (png,) = adasim.plot(run, run / "curves.png")
    before = png.read_bytes()

    def refuse(handle: int) -> None:
        raise OSError(28, "No space left on device")

    (run / "metrics.jsonl").write_text('{"step": 10, "epoch": 0, "epoch_loss": 1.0}\n')
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(UserError, match=r"curves\.png: No space left on device"):
        adasim.plot(run, run / "curves.png")
    assert png.read_bytes() == before
    assert not [name for name in names(run) if name.endswith(TEMPORARY)]


def test_a_run_ends_with_its_curves_and_a_figure_that_fails_does_not_make_it_fail(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    monkeypatch.setenv("RANK", "1")
    finish(run, curves=True, compare=False)  # another process of the run draws and says nothing
    assert capsys.readouterr().out == ""
    monkeypatch.delenv("RANK")
    finish(run, curves=False, compare=False)
    assert not (run / "curves.png").exists()
    assert f"adasim plot {run}" in capsys.readouterr().out
    finish(run, curves=True, compare=False)
    assert str(run / "curves.png") in capsys.readouterr().out
    assert (run / "curves.png").stat().st_size > 10_000
    assert not (run / "curves.svg").exists()
    (run / "curves.png").write_bytes(b"something else")
    finish(run, curves=True, compare=False)
    said = capsys.readouterr().out
    assert "The curves are not drawn: " in said
    assert "is no figure of adasim plot, and is not replaced" in said
    assert str(run / "backbone.safetensors") in said
    (run / "curves.png").unlink()
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "epoch": 0, "loss": 2.0}) + "\n")
    finish(run, curves=True, compare=False)
    assert "The curves are not drawn: " in capsys.readouterr().out
