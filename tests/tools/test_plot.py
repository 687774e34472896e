"""`adasim plot` and the figure at a run's end, looked at through matplotlib's own objects."""

from __future__ import annotations

import json
import math
import shutil
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import command, json_lines, names, refusal, snapshot
from PIL import Image

import adasim
from adasim.api import load_run
from adasim.cli.pretrain import finish
from adasim.eval.results import Result, append_result
from adasim.tools.plot import COLOURS, DPI, MARKERS, MOST_LINES, PANELS, RunCurves, band, draw, group
from adasim.util.errors import UserError

Make = Callable[..., Path]


def figure_of(*runs: Path, curves: Sequence[str] = tuple(PANELS), constant: bool = True) -> Any:
    groups, unsaid = group([RunCurves(load_run(run)) for run in runs])
    return draw(groups, [PANELS[name] for name in curves], unsaid, constant=constant)


def labels_of(*runs: Path) -> list[str]:
    return [one.label for one in group([RunCurves(load_run(run)) for run in runs])[0]]


def panel(figure: Any, title: str) -> Any:
    (found,) = [axes for axes in figure.axes if axes.get_title(loc="left").startswith(title)]
    return found


def points(line: Any) -> dict[float, float]:
    return dict(zip(line.get_xdata(), line.get_ydata(), strict=True))


def legend_of(figure: Any) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


# ---- which numbers ----


def test_the_band_is_the_mean_and_the_extremes_where_all_have_a_value() -> None:
    curves = [
        {1.0: 2.0, 2.0: 4.0, 3.0: 9.0, 4.0: 8.0},
        {1.0: 4.0, 3.0: 3.0},
        {},
        {1.0: 0.0, 2.0: 1.0, 3.0: 0.0},
    ]
    found = band(curves)
    assert found.epochs == [1.0, 3.0]  # at 2 the second has none, and the empty one counts nowhere
    assert found.mean == [2.0, 4.0]
    assert (found.low, found.high) == ([0.0, 0.0], [4.0, 9.0])
    assert found.rest == [{3.0: 9.0, 4.0: 8.0}]  # the one that is ahead goes on from where the mean ends
    apart = band([{1.0: 5.0}, {2.0: 6.0}])
    assert (apart.epochs, apart.rest) == ([], [{1.0: 5.0}, {2.0: 6.0}])
    assert band([{}]) == band([]) != apart


def test_the_k_nn_of_snapshots_is_drawn_where_none_was_measured_during_training(make: Make) -> None:
    run = make("run", {"epoch_loss": [3, 2, 1]})
    measured = [(2, "k=20", 9.0), (1, "k=5", 20.0), (2, "k=5", 30.0), (3, "k=5", 39.0), (3, "k=5", 40.0)]
    for epoch, setting, value in measured:
        data, model = {"name": "x", "fingerprint": ""}, {"epoch": epoch}
        append_result(run / "results.jsonl", Result("knn", setting, value, {}, data, model, {}), "cpu")
    [line] = panel(figure_of(run), "k-NN").get_lines()
    assert points(line) == {1: 20, 2: 30, 3: 40}


def test_runs_that_differ_by_seed_are_their_mean_in_a_band_and_settings_lie_beside_each_other(
    make: Make,
) -> None:
    values = {
        (0.1, 0): [0.30, 0.50, 0.60],
        (0.1, 1): [0.10, 0.40, 0.20],
        (0.2, 0): [0.90, 0.80, 0.70],
        (0.2, 1): [0.70, 0.80, 0.90],
    }
    runs = [
        make(f"{tau}-{seed}", {"bootstrap_ratio": shares}, neighbors__tau=tau, seed=seed)
        for (tau, seed), shares in values.items()
    ]
    figure = figure_of(*runs, curves=["bootstrap"])
    assert legend_of(figure) == ["tau 0.1 (2 seeds)", "tau 0.2 (2 seeds)"]
    assert "band: smallest to largest" in figure.legends[0].get_title().get_text()
    axes = panel(figure, "Bootstrapping ratio")
    for place, tau in enumerate((0.1, 0.2)):
        both = 100 * np.array([values[tau, 0], values[tau, 1]])
        line, area = axes.lines[place], axes.collections[place]
        np.testing.assert_allclose(line.get_xdata(), [1, 2, 3])  # epochs, not the steps 10, 20, 30
        np.testing.assert_allclose(line.get_ydata(), both.mean(0))
        corners = area.get_paths()[0].vertices
        for epoch in (1, 2, 3):
            heights = corners[corners[:, 0] == epoch, 1]
            found = both[:, epoch - 1]
            assert (min(heights), max(heights)) == pytest.approx((found.min(), found.max()))
        assert line.get_color() == COLOURS[place]


