"""Metrics in Weights & Biases and MLflow are those of metrics.jsonl, and their troubles are not the run's.

Both packages run for real, in their own offline modes: wandb offline, MLflow with files in a folder.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import refusal, until
from pretrainings import metrics, small

import adasim
from adasim.runs import metrics as metrics_module
from adasim.runs.metrics import SERVICES, Tracker

BLOCK = 32768


def wandb_points(file: Path) -> dict[int, dict[str, float]]:
    """{step: values} of an offline run: blocks of records (crc, length, place), whole or in pieces, as in LevelDB."""
    from wandb.proto import wandb_internal_pb2

    data, position, whole = file.read_bytes(), 7, b""
    points: dict[int, dict[str, float]] = {}
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:  # too little room for a record's head
            position += BLOCK - position % BLOCK
            continue
        length, place = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        if position + 7 + length > len(data):  # half written
            break
        whole = (b"" if place in (1, 2) else whole) + data[position + 7 : position + 7 + length]
        position += 7 + length
        if place in (1, 4):
            record = vars(wandb_internal_pb2)["Record"].FromString(whole)
            if record.WhichOneof("record_type") == "history":
                values = {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item}
                points.setdefault(int(values.pop("_step")), {}).update(values)
    return points


def lines(run: Path) -> dict[int, dict[str, float]]:
    """The same of metrics.jsonl: a step's own line and an epoch's together."""
    points: dict[int, dict[str, float]] = {}
    for line in metrics(run):
        points.setdefault(line.pop("step"), {}).update(line)
    return points


def run_id(run: Path) -> str:
    return json.loads((run / "run.json").read_text())["id"]


def same(found: dict[str, float], wanted: dict[str, Any]) -> bool:
    known = {name: value for name, value in wanted.items() if value is not None}
    return all(math.isclose(found[name], value, rel_tol=1e-6) for name, value in known.items())


@pytest.mark.slow
def test_wandb_gets_every_line_and_a_resumed_run_goes_on_under_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run = adasim.pretrain(small(epochs=2, save__log="wandb"), tmp_path / "run")
    adasim.pretrain(small(epochs=3, save__log="wandb"), tmp_path / "run", resume=True)
    identity = run_id(run)
    files = tmp_path.glob(f"wandb/offline-run-*/run-{identity}.wandb")
    first, second = sorted(files, key=lambda path: path.stat().st_mtime)
    # wandb writes in a process of its own, which may still do so when the run has ended.
    until(lambda: sorted(wandb_points(first)) == [1, 2, 3, 4, 5, 6])
    until(lambda: sorted(wandb_points(second)) == [7, 8, 9])
    wanted, points = lines(run), wandb_points(first) | wandb_points(second)
    assert all(same(points[step], wanted[step]) for step in wanted)


@pytest.mark.slow
def test_mlflow_gets_every_line_once_and_a_resumed_run_goes_on_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = adasim.pretrain(small(epochs=2, save__log="mlflow"), tmp_path / "run")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("adasim").experiment_id
    (kept,) = client.search_runs([experiment])
    # As after a crash between two checkpoints: steps 7 and 8 are there before the run comes to them again.
    service = SERVICES["mlflow"](run_id(run), "run", {})
    for step in (7, 8):
        service.send(step, {"epoch": 2, "loss": 1.0})
    adasim.pretrain(small(epochs=3, save__log="mlflow"), tmp_path / "run", resume=True)
    (again,) = client.search_runs([experiment])
    assert again.info.run_id == kept.info.run_id
    assert again.info.status == "FINISHED"
    assert again.data.params["neighbors.tau"] == "0.2"
    history = {point.step: point.value for point in client.get_metric_history(again.info.run_id, "loss")}
    steps = [point.step for point in client.get_metric_history(again.info.run_id, "loss")]
    assert sorted(steps) == list(range(1, 10))  # each once
    wanted = lines(run)
    for step in (1, 2, 3, 4, 5, 6, 9):
        assert history[step] == pytest.approx(wanted[step]["loss"])


def test_a_package_that_is_missing_is_one_sentence_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    words = ["pretrain", "demo", "--log", "wandb", "--out", str(tmp_path / "run")]
    message = refusal(words, capsys)
    assert "--log wandb needs wandb, which is not installed: pip install 'adasim[wandb]'" in message
    assert not (tmp_path / "run").exists()


class Broken:
    """A service that takes the first line, and none after it."""

    place = "nowhere"

    def __init__(self, *_: object) -> None:
        self.taken: list[int] = []

    def send(self, step: int, values: dict[str, Any]) -> None:
        if self.taken:
            raise ConnectionError("the server is on fire")
        self.taken.append(step)

    def finish(self, complete: bool) -> None:
        raise OSError("still on fire")


def test_a_service_that_fails_or_cannot_be_reached_never_stops_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*_: object) -> Broken:
        raise TimeoutError("no route to host")

    monkeypatch.setitem(SERVICES, "wandb", Broken)
    monkeypatch.setitem(SERVICES, "mlflow", unreachable)
    monkeypatch.setattr(metrics_module, "find_spec", lambda package: True)
    expected = {
        "wandb": "3 lines of metrics did not reach wandb (still on fire)",
        "mlflow": "no route to host",
    }
    for log, sentence in expected.items():
        run = adasim.pretrain(small(epochs=1, pairs="standard", save__log=log), tmp_path / log)
        assert sentence in capsys.readouterr().out
        assert metrics(run)[-1]["epoch_loss"] > 0


@pytest.mark.parametrize(
    ("hangs", "sentence"),
    [("send", "lines of metrics did not reach wandb"), ("finish", "wandb may not have got the last metrics")],
)
def test_a_service_that_hangs_is_not_waited_for_during_a_run_and_not_long_at_its_end(
    monkeypatch: pytest.MonkeyPatch, hangs: str, sentence: str
) -> None:
    release = threading.Event()
    said: list[str] = []

    class Hanging(Broken):
        def send(self, step: int, values: dict[str, Any]) -> None:
            release.wait(120 * (hangs == "send"))

        def finish(self, complete: bool) -> None:
            release.wait(120 * (hangs == "finish"))

    monkeypatch.setattr(metrics_module, "WAIT_S", 1.0)
    monkeypatch.setattr(metrics_module, "_LINES", 50 if hangs == "send" else 1000)
    began = time.monotonic()
    tracker = Tracker("wandb", Hanging(), said.append)
    for step in range(100):
        tracker.write(step, {"loss": 1.0})
    tracker.close()
    release.set()
    assert time.monotonic() - began < 60
    assert sentence in said[-1]


@pytest.mark.slow
def test_timm_does_not_import_wandb_and_whoever_asks_for_it_does(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    code = """
import contextlib, os, sys, tempfile
from adasim.__main__ import main
sys.argv[1:] = ["eval", "knn", "no-such-model", "--data", "synthetic:16"]
with contextlib.suppress(SystemExit):
    main()
assert "timm" in sys.modules and "wandb" not in sys.modules
assert not os.listdir(tempfile.gettempdir())
import wandb
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
