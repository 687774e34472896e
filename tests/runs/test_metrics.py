"""What a run writes down: numbers by step, time and speed, and how often neighbours are of one class."""

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import forked, names
from pretrainings import metrics, small
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from adasim.api import pretrain
from adasim.data import Batch, open_images
from adasim.runs.metrics import MetricsLog, Pace, read_metrics
from adasim.train.report import neighbour_counts
from adasim.train.state import TrainState

# Lines


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_json_lines_and_tensorboard_scalars(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(1, {"loss": torch.tensor(0.5), "epoch": 0, "note": "first"})
        log.write(2, {"loss": np.float32(0.25), "epoch": 0})
        assert len(lines(tmp_path)) == 2  # visible at once, not at the end
        log.sync()
    assert lines(tmp_path) == [
        {"step": 1, "loss": 0.5, "epoch": 0, "note": "first"},
        {"step": 2, "loss": 0.25, "epoch": 0},
    ]
    assert board(tmp_path) == [(1, 0.5), (2, 0.25)]


def board(folder: Path) -> list[tuple[int, float]]:
    return [(e.step, e.value) for e in EventAccumulator(str(folder / "tensorboard")).Reload().Scalars("loss")]


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, step=0) as log:  # which starts a file, if there is none
        log.write(1, {"loss": float("nan"), "low": torch.tensor(-torch.inf), "ok": 1e-300})
    assert lines(tmp_path) == [{"step": 1, "loss": None, "low": None, "ok": 1e-300}]


def test_a_resumed_run_holds_each_step_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for step in range(1, 11):
            log.write(step, {"loss": step})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 4, "lo')  # a line that a kill cut short
    with MetricsLog(tmp_path, step=6) as log:
        assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
        for step in range(7, 13):
            log.write(step, {"loss": -step})
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [
        *((s, s) for s in range(1, 7)),
        *((s, -s) for s in range(7, 13)),
    ]
    assert board(tmp_path)[:6] == [(s, float(s)) for s in range(1, 7)]
    assert [step for step, _ in board(tmp_path)] == list(range(1, 13))
    assert names(tmp_path) == ["metrics.jsonl", "tensorboard"]


def test_a_full_disk_delays_metrics_and_stops_nothing(tmp_path: Path) -> None:
    def work() -> None:
        # A limit of files' sizes is a full disk for this process alone.
        with MetricsLog(tmp_path) as log:
            for step in range(1, 40):
                resource.setrlimit(resource.RLIMIT_FSIZE, (300 if 10 <= step < 30 else -1, -1))
                log.write(step, {"loss": step})
                assert step != 29 or (tmp_path / "metrics.jsonl").stat().st_size == 300

    assert forked(work) == (0, "")
    assert [line["step"] for line in lines(tmp_path)] == [*range(1, 40)]
    assert board(tmp_path) == [(step, float(step)) for step in range(1, 40)]


def test_damaged_lines_are_told_and_one_that_a_kill_cut_short_is_not(tmp_path: Path) -> None:
    said: list[str] = []
    line, path = b'{"step": 1}\n', tmp_path / "metrics.jsonl"
    for content in (line, line + b'{"st', b"{]\n" + line, b"\x80\x04K", b"{\0"):
        path.write_bytes(content)
        assert len(read_metrics(tmp_path, said.append)) == (line in content)
    assert said == [f"{path}: 1 line is left out, as damaged."] * 3


# Time


def test_speed_and_waiting_are_those_of_the_time_since_the_last_line() -> None:
    now = 100.0
    pace = Pace(clock=lambda: now)
    figures = []
    for seconds, waited in ((2.0, 1.0), (4.0, 1.0)):
        now += seconds
        pace.count(64, waited)
        figures.append(pace.lap())
    assert figures == [
        {"seconds": 2.0, "images_per_second": 32.0, "waiting": 0.5},
        {"seconds": 6.0, "images_per_second": 16.0, "waiting": 0.25},
    ]
    now += 2
    epoch = {"epoch_seconds": 8.0, "epoch_images_per_second": 16.0, "epoch_waiting": 0.25}
    assert pace.epoch() == {"seconds": 8.0, **epoch}
    now += 3
    assert pace.epoch()["epoch_seconds"] == 3.0


def test_time_goes_on_where_the_lines_before_a_resume_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace.__init__, "__defaults__", (0.0, 0.0, lambda: 100.0))
    lines: list[dict[str, Any]] = [
        {"step": 1, "seconds": 3.0},
        {"step": 2, "seconds": 7.0, "epoch_seconds": 7.0},
        {"step": 3, "seconds": 9.0},
    ]
    later = Pace.after(lines).epoch()
    assert later["seconds"] == 9.0
    assert later["epoch_seconds"] == 2.0
    assert Pace.after([]).lap()["seconds"] == 0.0


# Neighbours


