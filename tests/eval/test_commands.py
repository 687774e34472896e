"""`adasim eval` as a person meets it: figures that the protocols' own functions give, and one sentence on errors."""

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from helpers import command, in_one_line, json_lines, refusal
from PIL import Image

from adasim.config import ModelConfig
from adasim.data import FolderImages, Unreadable, open_images, synthetic
from adasim.data.masks import open_masked
from adasim.eval import fewshot_accuracy, knn_accuracy
from adasim.eval.encoder import open_encoder
from adasim.eval.features import extract
from adasim.eval.splits import hold_out
from adasim.models import build_backbone, load_backbone
from adasim.models.io import snapshot_file
from adasim.models.transform import EvalTransform

pytestmark = pytest.mark.slow

MakeRun = Callable[..., Path]
TRANSFORM = EvalTransform.of_size(16, (0.5,) * 3, (0.25,) * 3)


def results(run: Path) -> list[dict[str, Any]]:
    return json_lines(run / "results.jsonl")


def folders(root: Path, counts: dict[str, int], size: int = 16, seed: int = 0) -> Path:
    """A folder of class folders; the images of a class share a brightness."""
    generator = np.random.default_rng(seed)
    for place, (name, count) in enumerate(sorted(counts.items())):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = generator.integers(0, 60, (size, size, 3)) + 45 * place
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{i:03}.png")
    return root


# What the commands measure


