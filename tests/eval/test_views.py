"""What is measured without labels agrees with plain loops over the definitions."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import photos_of_patterns, refusal
from torch.nn.functional import cosine_similarity

import adasim
from adasim.cli.main import main
from adasim.eval.views import mean_similarity, view_retrieval


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


def test_the_mean_similarity_is_that_of_all_pairs() -> None:
    features = torch.randn(60, 6) + 0.5
    scores = cosine_similarity(features[:, None], features[None], dim=2)
    assert mean_similarity(features) == pytest.approx(float(scores[torch.ones(60, 60).triu(1).bool()].mean()))


def test_unlabelled_photos_are_offered_what_works_without_labels(
    make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, photos = make_run(), tmp_path / "photos"
    photos_of_patterns(photos, "{i:02d}.png")
    message = refusal(["eval", "knn", str(run), "--data", str(photos)], capsys)
    assert "has no labels" in message
    assert "adasim eval views" in message
    main(["eval", "views", str(run), "--data", str(photos), "--workers", "0"])
    (result,) = adasim.load_run(run).results
    assert result.protocol == "views"
    assert 1 <= result.metrics["rankme"] <= 48
    assert 100 / 48 < result.value <= result.metrics["top5"]
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