def test_a_run_that_is_ahead_of_its_twins_goes_on_as_a_thin_line_and_another_length_is_another_setting(
    make: Make,
) -> None:
    ahead = make("a", {"epoch_loss": [3, 2, 1, 0.5]}, seed=0)
    behind = make("b", {"epoch_loss": [5, 4]}, seed=1)
    (axes,) = figure_of(ahead, behind, curves=["loss"]).axes
    mean, thin = axes.lines
    assert (points(mean), points(thin)) == ({1: 4, 2: 3}, {2: 2, 3: 1, 4: 0.5})
    assert thin.get_linewidth() < mean.get_linewidth()
    longer = make("c", {"epoch_loss": [3, 2, 1, 1, 1, 1]}, seed=0, epochs=6)
    assert legend_of(figure_of(ahead, longer, curves=["loss"])) == ["4 epochs", "6 epochs"]


def test_labels_say_what_differs_and_has_an_effect(make: Make) -> None:
    numbers = {"epoch_loss": [1, 2]}
    one = make("one", numbers, pairs="adasim", neighbors__tau=0.1)
    runs = [
        one,
        make("two", numbers, pairs="adasim", neighbors__tau=0.2),
        make("standard", numbers, pairs="standard", neighbors__tau=0.7, neighbors__window=9),
        make("nearest", numbers, pairs="nearest", neighbors__tau=0.9),
        make("again", numbers, pairs="nearest", neighbors__tau=0.3, device="cuda", save__keep=7),
    ]
    assert labels_of(*runs) == [
        "AdaSim pairs, tau 0.1",
        "AdaSim pairs, tau 0.2",
        "standard pairs",
        "nearest pairs, nearest",  # the same settings and the same seed: told apart by their folders
        "nearest pairs, again",
    ]
    assert labels_of(one) == [""]
    changes = {"batch_size": 8, "optim__lr": 0.1, "optim__clip_grad": 1.0}
    other = make("other", numbers, neighbors__tau=0.1, **changes)
    assert labels_of(one, other) == [
        "batch 16, learning rate 0.02, clip grad 0.0",
        "batch 8, learning rate 0.1, clip grad 1.0",
    ]
    third = make("third", numbers, neighbors__tau=0.1, views__jitter=(0, 0, 0, 0), **changes)
    groups, unsaid = group([RunCurves(load_run(run)) for run in (one, other, third)])
    assert [one.label for one in groups] == [  # jitter is needed to tell the last two apart
        "batch 16, learning rate 0.02, jitter 0.4, 0.4, 0.2, 0.1",
        "batch 8, learning rate 0.1, jitter 0.4, 0.4, 0.2, 0.1",
        "batch 8, learning rate 0.1, jitter 0, 0, 0, 0",
    ]
    assert unsaid == ["optim.clip_grad"]


def test_the_same_images_in_another_place_are_the_same_setting(make: Make) -> None:
    runs = [make(f"{s}", {"epoch_loss": [1]}, seed=s, data__source=f"/disk{s}/photos") for s in (0, 1)]
    for run in runs:
        (run / "data.json").write_text('{"fingerprint": "abc"}')
    assert len(labels_of(*runs)) == 1
    (runs[1] / "data.json").write_text('{"fingerprint": "other"}')
    assert labels_of(*runs) == ["photos, 0", "photos, 1"]  # never the path; the folders tell them apart


def test_a_real_run_has_all_panels_but_those_that_it_cannot_fill(finished: Path) -> None:
    figure = figure_of(finished)
    titles = {axes.get_title(loc="left") for axes in figure.axes}
    assert titles == {one.title for name, one in PANELS.items() if name != "knn"}  # it was not evaluated
    lines = json_lines(finished / "metrics.jsonl")
    epochs = [line for line in lines if "epoch_loss" in line]
    drawn = {
        "Nearest neighbour": ("partner_accuracy", "nn_accuracy_top1"),
        "Second neighbour": ("other_neighbour_accuracy", "nn_accuracy_top2"),
        "Nearest is the image": ("nn_self_top1",),
        "Teacher entropy": ("epoch_teacher_entropy_share",),
    }
    for title, metrics in drawn.items():
        axes = panel(figure, title)
        assert len(axes.lines) == len(metrics)
        for line, metric in zip(axes.lines, metrics, strict=True):
            wanted = {e["epoch"] + 1: 100 * e[metric] for e in epochs if e[metric] is not None}
            assert points(line) == pytest.approx(wanted)
    for title, metric, place in (("Optimiser", "lr", 0), ("Teacher's", "teacher_momentum", 1)):
        line = panel(figure, title).lines[place]
        logged = list({one["step"]: one[metric] for one in lines}.values())  # of steps, and again of epochs
        values = np.array(logged) if metric == "lr" else 1 - np.array(logged)
        np.testing.assert_allclose(line.get_ydata(), values / max(values))
        np.testing.assert_allclose(line.get_xdata(), np.arange(1, 10) / 3, atol=1e-6)  # 3 steps an epoch