def test_knn_appends_what_the_function_gives_on_the_runs_own_data(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    command(f"eval knn {run}")
    train, test = (open_images("synthetic:320", size=16, split=split) for split in ("train", "test"))
    backbone = load_backbone(run)
    features = [extract(backbone, images, TRANSFORM) for images in (train, test)]
    wanted = knn_accuracy(features[0], train.labels, features[1], test.labels, k=(10, 20, 100, 200))
    [line] = results(run)
    for k, score in wanted.items():
        assert line["metrics"][f"top1_k{k}"] == pytest.approx(score.top1)
        assert line["metrics"][f"top5_k{k}"] == pytest.approx(score.top5)
    assert line["value"] == pytest.approx(wanted[20].top1)
    shown = capsys.readouterr().out
    assert all(f"{score.top1:.2f}" in shown for score in wanted.values())
    assert len(list((run / "features").iterdir())) == 2


def test_what_is_not_as_usual_has_a_column_of_its_own(make_run: MakeRun) -> None:
    run = make_run(source="synthetic:64")
    settings = {
        "linear RUN --epochs 90 --batch-size 64": "simsiam, quick, published rate",  # as usual
        "knn RUN --size 16": "k=20",  # its own
        "knn RUN --size 32": "k=20, size=32",
        "fewshot RUN --episodes 9 --queries 3": "5-way 5-shot, queries=3, episodes=9",
        "views RUN --queries 32": "top-1, queries=32",
        "segmentation RUN --size 32 --epochs 1 --lr 0.1 --blocks 2": "mIoU, quick, blocks=2, epochs=1, lr=0.1",
    }
    for line in settings:
        command(f"eval {line.replace('RUN', str(run))}")
    assert [line["setting"] for line in results(run)] == list(settings.values())
    assert results(run)[-1]["settings"]["batch_size"] == 64  # what was used


def test_fewshot_scores_the_named_data_sets_per_class(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    uneven = folders(tmp_path / "uneven", {**dict.fromkeys("abcd", 20), "rare": 7})
    even = folders(tmp_path / "even", dict.fromkeys("abcde", 20))
    line = f"eval fewshot {run} --data {uneven} {even} --episodes 20 --per-class"
    command(f"{line} uneven")
    assert [(line["data"]["name"], line["settings"]["per_class"]) for line in results(run)] == [
        ("uneven (per class)", True),
        ("even", False),
    ]
    command(line)
    assert [line["settings"]["per_class"] for line in results(run)[2:]] == [True, True]
    assert "--per-class odd is none of the data sets" in refusal(f"{line} odd", capsys)


def test_fewshot_pools_the_splits_and_prints_the_average_over_data_sets(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    data = tmp_path / "photos"
    folders(data / "train", {"a": 20, "b": 20, "c": 14, "d": 14, "e": 14})
    folders(data / "test", dict.fromkeys("cde", 4), seed=1)  # number 0 here is number 2 there
    folders(data / "val", dict.fromkeys("cde", 2), seed=2)
    command(f"eval fewshot {run} --data synthetic:320 {data} --episodes 50")
    first, second = results(run)
    assert (first["data"]["name"], second["data"]["name"]) == ("synthetic:320", "photos")
    assert second["data"]["images"] == 100  # twenty a class, as five shots and fifteen queries need
    images = [FolderImages(data / split) for split in ("train", "test", "val")]
    features = torch.cat([extract(load_backbone(run), part, TRANSFORM) for part in images])
    train, *others = [part.labels for part in images if part.labels is not None]
    labels = torch.cat([train, *(part + 2 for part in others)])
    wanted = fewshot_accuracy(features, labels, episodes=50)
    assert second["value"] == pytest.approx(wanted.mean)
    assert second["metrics"]["interval95"] == pytest.approx(wanted.interval95)
    average = (first["value"] + second["value"]) / 2
    shown = capsys.readouterr().out
    assert "average" in shown
    assert f"{average:.2f}" in shown
    assert "±" in shown


def masked(root: Path, count: int, value: int = 3, images: str = "images", masks: str = "masks") -> None:
    """Pairs of a picture and a mask: the left half is class 0 and dark, the right is bright."""
    for name in (images, masks):
        (root / name).mkdir(parents=True)
    generator = np.random.default_rng(0)
    mask = np.zeros((20, 24), np.uint8)
    mask[:, 12:] = value
    for i in range(count):
        pixels = generator.integers(0, 60, (20, 24, 3)) + 180 * (mask[:, :, None] > 0)
        Image.fromarray(pixels.astype(np.uint8)).save(root / images / f"{i}.jpg")
        Image.fromarray(mask).save(root / masks / f"{i}.png")


def camvid(root: Path) -> Path:
    """CamVid's layout: train/ and trainannot/, val/ and valannot/, test/ and testannot/; void is 11."""
    for name, count in (("train", 12), ("val", 3), ("test", 6)):
        masked(root, count, 2, name, f"{name}annot")
        for path in (root / f"{name}annot").iterdir():
            mask = np.array(Image.open(path))
            mask[:4] = 11
            Image.fromarray(mask).save(path)
    return root


def test_segmentation_reads_camvid_ignores_its_void_and_prints_each_class(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal: the bar is shown
    data = camvid(tmp_path / "camvid")
    asked = f"eval segmentation {run} --data {data} --epochs 4 --batch-size 4 --size 64 --ignore 11"
    command(asked)
    [line] = results(run)
    assert (line["data"]["train_images"], line["data"]["test_images"]) == (12, 6)
    assert line["settings"]["classes"] == 3
    assert line["metrics"]["miou_present_best"] > 80
    assert line["metrics"]["iou_best"][1] == 0  # an absent class counts 0
    assert line["value"] == pytest.approx(line["metrics"]["miou_present_best"] * 2 / 3)
    captured = capsys.readouterr()
    assert "camvid: 4 epochs" in captured.err
    shown = re.sub(r"\x1b\[[0-9;]*m", "", captured.out)
    for i, value in enumerate(line["metrics"]["iou_best"]):
        assert re.search(rf"^\s*{i}\s+{value:.2f}\s", shown, re.MULTILINE), shown
    command(f"{asked} 0 --classes 3")
    second = results(run)[1]
    assert second["settings"]["ignore"] == [11, 0]
    assert second["setting"] != line["setting"]  # no column of a table holds both
    assert second["value"] == pytest.approx(second["metrics"]["iou_best"][2] / 2)  # of classes 1 and 2


def test_segmentation_reads_pascal_voc_and_augments(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    masked(tmp_path / "VOC", 12, 20, "JPEGImages", "SegmentationClass")
    lists = tmp_path / "VOC" / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("\n".join(map(str, range(8))))
    (lists / "val.txt").write_text("8\n9\n10\n11\n")
    command(f"eval segmentation {run} --data {tmp_path / 'VOC'} --augmented --epochs 1")
    [line] = results(run)
    assert line["settings"]["classes"] == 21
    assert (line["data"]["train_images"], line["data"]["test_images"]) == (8, 4)
    more = tmp_path / "VOC" / "SegmentationClassAug"
    shutil.copytree(tmp_path / "VOC" / "SegmentationClass", more)
    (lists / "trainaug.txt").write_text("\n".join(map(str, range(7))))
    coloured = Image.open(more / "0.png").copy()
    coloured.putpalette([255 - i for i in range(256) for _ in range(3)])  # as VOC's: ids, shown in colours
    coloured.save(more / "0.png")
    images = open_masked(str(tmp_path / "VOC"), size=16, split="train")
    assert (images.name, len(images)) == ("VOC-trainaug", 7)
    mask = images.mask(0)
    assert mask is not None
    assert mask.unique().tolist() == [0, 20]


def test_masks_stand_in_folders_by_split_and_one_that_is_too_large_is_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked(tmp_path / "train", 2)
    masked(tmp_path / "val", 3)
    images, test = (open_masked(str(tmp_path), size=16, split=split) for split in ("train", "test"))
    assert (len(images), len(test)) == (2, 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # PIL refuses twice as many
    with pytest.raises(Unreadable, match="DecompressionBombError"):
        images.mask(0)


def test_a_random_encoder_is_measured_when_asked_for_and_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "random.jsonl"
    command(f"eval knn resnet_tiny --random-weights --size 16 --data synthetic:64 --k 5 --results {file}")
    command(f"eval table {file}")
    shown = capsys.readouterr().out
    assert "random weights" in shown
    assert "k=5" in shown
    assert len(list((tmp_path / "cache" / "adasim" / "features").iterdir())) == 2


def test_raw_pixels_are_a_model_for_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = str(folders(tmp_path / "photos", dict.fromkeys("ab", 30), size=32))
    command(f"eval knn pixels --data {data} --no-cache --results pixels.jsonl")
    assert json.loads(Path("pixels.jsonl").read_text())["model"]["name"] == "pixels"
    command(f"embed pixels --data {data} --out features.npz --no-cache")
    image = np.asarray(Image.open(f"{data}/a/000.png"), np.float32).transpose(2, 0, 1).ravel()
    found = np.load("features.npz")
    assert found["files"][0] == "a/000.png"
    assert np.allclose(found["features"][0], (image - image.mean()) / 127.5, atol=1e-5)
    command(f"similar pixels {data}/a/000.png --in {data} --no-picture --no-cache")
    for verb in ("explore", "gallery"):
        command(f"{verb} --backbone pixels --data {data} --no-cache --passes 1 --k 3")
    assert Path("explore.html").exists()
    assert "no weights to export" in refusal("export pixels --to timm", capsys)


def test_a_plain_file_of_weights_is_measured_under_its_models_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    net = timm.create_model("resnet18", num_classes=7)
    torch.save(net.state_dict(), tmp_path / "mine.pth")
    command(f"eval knn resnet18:{tmp_path / 'mine.pth'} --data synthetic:64 --size 32 --k 5 --no-cache")
    assert "of mine (weights of a file)" in in_one_line(capsys.readouterr().out)
    encoder = open_encoder(f"resnet18:{tmp_path / 'mine.pth'}", size=32)
    assert (encoder.usual_size, encoder.transform.size) == (224, 32)
    unsaid = build_backbone(ModelConfig(name="vit_mini"), 32, student=False)
    torch.save(unsaid.net.state_dict(), tmp_path / "vit.pth")
    note = open_encoder(f"vit_mini:{tmp_path / 'vit.pth'}").note
    assert note is not None
    assert "does not say how its images were normalised: ImageNet's" in note


def test_another_file_in_a_run_folder_gives_the_figures_of_the_run_and_is_not_the_run(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run, file = make_run(size=24), tmp_path / "copy.jsonl"
    copy = run / "epoch50.safetensors"
    copy.write_bytes((run / "backbone.safetensors").read_bytes())
    data = folders(tmp_path / "photos", dict.fromkeys("abc", 20), size=30)  # resized and cropped on the way
    command(f"eval knn {copy} --no-cache --data {data} --results {file}")
    assert not (run / "results.jsonl").exists()
    command(f"eval knn {run} --no-cache --data {data}")
    assert json_lines(file)[0]["metrics"] == results(run)[0]["metrics"]
    opened, its_own = open_encoder(str(copy)), open_encoder(str(run / "backbone.safetensors"))
    assert (opened.name, opened.run, its_own.run) == ("epoch50", None, run)
    wanted = EvalTransform.of_size(24, (0.5,) * 3, (0.25,) * 3)
    assert opened.transform == its_own.transform == wanted


def test_all_snapshots_are_measured_and_are_no_results_of_the_finished_run(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    assert "--save.encoder-every" in refusal(f"eval knn {run} --all-snapshots", capsys)
    (run / "encoders").mkdir()
    for epoch, seed in ((5, 1), (10000, 2)):
        other = make_run(f"other{seed}", seed=seed) / "backbone.safetensors"
        snapshot_file(run, epoch).write_bytes(other.read_bytes())
    command(f"eval knn {run} --all-snapshots --k 5")
    shown = capsys.readouterr().out
    measured = results(run)
    assert [line["model"]["epoch"] for line in measured] == [5, 10000]
    assert not (run / "features").exists()
    for line, seed in zip(measured, (1, 2), strict=True):
        epoch, value = line["model"]["epoch"], line["value"]
        assert re.search(rf"^\s*{epoch}\s+{value:.2f}\s*$", shown, re.MULTILINE)
        command(f"eval knn {run.parent}/other{seed} --k 5")
        assert results(run.parent / f"other{seed}")[0]["value"] == value
    assert "No results" in refusal(f"eval table {run}", capsys)
    last = open_encoder(str(snapshot_file(run, 10000)))
    assert (last.run, last.epoch, last.name) == (run, 10000, "run-epoch-10000")


# How images are divided and named


def test_classes_of_two_folders_are_matched_by_name(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    train = folders(tmp_path / "train", dict.fromkeys("abcd", 12))
    test = tmp_path / "some"
    (test / "d").mkdir(parents=True)  # number 0 here and 3 there
    for path in list((train / "d").iterdir())[:4]:
        (test / "d" / path.name).write_bytes(path.read_bytes())
    command(f"eval knn {run} --train {train} --test {test} --k 1")
    [line] = results(run)
    assert line["value"] == 100  # each is its own nearest neighbour


def test_the_held_out_fifth_is_fixed_and_has_no_class_to_itself() -> None:
    labels = torch.tensor([0] * 50 + [1] * 10 + [2] * 4)
    train, test = hold_out(labels, 64, seed=3)
    again = hold_out(labels, 64, seed=3)
    assert torch.equal(train, again[0])
    assert torch.equal(test, again[1])
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(64))
    assert labels[test].bincount(minlength=3).tolist() == [10, 2, 0]
    assert not torch.equal(test, hold_out(labels, 64, seed=4)[1])


# Bad input: one sentence, exit code 2


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory, make_run_in: MakeRun) -> Path:
    """Runs and many data sets that are not right."""
    tmp_path = tmp_path_factory.mktemp("bad")
    make_run_in(tmp_path)
    make_run_in(tmp_path, "vit", model="vit_mini")
    make_run_in(tmp_path, "fixed", model="vit_tiny_patch16_224", size=32)  # without dynamic_img_size
    folders(tmp_path / "train", {"cat": 12, "dog": 12})
    folders(tmp_path / "strange", {"dog": 3, "yak": 3})
    folders(tmp_path / "nested", {"animals/cat": 12, "animals/dog": 12})
    folders(tmp_path / "few", {**dict.fromkeys("abcd", 20), "rare": 7})
    folders(tmp_path / "plain", {"": 12})
    masked(tmp_path / "small", 6)
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "small" / "masks" / "2.png")
    masked(tmp_path / "known", 6)
    masked(tmp_path / "unknown", 6, value=7)
    masked(tmp_path / "colour", 6)
    Image.fromarray(np.zeros((20, 24, 3), np.uint8)).save(tmp_path / "colour" / "masks" / "0.png")
    masked(tmp_path / "lonely", 6)
    (tmp_path / "lonely" / "masks" / "4.png").unlink()
    masked(tmp_path / "damaged", 6)
    (tmp_path / "damaged" / "masks" / "3.png").write_bytes(b"no image")
    images = synthetic(20, 16)
    np.savez(tmp_path / "maskless.npz", images=images.images.numpy())
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("knn {}/run --data {}/plain", "plain has no labels"),
        ("knn {}/run --train {}/train --test {}/strange", "the class 'yak' that no training image has"),
        ("knn {}/run --train {}/nested --test {}/train", "such as 'cat', nest otherwise than"),
        ("knn {}/run --data {}/train --k 21", "k=21 is more than the 20 training images"),
        ("fewshot {}/run --data {}/few", "too few in 'rare' (7)"),
        ("segmentation {}/run --data {}/small", "images/2.jpg is 9 x 9 and its image 20 x 24"),
        ("segmentation {}/run --train {}/known --test {}/unknown", "id 7; this data set has classes 0 to 3"),
        ("segmentation {}/run --data {}/colour", "masks/0.png has RGB pixels"),
        ("segmentation {}/run --data {}/lonely", "no mask for 4.jpg"),
        ("segmentation {}/run --data {}/maskless.npz", "has no masks"),
        ("segmentation {}/run --data {}/known --ignore 0 3", "is ignored (255, 0, 3): nothing to learn"),
        ("segmentation {}/run --data {}/train", "needs the folders images and masks"),
        ("segmentation pixels --data {}/known", "pixels has no feature map"),
        ("knn {}/run --random-weights", "has weights of its own"),
        ("fewshot resnet_tiny --random-weights --size 16", "Which images?"),
        ("linear {}/run --quick --augmented", "--quick and --augmented exclude each other"),
        ("linear {}/run --flip 0", "--flip is for --augmented"),
        ("segmentation {}/run --flip 0", "--flip is for --augmented"),
        ("table {}/run", "No results in"),
        ("knn {}/vit --size 18 --data {}/train", "cannot look at images of 18 x 18 pixels (Input height"),
        ("segmentation {}/fixed", "cannot look at images of 64 x 64 pixels (Input height"),
        ("knn {}/vit --size 0 --data {}/train", "size=0 must be at least 1"),
        ("segmentation {}/run --data {}/damaged", "A mask cannot be read: {}/damaged/masks/3.png"),
        ("knn {}/run --device warp", "device=warp cannot be used here"),
    ],
)
def test_bad_input_gets_one_sentence(
    bad: Path, arguments: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(f"eval {arguments}".replace("{}", str(bad)), capsys)
    assert expected.replace("{}", str(bad)) in error


@pytest.mark.parametrize("words", ["Server disconnected\nTry again", ""])
def test_whatever_a_download_ends_with_is_a_sentence(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class NetworkError(Exception):
        """As those of httpx, of no narrower kind."""

    def broken(*args: object, **kwargs: object) -> None:
        raise NetworkError(words)

    monkeypatch.setattr("adasim.models.weights.no_long_wait", nullcontext)
    monkeypatch.setattr("timm.create_model", broken)
    error = refusal("eval knn resnet50 --data synthetic:64", capsys)
    assert f"cannot be fetched ({words.partition(chr(10))[0] or 'NetworkError'})" in error
    assert "NAME:FILE" in error


def test_unreadable_images_are_named(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    data = folders(tmp_path / "photos", {"a": 70, "b": 70})
    (data / "b" / "011.png").write_bytes(b"<html>")
    command(f"eval knn {run} --data {data}")
    assert "b/011.png" in capsys.readouterr().out.replace("\n", "")
    for seed in (0, 1):
        command(f"eval linear {run} --data {data} --augmented --epochs 1 --rates 1 --seed {seed}")
        assert 111 <= results(run)[-1]["settings"]["batch_size"] <= 112  # of those that are left
    (data / "a" / "003.png").write_bytes(b"")
    assert "2 of the 140 images" in refusal(f"eval knn {run} --data {data}", capsys)


def test_the_images_of_both_splits_are_said(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, photos = make_run(), tmp_path / "photos"
    for split, count in (("train", 30), ("test", 6)):
        folders(photos / split, {"a": count, "b": count})
    os.mkfifo(photos / "train" / "a" / "x.png")  # is not waited for
    command(f"eval knn {run} --data {photos}")
    said = capsys.readouterr().out
    assert f"60 images in 2 classes (a, b) from {photos}/train (its split train). Left out: 1 pipe" in said
    assert f"12 images in 2 classes (a, b) from {photos}/test (its split test)." in said
    command(f"eval fewshot {run} --data {photos} --ways 2 --episodes 5")
    assert "60 images in 2 classes" in capsys.readouterr().out
