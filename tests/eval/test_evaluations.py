"""Evaluations are found by their names, built in or one's own, and give in Python what the command line prints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import command, json_lines, refusal
from torch.utils.data import TensorDataset

import adasim
from adasim.data import ArrayImages, open_images, synthetic
from adasim.data.images import match_classes
from adasim.eval.encoder import open_encoder
from adasim.eval.features import cached_features, extract
from adasim.eval.fewshot import Fewshot
from adasim.eval.segmentation import _PUBLISHED, Segmentation
from adasim.eval.splits import Split, match_test_labels, open_all, open_split
from adasim.registry import EVALUATIONS
from adasim.util.errors import UserError

MakeRun = Callable[..., Path]
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_evaluation.py"


def kept(run: Path) -> list[dict[str, Any]]:
    """The lines of results.jsonl, without the dates."""
    lines = json_lines(run / "results.jsonl")
    return [{name: value for name, value in line.items() if name != "date"} for line in lines]


# From Python


@pytest.mark.parametrize(
    ("name", "words", "options"),
    [
        ("knn", "--k 5 20", {"k": (5, 20)}),
        ("linear", "--epochs 2 --rates 0.1 1", {"epochs": 2, "rates": [0.1, 1]}),
        ("fewshot", "--episodes 9 --data synthetic:320", {"episodes": 9, "data": "synthetic:320"}),
        ("segmentation", "--epochs 1 --size 16", {"epochs": 1, "size": 16}),
    ],
)
def test_python_gives_what_the_command_line_prints_and_keeps_it(
    make_run: MakeRun, name: str, words: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(source="synthetic:64" if name == "segmentation" else "synthetic:320")
    command(f"eval {name} {run} {words}")
    printed = capsys.readouterr().out
    report = adasim.evaluate(run, name, **options)
    first, second = kept(run)
    assert first == second
    assert report.value == first["value"]
    assert report.metrics == first["metrics"]
    assert str(report).split() == printed.split()
    assert capsys.readouterr().out == ""  # nothing is printed unless asked for
    adasim.evaluate(run, name, **options, save=False)
    assert len(kept(run)) == 2


def test_a_report_outlives_a_results_file_that_cannot_be_written(make_run: MakeRun) -> None:
    run = make_run(source="synthetic:64")
    (run / "results.jsonl").mkdir()
    with pytest.warns(UserWarning, match="could not be written"):
        report = adasim.evaluate(run, "knn", k=5)
    assert report.metrics["top1_k5"] > 0


def test_a_file_and_an_encoder_in_memory_are_measured_too(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    wanted = adasim.evaluate(run, "knn", data="synthetic:320")
    of_file = adasim.evaluate(run / "backbone.safetensors", "knn", data="synthetic:320", save=False)
    encoder = adasim.load_backbone(run).train()
    options = {"data": "synthetic:320", "no_cache": True}
    loaded = adasim.evaluate(encoder, "knn", **options, results=str(tmp_path / "loaded.jsonl"))
    assert wanted.metrics == of_file.metrics == loaded.metrics
    assert encoder.training
    assert json.loads((tmp_path / "loaded.jsonl").read_text())["metrics"] == wanted.metrics
    assert len(kept(run)) == 1


def test_images_may_be_handed_over_or_named_by_a_path(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    train, test = (open_images("synthetic:320", size=16, split=split) for split in ("train", "test"))
    wanted = adasim.evaluate(run, "knn", save=False)
    assert adasim.evaluate(run, "knn", train=train, test=test, save=False).metrics == wanted.metrics
    fewshot = adasim.evaluate(run, "fewshot", data=test, episodes=5, ways=2, per_class=())
    assert fewshot.results[0].data["images"] == len(test)
    assert train.labels is not None
    array = train.as_array()
    assert array is not None
    held_out = adasim.evaluate(run, "knn", data=TensorDataset(array, train.labels), k=5, save=False)
    assert held_out.results[0].data["train_images"] + held_out.results[0].data["test_images"] == 320
    np.savez(tmp_path / "some.npz", images=array.numpy(), labels=train.labels.numpy())
    of_file = adasim.evaluate(run, "knn", data=tmp_path / "some.npz", k=5, save=False)
    assert of_file.metrics == held_out.metrics
    divided = adasim.evaluate(run, "segmentation", data=train, epochs=1)
    assert divided.results[0].data["test_images"] == 64
    assert "64 of the 320 images are held out" in " ".join(divided.said)


def test_what_is_not_known_gets_a_sentence_with_the_nearest_name(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    with pytest.raises(UserError, match="Did you mean knn"):
        adasim.evaluate(run, "kn")
    with pytest.raises(UserError, match=r"no option 'seeds'.* seed"):
        adasim.evaluate(run, "knn", seeds=1)
    with pytest.raises(UserError, match="ResNet is no encoder"):
        adasim.evaluate(adasim.load_backbone(run).net, "knn")
    assert not (run / "results.jsonl").exists()
    assert "Did you mean table?" in refusal("eval tabel", capsys)
    assert "Give the path of a Python file" in refusal("eval --plugin", capsys)


# One's own


@pytest.fixture
def without_plugins() -> Any:
    """What a test registers is forgotten at its end."""
    names = set(EVALUATIONS.names())
    yield
    for name in set(EVALUATIONS.names()) - names:
        del EVALUATIONS._things[name]


def effective_rank(run: Path, source: str) -> float:
    features = extract(adasim.load_backbone(run), open_images(source, size=16), open_encoder(run).transform)
    sizes = np.linalg.svd(features.double().numpy(), compute_uv=False)
    shares = sizes / sizes.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def test_an_evaluation_of_ones_own_is_one_file_for_the_command_line_and_for_python(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], without_plugins: None
) -> None:
    run = make_run()
    with pytest.raises(UserError, match="Unknown evaluation 'rankme'"):
        adasim.evaluate(run, "rankme")
    command(f"eval --plugin {EXAMPLE} rankme {run}")
    wanted = effective_rank(run, "synthetic:320")
    [line] = kept(run)
    assert line["protocol"] == "rankme"
    assert line["value"] == pytest.approx(wanted, rel=1e-6)
    assert f"{wanted:.1f}" in capsys.readouterr().out
    command(f"eval table {run} --format markdown")
    assert "| run | rankme, 320 images, " in capsys.readouterr().out
    command(f"eval --plugin={EXAMPLE}")
    assert "Effective rank of the features" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command(f"eval rankme --help --plugin {EXAMPLE}")
    shown = capsys.readouterr().out
    assert "How many of them at most" in shown
    assert "--device" in shown
    report = adasim.evaluate(run, "rankme", data="synthetic:100")
    assert report.value == pytest.approx(effective_rank(run, "synthetic:100"), rel=1e-6)
    assert "effective rank" in str(report)
    assert adasim.evaluate(run, "rankme", images=10, save=False).value < 10


def test_the_document_shows_the_example_as_it_is() -> None:
    assert f"```python\n{EXAMPLE.read_text()}```" in (ROOT / "docs" / "extending.md").read_text()


# The linear protocol is the method's


def test_a_run_of_a_method_that_is_not_loaded_is_measured_by_dinos_protocol_and_that_is_said(
    make_run: MakeRun,
) -> None:
    run = make_run(method="simsiam")
    config = json.loads((run / "config.json").read_text())
    config["nova"] = config.pop("simsiam") | {"power": 3}
    (run / "config.json").write_text(json.dumps(config | {"method": "nova"}))
    report = adasim.evaluate(run, "linear", epochs=1)
    assert report.results[0].setting.startswith("dino, quick, ")
    assert report.results[0].model["origin"] == "nova, adasim pairs"
    assert "The method nova of this run is not known here" in report.said[0]
    assert "--plugin" in report.said[0]
    report = adasim.evaluate(run, "linear", epochs=1, protocol="simsiam")
    assert not any("nova" in sentence for sentence in report.said)
    config["data"]["source"] = 3  # damaged, and no plug-in's affair
    (run / "config.json").write_text(json.dumps({**config, "method": "dino"}))
    with pytest.raises(UserError, match=r"config\.json"):
        adasim.evaluate(run, "linear", epochs=1)


def test_masks_and_labels_are_divided_by_one_function(tmp_path: Path) -> None:
    images = open_images("synthetic:40", size=16)
    masks = torch.stack([images.mask(i) for i in range(40)])  # type: ignore[misc]
    np.savez(tmp_path / "unlabelled.npz", images=images.as_array().numpy(), masks=masks.numpy())  # type: ignore[union-attr]
    source = str(tmp_path / "unlabelled.npz")
    split = open_split(source, None, None, size=16, masks=True)
    assert (len(split.train_ids), len(split.test_ids)) == (32, 8)
    assert "8 of the 40 images are held out" in split.sentences()[-1]
    with pytest.raises(UserError, match="has no labels"):
        open_split(source, None, None, size=16)
    with pytest.raises(UserError, match="needs --train or --data"):
        open_split(None, None, source, size=16, masks=True)


def test_a_test_split_that_is_broken_is_not_replaced_by_held_out_images(tmp_path: Path) -> None:
    images, labels = synthetic(40, 16).images.numpy(), np.arange(40) % 4
    arrays = {"x_train": images, "y_train": labels}
    source = str(tmp_path / "data.npz")
    for broken in ({"x_test": images / 255}, {"x_test": images, "y_test": labels[:5]}):
        np.savez(source, **arrays, **broken)  # type: ignore[arg-type]
        for measure in (
            lambda: open_split(source, None, None, size=16),
            lambda: open_split("synthetic:40", None, source, size=16),
            lambda: open_all(source, size=16),
        ):
            with pytest.raises(UserError, match="npz"):
                measure()
    np.savez(source, **arrays)  # type: ignore[arg-type]  # without one
    assert len(open_split(source, None, None, size=16).test_ids) == 8
    assert len(open_all(source, size=16)) == 1


def test_a_missing_label_is_never_taken_for_the_last_class() -> None:
    assert match_classes(torch.tensor([-1, 0, 1]), ["x", "y"], ["y", "z"]).tolist() == [-1, -1, 0]
    assert match_classes(torch.tensor([-1, 0, 1]), ["x", "x"], ["x", "x"]).tolist() == [-1, 0, 1]
    labels = torch.tensor([0, 1, -1])
    images = ArrayImages("few", torch.zeros(3, 3, 8, 8, dtype=torch.uint8), labels)
    split = Split("few", images, images, torch.arange(3), torch.arange(3))
    with pytest.raises(UserError, match="1 of the 3 test images of few have no label"):
        match_test_labels(split, labels, torch.tensor([0, 1]))


def test_each_evaluation_looks_at_the_published_features_of_the_published_view(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = set()

    def noted(folder: Any, backbone: Any, images: Any, transform: Any, **rest: Any) -> Any:
        asked.add((rest["kind"], transform.interpolation, transform.squash))
        return cached_features(folder, backbone, images, transform, **rest)

    monkeypatch.setattr("adasim.eval.evaluation.cached_features", noted)
    run = make_run(model="vit_mini", method="dino")
    wanted: list[tuple[str, dict[str, Any], Any]] = [
        ("knn", {}, ("pooled", "bicubic", False)),
        ("linear", {"protocol": "dino", "epochs": 1}, ("linear-dino", "bicubic", False)),
        ("linear", {"protocol": "simsiam", "epochs": 1}, ("pooled", "bilinear", False)),
        ("fewshot", {"episodes": 2}, ("pooled", "bilinear", True)),
    ]
    for name, options, seen in wanted:
        asked.clear()
        adasim.evaluate(run, name, **options, save=False)
        assert asked == {seen}, name


def test_published_settings() -> None:
    assert (tuple(_PUBLISHED), Segmentation.blocks) == ((60, 16, 0.1), 4)
    assert (Fewshot.ways, Fewshot.shots, Fewshot.queries, Fewshot.episodes) == (5, 5, 15, 600)