def test_schedules_that_tell_nothing_are_left_out(make: Make) -> None:
    same = {"epoch_loss": [1, 2], "lr": [0.4, 0.2], "weight_decay": [0.1, 0.1]}
    runs = [make("a", same, neighbors__tau=0.1), make("b", same, neighbors__tau=0.2)]
    rates = panel(figure_of(*runs, constant=False), "Optimiser").lines
    assert [list(line.get_ydata()) for line in rates] == [[1, 0.5], [1, 0.5]]
    other = make("c", {**same, "weight_decay": [0.2, 0.2]}, neighbors__tau=0.2)
    decays = panel(figure_of(runs[0], other, constant=False), "Optimiser").lines[2:]
    assert [list(line.get_ydata()) for line in decays] == [[0.5, 0.5], [1, 1]]


def test_what_is_no_number_is_passed_over_and_damaged_lines_too(make: Make) -> None:
    run = make("run", {"epoch_loss": [4, None, "three", 2], "bootstrap_ratio": [None] * 4})
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "epo\n[1]\n\xff\xfe\n{"step": 60, "epoch": 5, "epoch_lo')
    with pytest.warns(UserWarning, match="damaged"):
        (axes,) = figure_of(run).axes  # nothing but the loss has a number
    assert points(axes.lines[0]) == {1: 4, 4: 2}


def test_a_run_in_the_middle_of_an_epoch_is_drawn_as_far_as_it_is(make: Make) -> None:
    run = make("run", {"epoch_loss": [4, 3]})
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 24, "epoch": 2, "loss": 9.0, "lr": 0.5}\n{"step": 25, "epoch": 2, "lr": 0.25}\n')
    figure = figure_of(run)
    assert panel(figure, "Loss").get_xlim()[1] >= 2.5
    assert list(panel(figure, "Loss").lines[0].get_xdata()) == [1, 2]
    assert list(panel(figure, "Optimiser").lines[0].get_xdata()) == [2.4, 2.5]
    assert figure.get_suptitle().endswith("epoch 2 of 4")


# ---- how it looks ----


def test_every_letter_is_readable_in_a_talk_and_has_a_place_of_its_own(finished: Path, make: Make) -> None:
    whole = figure_of(finished)
    whole.draw_without_rendering()  # makes the numbers at the axes, and places everything
    titles = [axes._left_title.get_window_extent() for axes in whole.axes]
    assert not any(first.overlaps(second) for first, second in combinations(titles, 2))
    assert max(box.x1 for box in titles) <= 1920
    many = [make(f"tau-{i}", {"epoch_loss": [1, 2]}, neighbors__tau=i / 8) for i in range(1, 13)]
    for figure, least in ((whole, 80), (figure_of(finished, curves=["loss"]), 3), (figure_of(*many), 14)):
        assert tuple(figure.get_size_inches() * DPI) == (1920, 1080)
        texts = [text for text in figure.findobj(lambda one: hasattr(one, "get_fontsize")) if text.get_text()]
        assert len(texts) >= least
        assert min(text.get_fontsize() for text in texts) * DPI / 72 >= 18
    looks = {(line.get_color(), line.get_marker()) for line in panel(figure, "Loss").lines}
    assert len(looks) == 12  # more than there are colours, and still all different


def test_people_of_any_colour_vision_tell_the_colours_apart() -> None:
    """Machado, Oliveira and Fernandes (2009), severity 1; distances in CIELAB, where 2.3 is just noticeable."""
    matrices = [  # protanopia, deuteranopia, tritanopia; by rows
        [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998],
        [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.011820, 0.042940, 0.968881],
        [1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.303900],
    ]
    coded = np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in COLOURS])
    light = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    for matrix in matrices:
        seen = np.clip(light @ np.array(matrix).reshape(3, 3).T, 0, 1)
        f = np.cbrt(seen @ to_xyz.T / [0.9505, 1, 1.089])
        lab = np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], 1)
        assert min(math.dist(a, b) for a, b in combinations(lab, 2)) > 8
    assert len(set(MARKERS)) == len(COLOURS) + 1


