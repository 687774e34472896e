"""The table at the end of a run: raw pixels, untrained, where it began, after."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helpers import photos_of_patterns
from pretrainings import Small

from adasim.api import evaluate, pretrain
from adasim.data import Subset, open_images
from adasim.eval.results import COMPARED, read_results
from adasim.eval.splits import open_split
from adasim.models import load_backbone, pixels
from adasim.tools import before_after
from adasim.tools.export import export
from adasim.util import terminal


def shown(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    capsys.readouterr()
    before_after.show(run, terminal.console(width=100))
    rows = re.findall(r"│ ([\w ]+?) +│ +([\d.]+)%", capsys.readouterr().out)
    return {name.strip(): float(value) for name, value in rows}


def test_every_stage_is_measured_on_the_runs_own_test_images(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = pretrain(small(epochs=2), tmp_path / "first")
    run = pretrain(small(epochs=2, model__init=str(first)), tmp_path / "run")
    rows = shown(run, capsys)
    assert list(rows) == ["raw pixels", "untrained encoder", "where it began", "after pretraining"]
    split = open_split("synthetic:48", None, None, size=16)
    test = Subset(split.test, before_after._some(split.test_ids, "test", small()))
    sets: dict[str, Any] = {"train": split.train, "test": test}
    stages = {"where it began": load_backbone(first), "after pretraining": load_backbone(run)}
    for name, encoder in {"raw pixels": pixels(), **stages}.items():
        assert rows[name] == round(evaluate(encoder, "knn", k=20, save=False, **sets).value, 1), name
    (kept,) = read_results(run)
    compared = {name: round(value, 1) for name, value in kept.metrics[COMPARED].items()}
    assert compared == {name: value for name, value in rows.items() if name != "after pretraining"}
    export(run, "timm", tmp_path / "exported")
    assert f"where it began {kept.metrics[COMPARED]['where it began']:.2f}" in (
        tmp_path / "exported" / "README.md"
    ).read_text(encoding="utf-8")
    assert "below raw pixels" not in str(evaluate(run, "knn", k=20))
    before_after.keep(run, kept, {"raw pixels": 100.0})
    assert "below raw pixels" in str(evaluate(run, "knn", k=20))


def test_images_without_labels_are_compared_by_their_views_and_it_says_what_that_cannot_tell(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos_of_patterns(tmp_path / "photos", "{i:02d}.png")
    run = pretrain(small(epochs=2, data__source=str(tmp_path / "photos")), tmp_path / "run")
    assert open_images(str(tmp_path / "photos")).labels is None
    rows = shown(run, capsys)
    assert list(rows) == ["raw pixels", "untrained encoder", "after pretraining"]
    before_after.show(run, terminal.console(width=100))
    assert "not whether it puts like with like" in re.sub(r"\s+", " ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("pixels_", "began", "after", "words"),
    [
        (46.7, None, 20.0, "worse than raw pixels"),
        (46.7, 75.0, 75.0, "the weights as they were do as well"),
        (46.7, 75.0, 90.0, "gained 15.0 points over where it began"),
        (46.7, 75.0, 50.0, "lost 25.0 points"),
        (30.0, None, 50.0, "gained 20.0 points over raw pixels"),
        (46.7, None, 47.0, "changed nothing that 60 images can show"),
    ],
)
def test_the_table_says_whether_the_run_was_worth_it(
    pixels_: float, began: float | None, after: float, words: str
) -> None:
    values = {"raw pixels": pixels_, "untrained encoder": 16.7}
    if began is not None:
        values["where it began"] = began
    assert words in before_after.verdict(values | {"after pretraining": after}, 60)
