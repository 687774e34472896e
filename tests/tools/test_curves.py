"""The figure of `adasim plot`, looked at through matplotlib's own objects."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import json_lines

import adasim
from adasim.eval.results import Result, append_result
from adasim.run import load_run
from adasim.tools.curves import PANELS, RunCurves, band, group
from adasim.tools.plot import COLOURS, DPI, INK, MARKERS, draw

Make = Callable[..., Path]


def figure_of(*runs: Path, curves: Sequence[str] = tuple(PANELS)) -> Any:
    grouped = group([RunCurves(load_run(run)) for run in runs])
    return draw(grouped, [PANELS[name] for name in curves])


def labels_of(runs: Sequence[RunCurves]) -> list[str]:
    return [one.label for one in group(runs).groups]


def panel(figure: Any, title: str) -> Any:
    (found,) = [axes for axes in figure.axes if axes.get_title(loc="left").startswith(title)]
    return found


def legend_of(figure: Any) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


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
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2, 3], [20, 30, 40])


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
    assert (list(mean.get_xdata()), list(mean.get_ydata())) == ([1, 2], [4, 3])
    assert (list(thin.get_xdata()), list(thin.get_ydata())) == ([2, 3, 4], [2, 1, 0.5])
    assert thin.get_linewidth() < mean.get_linewidth()
    longer = make("c", {"epoch_loss": [3, 2, 1, 1, 1, 1]}, seed=0, epochs=6)
    assert legend_of(figure_of(ahead, longer, curves=["loss"])) == ["4 epochs", "6 epochs"]


def test_labels_say_what_differs_and_has_an_effect(make: Make) -> None:
    numbers = {"epoch_loss": [1, 2]}
    runs = {
        "one": make("one", numbers, pairs="adasim", neighbors__tau=0.1),
        "two": make("two", numbers, pairs="adasim", neighbors__tau=0.2),
        "standard": make("standard", numbers, pairs="standard", neighbors__tau=0.7, neighbors__window=9),
        "nearest": make("nearest", numbers, pairs="nearest", neighbors__tau=0.9),
        "again": make("again", numbers, pairs="nearest", neighbors__tau=0.3, device="cuda", save__keep=7),
    }
    read = [RunCurves(load_run(run)) for run in runs.values()]
    found = group(read)
    assert [(one.label, len(one.runs)) for one in found.groups] == [
        ("AdaSim pairs, tau 0.1", 1),
        ("AdaSim pairs, tau 0.2", 1),
        ("standard pairs", 1),
        ("nearest pairs, nearest", 1),  # the same settings and the same seed: told apart by their folders
        ("nearest pairs, again", 1),
    ]
    assert found.unsaid == []
    assert labels_of(read[:1]) == [""]
    changes = {"batch_size": 8, "optim__lr": 0.1, "optim__clip_grad": 1.0}
    other = RunCurves(load_run(make("other", numbers, neighbors__tau=0.1, **changes)))
    assert labels_of([read[0], other]) == [
        "batch 16, learning rate 0.02, clip grad 0.0",
        "batch 8, learning rate 0.1, clip grad 1.0",
    ]
    still = make("third", numbers, neighbors__tau=0.1, views__jitter=(0, 0, 0, 0), **changes)
    third = RunCurves(load_run(still))
    found = group([read[0], other, third])  # jitter is needed to tell the last two apart: it takes a place
    assert [one.label for one in found.groups] == [
        "batch 16, learning rate 0.02, jitter 0.4, 0.4, 0.2, 0.1",
        "batch 8, learning rate 0.1, jitter 0.4, 0.4, 0.2, 0.1",
        "batch 8, learning rate 0.1, jitter 0, 0, 0, 0",
    ]
    assert found.unsaid == ["optim.clip_grad"]


def test_the_same_images_in_another_place_are_the_same_setting(make: Make) -> None:
    runs = [make(f"{s}", {"epoch_loss": [1]}, seed=s, data__source=f"/disk{s}/photos") for s in (0, 1)]
    for run in runs:
        (run / "data.json").write_text('{"fingerprint": "abc"}')
    assert len(labels_of([RunCurves(load_run(run)) for run in runs])) == 1
    (runs[1] / "data.json").write_text('{"fingerprint": "other"}')
    labels = labels_of([RunCurves(load_run(run)) for run in runs])
    assert labels == ["photos, 0", "photos, 1"]  # never the path; the folders tell them apart


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
            assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == pytest.approx(wanted)
    schedules = panel(figure, "Optimiser's schedules")
    rates = list({line["step"]: line["lr"] for line in lines}.values())  # of steps, and again of epochs
    np.testing.assert_allclose(schedules.lines[0].get_ydata(), np.array(rates) / max(rates))
    epochs_drawn = schedules.lines[0].get_xdata()
    np.testing.assert_allclose(epochs_drawn, np.arange(1, 10) / 3, atol=1e-6)  # three steps an epoch


def test_schedules_that_tell_nothing_are_left_out_and_what_all_share_is_one_line(make: Make) -> None:
    same = {"epoch_loss": [1, 2], "lr": [0.4, 0.2], "weight_decay": [0.1, 0.1]}
    runs = [make("a", same, neighbors__tau=0.1), make("b", same, neighbors__tau=0.2)]
    (rate,) = panel(default_figure(runs), "Optimiser").lines
    assert rate.get_color() == INK
    assert list(rate.get_ydata()) == [1, 0.5]
    decays = {**same, "weight_decay": [0.2, 0.2]}
    lines = panel(default_figure([runs[0], make("c", decays, neighbors__tau=0.2)]), "Optimiser").lines
    assert len(lines) == 3  # the shared rate, and two decays of their own
    assert [list(line.get_ydata()) for line in lines[1:]] == [[0.5, 0.5], [1, 1]]


def default_figure(runs: Sequence[Path]) -> Any:
    return draw(group([RunCurves(load_run(run)) for run in runs]), list(PANELS.values()), constant=False)


def test_what_is_no_number_is_passed_over_and_damaged_lines_too(make: Make) -> None:
    run = make("run", {"epoch_loss": [4, None, "three", 2], "bootstrap_ratio": [None] * 4})
    path = run / "metrics.jsonl"
    damaged = (
        b'{"step": 3, "epo\n[1]\n\xff\xfe\n{"step": "x", "epoch_loss": 1}\n{"step": 50, "epoch": "four", '
    )
    path.write_bytes(path.read_bytes() + damaged + b'"epoch_loss": NaN}\n{"step": 60, "epoch": 5, "epoch_lo')
    (axes,) = figure_of(run).axes  # nothing but the loss has a number
    (line,) = axes.lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 4], [4, 2])


def test_every_letter_is_readable_in_a_talk_and_has_a_place_of_its_own(finished: Path, make: Make) -> None:
    whole = figure_of(finished)
    whole.draw_without_rendering()  # makes the numbers at the axes, and places everything
    titles = [axes._left_title.get_window_extent() for axes in whole.axes]
    assert not any(first.overlaps(second) for first, second in combinations(titles, 2))
    assert max(box.x1 for box in titles) <= 1920
    many = [make(f"tau-{i}", {"epoch_loss": [1, 2]}, neighbors__tau=i / 8) for i in range(1, 13)]
    for figure, least in ((whole, 80), (figure_of(finished, curves=["loss"]), 3), (figure_of(*many), 14)):
        assert tuple(figure.get_size_inches() * DPI) == (1920, 1080)
        assert figure.get_facecolor() == (1, 1, 1, 1)
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
        xyz = seen @ to_xyz.T
        f = np.cbrt(xyz / [0.9505, 1, 1.089])
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


def test_a_run_in_the_middle_of_an_epoch_is_drawn_as_far_as_it_is(make: Make) -> None:
    run = make("run", {"epoch_loss": [4, 3]})
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 24, "epoch": 2, "loss": 9.0, "lr": 0.5}\n{"step": 25, "epoch": 2, "lr": 0.25}\n')
    figure = figure_of(run)
    assert panel(figure, "Loss").get_xlim()[1] >= 2.5
    assert list(panel(figure, "Loss").lines[0].get_xdata()) == [1, 2]
    assert list(panel(figure, "Optimiser").lines[0].get_xdata()) == [2.4, 2.5]
    assert figure.get_suptitle().endswith("epoch 2 of 4")