class Epochs(list[tuple[dict[int, int], Tensor, Tensor, Tensor]]):
    """Per epoch: every pair that was trained on, the window's lists (ids, similarities) they were drawn from, and
    the lists that were made in it."""

    def __init__(self) -> None:
        self.pairs: dict[int, int] = {}

    def add(self, state: TrainState, batch: Batch, loss: float) -> None:
        self.pairs |= dict(zip(batch.ids.tolist(), batch.partners.tolist(), strict=True))
        if state.step_in_epoch < 2:  # of 2 steps
            return
        memory = state.memory
        assert memory is not None
        ids, similarities = memory.history_ids.clone(), memory.history_similarities.double()
        if memory.timing == "current":
            slot = memory.epochs % memory.window
            ids[:, slot] = memory.current_ids
            similarities[:, slot] = memory.current_similarities.double()
        self.append((self.pairs, ids, similarities, memory.current_ids.clone()))
        self.pairs = {}


def second(ids: Tensor, similarities: Tensor, but: set[int], k: int) -> int | None:
    """The argmax of p_win over images other than `but`, from one image's lists (w, K), as the paper says."""
    sums: dict[int, float] = {}
    for j, similarity in zip(ids.flatten().tolist(), similarities.flatten().tolist(), strict=True):
        if j >= 0:
            sums[j] = sums.get(j, 0.0) + similarity
    support = sorted(sums, key=lambda j: (-sums[j], j))[:k]
    return next((j for j in support if j not in but), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"neighbors__timing": "current"},
        {"pairs": "nearest"},
        {"pairs": "standard", "neighbors__watch": True},
        {"pairs": "oracle", "neighbors__watch": True, "neighbors__timing": "current"},
        {"neighbors__tau": 0.0, "neighbors__window": 2},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())) or "adasim",
)
def test_partner_and_second_neighbour_are_the_papers(tmp_path: Path, changes: dict[str, Any]) -> None:
    """(b): j* as drawn has the image's class; (c): the best of p_win other than j* has. And how often the first and
    the second of the lists that were just made are of the class, or the image itself."""
    config = small(batch_size=20, **changes)  # 8 images are left over in each epoch
    epochs = Epochs()
    pretrain(config, tmp_path / "run", on_step=epochs.add)
    labels = open_images(config.data.source, size=16).labels
    assert labels is not None
    lines = [line for line in metrics(tmp_path / "run") if "epoch_loss" in line]
    for line, (pairs, ids, similarities, made) in zip(lines, epochs, strict=True):
        assert len(pairs) == 40
        own = sum(bool(labels[i] == labels[j]) for i, j in pairs.items()) / 40
        assert line["partner_accuracy"] == pytest.approx(own)
        for rank in (0, 1):  # images that were left over have no list
            found = {i: int(made[i, rank]) for i in pairs}
            itself = sum(i == j for i, j in found.items()) / 40
            same = sum(bool(labels[i] == labels[j]) for i, j in found.items()) / 40
            assert line[f"nn_self_top{rank + 1}"] == pytest.approx(itself)
            assert line[f"nn_accuracy_top{rank + 1}"] == pytest.approx(same)
        if (ids < 0).all():
            assert line["second_neighbour_accuracy"] is None
            assert line["other_neighbour_accuracy"] is None
            continue
        for name in ("second", "other"):
            best = {
                i: second(ids[i], similarities[i], {j} if name == "second" else {i, j}, config.neighbors.k)
                for i, j in pairs.items()
            }
            same = sum(j is not None and bool(labels[i] == labels[j]) for i, j in best.items()) / 40
            assert line[f"{name}_neighbour_accuracy"] == pytest.approx(same)
            if name == "second":  # what it counts: where another image was drawn, the gate is open
                assert all(best[i] == i for i, j in pairs.items() if i != j and config.pairs == "adasim")
    if config.pairs == "standard":
        assert all(line["partner_accuracy"] == 1 for line in lines)
        assert lines[-1]["bootstrap_ratio"] == 0


def test_neighbours_count_only_where_both_have_a_label() -> None:
    lists = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [4, -1], [-1, -1]])
    labels = torch.tensor([0, 0, -1, -1, 1, 1])
    assert neighbour_counts(lists, 0, labels) == {
        "nn_self_top1": (5, 5),
        "nn_accuracy_top1": (3, 3),
        "nn_self_top2": (0, 5),
        "nn_accuracy_top2": (1, 2),  # that of image 0 is right, that of 1 is not known, and 4 has none
    }


@pytest.mark.slow
def test_a_run_that_is_watched_learns_the_same_bits(tmp_path: Path) -> None:
    config = {"pairs": "standard", "neighbors__timing": "current"}
    pretrain(small(**config), tmp_path / "plain")
    pretrain(small(**config, neighbors__watch=True), tmp_path / "watched")
    mine, theirs = (load_file(tmp_path / run / "backbone.safetensors") for run in ("plain", "watched"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    plain, watched = (metrics(tmp_path / run) for run in ("plain", "watched"))
    assert [line.get("loss") for line in plain] == [line.get("loss") for line in watched]
    assert "nn_accuracy_top2" not in plain[-1]
    assert {"nn_accuracy_top2", "partner_accuracy", "second_neighbour_accuracy"} <= watched[-1].keys()