def test_names_of_folders_are_text_and_nothing_else(make: Make, tmp_path: Path) -> None:
    numbers = {"epoch_loss": [1, 2]}
    name = "$\\frac{1$ <script>alert(1)</script> & \u202e"
    hostile, plain = make(name.replace("/", "|"), numbers), make("plain", numbers)
    (svg,) = adasim.plot([hostile, plain], tmp_path / "both.svg")
    texts = ["".join(element.itertext()) for element in ET.parse(svg).iter() if element.tag.endswith("text")]
    assert "$\\frac{1$ <script>alert(1)<|script> & \\u202e" in texts
    assert "<script" not in svg.read_text()


def test_as_many_settings_as_fit_leave_room_for_the_curves_and_more_are_refused(
    make: Make, tmp_path: Path
) -> None:
    whole = {name: [1, 2] for panel in PANELS.values() for name in panel.lines.values()}
    runs = [make("x" * 99 + str(i), {"epoch_loss": [1, 2]} if i else whole) for i in range(MOST_LINES + 1)]
    with pytest.raises(UserError, match="25 different settings, and a figure has room for 24"):
        adasim.plot(runs, tmp_path / "all.svg")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns if there is no room
        adasim.plot(runs[:-1], tmp_path / "all.svg")


# ---- the command ----


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
    numbers = {"epoch_loss": [3, 2], "train_loss": [3, 2]}
    runs = [make(f"r{tau}", numbers, neighbors__tau=tau) for tau in (0.1, 0.2)]
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
    for _ in range(2):
        command(f"plot {runs[0]} --out one.pdf --curves loss train_loss")  # any name in metrics.jsonl
        assert names(here) == ["curves.png", "curves.svg", "one.pdf"]
    assert [snapshot(run) for run in runs] == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("{tmp}", "{tmp} is not the folder of a run"),
        ("{tmp}/good {tmp}/nowhere", "there is no such folder"),
        ("{tmp}/silent", "{tmp}/silent has not finished an epoch yet"),
        ("{tmp}/young {tmp}/silent", "These runs have not finished an epoch yet"),
        ("{tmp}/old", "There is nothing to draw"),
        ("{tmp}/old --curves note", "nothing of that name"),
        ("{tmp}/good --curves teacher-entropy", "There is nothing to draw for teacher-entropy"),
        ("{tmp}/good --curves los", "Did you mean loss?"),
        ("{tmp}/good --out {tmp}/figure.gif", "must end in .png, .svg or .pdf"),
        ("{tmp}/good --out {tmp}/nowhere/figure.png", "There is no folder {tmp}/nowhere"),
        ("{tmp}/good --out {tmp}/mine.png", "{tmp}/mine.png is no figure of adasim plot"),
        ("{tmp}/good --out {tmp}/link.svg", "{tmp}/link.svg is no figure of adasim plot"),
        ("", "Which runs?"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    words: str, expected: str, make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make("good", {"loss": [3, 2], "epoch_loss": [3, 2]})
    make("old", {"train_loss": [3, 2], "note": ["a", "b"]})
    young = make("young", {})
    (young / "metrics.jsonl").write_text('{"step": 5, "epoch": 0, "loss": 1.0}\n')
    (make("silent", {}) / "metrics.jsonl").unlink()
    (tmp_path / "mine.png").write_bytes(b"a photo")
    (tmp_path / "link.svg").symlink_to(tmp_path / "absent.svg")
    before = snapshot(tmp_path)
    message = refusal(f"plot {words.format(tmp=tmp_path)}", capsys)
    assert expected.format(tmp=tmp_path) in message
    assert snapshot(tmp_path) == before


def test_a_run_ends_with_its_curves_and_a_figure_that_fails_does_not_make_it_fail(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)

    def said(curves: bool = True) -> str:
        finish(run, curves=curves, compare=False)
        return capsys.readouterr().out

    monkeypatch.setenv("RANK", "1")
    assert said() == ""  # another process of the run draws and says nothing
    monkeypatch.delenv("RANK")
    assert f"adasim plot {run}" in said(curves=False)
    assert not (run / "curves.png").exists()
    assert str(run / "curves.png") in said()
    assert (run / "curves.png").stat().st_size > 10_000
    assert not (run / "curves.svg").exists()
    (run / "curves.png").write_bytes(b"something else")
    assert "The curves are not drawn: " in (words := said())
    assert str(run / "backbone.safetensors") in words
    (run / "curves.png").unlink()
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "epoch": 0, "loss": 2.0}) + "\n")
    assert "The curves are not drawn: " in said()
