"""What is measured without labels agrees with plain loops over the definitions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import photos_of_patterns, refusal
from torch.nn.functional import cosine_similarity

import adasim
from adasim.cli.main import main
from adasim.eval.protocols.unlabelled import near_duplicates, view_retrieval


def test_retrieval_is_that_of_a_loop() -> None:
    images, own = torch.randn(40, 6), torch.randint(0, 40, (25,))
    views = images[own] + torch.randn(25, 6)
    first = five = 0
    for view, i in zip(views, own.tolist(), strict=True):
        order = cosine_similarity(view[None], images).argsort(descending=True).tolist()
        first += order[0] == i
        five += i in order[:5]
    assert 0 < first < five < 25  # it could be anything
    assert view_retrieval(views, images, own) == pytest.approx((4 * first, 4 * five))


def test_each_near_duplicate_pair_is_counted_once() -> None:
    features = torch.randn(1500, 16)  # more than are compared at a time
    features[1400], features[7], features[9] = 2 * features[3], features[1] + 0.01, features[8] + 0.05
    wanted = torch.ones(1500, 1500).triu(1).bool()
    scores = cosine_similarity(features[:, None], features[None], dim=2)
    found = near_duplicates(features, 0.9)
    assert found.pairs == int((wanted & (scores >= 0.9)).sum()) >= 3
    assert found.nearest[0][:2] == (3, 1400)
    assert found.mean == pytest.approx(float(scores[wanted].double().mean()), abs=1e-5)


def test_unlabelled_photos_are_offered_what_works_without_labels(
    make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, photos = make_run(), tmp_path / "photos"
    paths = photos_of_patterns(photos, "{i:02d}.png")
    (photos / "copy.png").write_bytes(paths[0].read_bytes())
    message = refusal(["eval", "knn", str(run), "--data", str(photos)], capsys)
    assert "has no labels" in message
    assert "adasim eval views" in message
    main(["eval", "views", str(run), "--data", str(photos), "--workers", "0", "--duplicate", "0.999999"])
    said = capsys.readouterr().out
    assert f"{photos}/00.png and {photos}/copy.png" in said
    (result,) = adasim.load_run(run).results
    assert result.protocol == "views"
    assert result.metrics["duplicate_pairs"] >= 1
    assert 1 <= result.metrics["rankme"] <= 49
    assert 100 / 49 < result.value <= result.metrics["top5"]
    main(["eval", "table", str(run)])
    assert "own views" in capsys.readouterr().out


def test_views_of_images_in_memory_are_the_same_twice_and_others_with_another_seed(
    make_run: Callable[..., Path],
) -> None:
    run = make_run(source="synthetic:100")
    reports = [adasim.evaluate(run, "views", seed=seed, save=False, workers=0) for seed in (0, 0, 1)]
    first, again, other = (report.metrics for report in reports)
    assert first == again
    assert first["rankme"] == pytest.approx(other["rankme"])
    assert reports[0].results[0].settings["queries"] == 100
    few = adasim.evaluate(run, "views", queries=10, save=False, workers=0)
    assert few.results[0].settings["queries"] == 10
