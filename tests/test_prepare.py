"""The paper's data sets from their official layouts, made small: every image once, by class, and masks."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from adasim.data import open_images
from adasim.data.masks import open_masked
from adasim.util.errors import UserError


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    return importlib.import_module("benchmarks.paper.prepare")


def picture(path: Path, shade: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 7), (shade, 0, 0)).save(path)


def text(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def aircraft(root: Path) -> None:
    data = root / "fgvc-aircraft-2013b" / "data"
    for split, number, variant in (("train", 7, "707-320"), ("val", 8, "A300B4"), ("test", 9, "707-320")):
        picture(data / "images" / f"000{number}.jpg")
        text(data / f"images_variant_{split}.txt", f"000{number} {variant}")


def in_folders(*names: str) -> Any:
    def make(root: Path) -> None:
        for name, count in (("a", 2), ("b", 1)):
            for number in range(count):
                picture(root.joinpath(*names) / name / f"{number}.jpg")

    return make


def cars(root: Path) -> None:
    names = np.array(["Acura Integra", "BMW 1/2"], dtype=object)
    (root / "devkit").mkdir(parents=True)
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": names})
    kind = [("fname", object), ("class", object)]
    train = np.array([("00001.jpg", 2), ("00002.jpg", 1)], dtype=kind)
    savemat(root / "devkit" / "cars_train_annos.mat", {"annotations": train})
    savemat(
        root / "cars_test_annos_withlabels.mat", {"annotations": np.array([("00001.jpg", 2)], dtype=kind)}
    )
    for file in ("cars_train/00001.jpg", "cars_train/00002.jpg", "cars_test/00001.jpg"):
        picture(root / file)


def flowers(root: Path) -> None:
    for number in (1, 2, 3):
        picture(root / "flowers-102" / "jpg" / f"image_0000{number}.jpg")
    savemat(root / "flowers-102" / "imagelabels.mat", {"labels": np.array([77, 5, 77])})


def pets(root: Path) -> None:
    text(root / "annotations" / "trainval.txt", "Abyssinian_1 1 1 1", "american_bulldog_2 2 2 1")
    text(root / "annotations" / "test.txt", "Abyssinian_3 1 1 1")
    for name in ("Abyssinian_1", "american_bulldog_2", "Abyssinian_3"):
        picture(root / "images" / f"{name}.jpg")


def sun397(root: Path) -> None:
    for name in ("a/abbey/sun_1", "a/abbey/sun_2", "a/abbey/sun_9", "o/office/home/sun_3"):
        picture(root / "SUN397" / f"{name}.jpg")
    text(root / "Partitions" / "Training_01.txt", "/a/abbey/sun_1.jpg", "/a/abbey/sun_1.jpg")
    text(root / "Partitions" / "Testing_01.txt", "/a/abbey/sun_2.jpg", "/o/office/home/sun_3.jpg")


LAYOUTS: dict[str, tuple[Any, dict[str, int]]] = {
    "aircraft": (aircraft, {"707-320": 2, "A300B4": 1}),
    "caltech101": (in_folders("caltech101", "101_ObjectCategories"), {"a": 2, "b": 1}),
    "cars": (cars, {"Acura Integra": 1, "BMW 1-2": 2}),
    "dtd": (in_folders("dtd", "images"), {"a": 2, "b": 1}),
    "flowers": (flowers, {"005": 1, "077": 2}),
    "food101": (in_folders("food-101", "images"), {"a": 2, "b": 1}),
    "pets": (pets, {"Abyssinian": 2, "american_bulldog": 1}),
    "sun397": (sun397, {"abbey": 2, "office-home": 1}),  # of split 01, each file once
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_splits_of_a_few_shot_set_become_folders_by_class(
    prepare: Any, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, expected = LAYOUTS[name]
    make(tmp_path / "downloads")
    prepare.prepare(name, tmp_path / "downloads", tmp_path / "made")
    images = open_images(str(tmp_path / "made"))
    assert images.labels is not None
    counts = dict(zip(images.classes, images.labels.bincount().tolist(), strict=True))
    assert counts == expected
    assert "The published set has" in capsys.readouterr().out  # which this is not
    assert set(LAYOUTS) == set(prepare.CLASSES)


def test_voc_is_joined_with_the_masks_of_sbd_and_without_its_own_val(prepare: Any, tmp_path: Path) -> None:
    root, lists = tmp_path / "VOCdevkit" / "VOC2012", "ImageSets/Segmentation"
    text(root / lists / "train.txt", "t")
    text(root / lists / "val.txt", "v")
    for stem in ("t", "v", "extra"):
        picture(root / "JPEGImages" / f"{stem}.jpg")
    (root / "SegmentationClass").mkdir()
    for stem in ("t", "v"):
        Image.fromarray(np.full((7, 9), 3, np.uint8)).save(root / "SegmentationClass" / f"{stem}.png")
    sbd = tmp_path / "benchmark_RELEASE" / "dataset"
    text(sbd / "train.txt", "extra", "v")
    text(sbd / "val.txt", "t")
    (sbd / "cls").mkdir()
    mask = np.zeros((7, 9), np.uint8)
    mask[0] = 15
    savemat(sbd / "cls" / "extra.mat", {"GTcls": {"Segmentation": mask}})
    prepare.prepare("voc", tmp_path, tmp_path / "made")
    made = str(tmp_path / "made")
    train, val = (open_masked(made, size=32, split=split) for split in ("train", "test"))
    assert [Path(train.where(i)).stem for i in range(len(train))] == ["extra", "t"]
    assert np.array_equal(np.asarray(train.mask(0)), mask)
    assert [Path(val.where(i)).stem for i in range(len(val))] == ["v"]


@pytest.mark.parametrize(("kind", "expected"), [("things", [0, 1, 255, 255]), ("stuff", [255, 255, 0, 1])])
def test_coco_is_told_by_its_coarse_classes(
    prepare: Any, tmp_path: Path, kind: str, expected: list[int]
) -> None:
    things = [(1, "person"), (2, "vehicle"), (3, "vehicle")]
    stuff = [(92, "textile"), (93, "textile"), (94, "plant"), (183, "other")]
    for name, rows in (("instances", things), ("stuff", stuff)):
        categories = [{"id": number, "supercategory": coarse} for number, coarse in rows]
        text(tmp_path / "annotations" / f"{name}_val2017.json", json.dumps({"categories": categories}))
    for split, count in (("train", 10), ("val", 1)):
        masks = tmp_path / "stuffthingmaps" / f"{split}2017"
        masks.mkdir(parents=True)
        for number in range(count):
            picture(tmp_path / f"{split}2017" / f"{number:012d}.jpg")
            values = np.resize(np.array([0, 2, 92, 93], np.uint8), (7, 9))  # ids 1, 3, 93, 94
            values[-1] = 255
            Image.fromarray(values).save(masks / f"{number:012d}.png")
    prepare.prepare(f"coco-{kind}", tmp_path, tmp_path / "made", share=0.3)
    train, val = (open_masked(str(tmp_path / "made"), size=32, split=split) for split in ("train", "test"))
    assert (len(train), len(val)) == (3, 1)
    mask = val.mask(0)
    assert mask is not None
    assert mask[0, :4].tolist() == expected
    assert mask[-1].unique().tolist() == [255]


def test_what_is_missing_and_what_would_be_overwritten_is_a_sentence(prepare: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no fgvc-aircraft-2013b in"):
        prepare.prepare("aircraft", tmp_path, tmp_path / "made")
    aircraft(tmp_path)
    (tmp_path / "fgvc-aircraft-2013b/data/images/0009.jpg").unlink()
    with pytest.raises(UserError, match=r"0009\.jpg is missing"):
        prepare.prepare("aircraft", tmp_path, tmp_path / "made")
    with pytest.raises(UserError, match="not empty"):
        prepare.prepare("pets", tmp_path, tmp_path / "made")
