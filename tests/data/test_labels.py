"""Labels of other people's data sets: torchvision's in their official layouts, joined ones, Hugging Face's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset
from torchvision import datasets as tv

from adasim.data import ImageSet, as_images, check_same_data, describe, open_images, record

from .pictures import smooth


def pictures(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 7), (40, 0, 0)).save(root / name)
    return root


def text(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def aircraft(root: Path) -> Any:
    data = root / "fgvc-aircraft-2013b" / "data"
    pictures(data / "images", "07.jpg", "08.jpg", "09.jpg")
    text(data / "variants.txt", "707-320", "A300B4")
    text(data / "images_variant_train.txt", "07 A300B4", "08 707-320", "09 A300B4")
    return tv.FGVCAircraft(root, split="train")


def caltech(root: Path) -> Any:
    images = root / "caltech101" / "101_ObjectCategories"
    pictures(images, "ant/image_0001.jpg", "ant/image_0002.jpg", "bee/image_0001.jpg")
    (images / "BACKGROUND_Google").mkdir()
    return tv.Caltech101(root)


def cars(root: Path) -> Any:
    base = pictures(root / "stanford_cars", "cars_train/1.jpg", "cars_train/2.jpg", "cars_train/3.jpg")
    (base / "devkit").mkdir()
    names = np.array(["Acura", "BMW"], dtype=object)
    savemat(base / "devkit" / "cars_meta.mat", {"class_names": names})
    rows = [("1.jpg", np.uint8(2)), ("2.jpg", np.uint8(1)), ("3.jpg", np.uint8(2))]
    kind = [("fname", object), ("class", object)]
    savemat(base / "devkit" / "cars_train_annos.mat", {"annotations": np.array(rows, dtype=kind)})
    return tv.StanfordCars(root)


def dtd(root: Path) -> Any:
    names = ("banded/1.jpg", "lined/2.jpg", "banded/3.jpg")
    pictures(root / "dtd" / "dtd" / "images", *names)
    text(root / "dtd" / "dtd" / "labels" / "train1.txt", *names)
    return tv.DTD(root)


def flowers(root: Path) -> Any:
    base = pictures(root / "flowers-102", *(f"jpg/image_0000{i}.jpg" for i in (1, 2, 3)))
    savemat(base / "imagelabels.mat", {"labels": np.array([2, 1, 2])})
    savemat(base / "setid.mat", {"trnid": np.array([1, 2, 3])})
    return tv.Flowers102(root)


def food(root: Path) -> Any:
    base = pictures(root / "food-101", "images/pie/1.jpg", "images/cake/2.jpg", "images/pie/3.jpg")
    text(base / "meta" / "train.json", json.dumps({"pie": ["pie/1", "pie/3"], "cake": ["cake/2"]}))
    return tv.Food101(root)


def gtsrb(root: Path) -> Any:
    pictures(root / "gtsrb" / "GTSRB" / "Training", "00000/1.ppm", "00001/2.ppm", "00001/3.ppm")
    return tv.GTSRB(root)


def naturalist(root: Path) -> Any:
    kinds = [f"0000{c}_Animalia_a_b_c_d_e_{name}" for c, name in enumerate(("ant", "bee"))]
    pictures(root / "2021_train_mini", f"{kinds[0]}/1.jpg", f"{kinds[1]}/2.jpg", f"{kinds[1]}/3.jpg")
    return tv.INaturalist(root, version="2021_train_mini")


def pets(root: Path) -> Any:
    base = pictures(
        root / "oxford-iiit-pet", "images/Abyssinian_1.jpg", "images/pug_2.jpg", "images/pug_3.jpg"
    )
    text(base / "annotations" / "trainval.txt", "Abyssinian_1 1 1 1", "pug_2 2 2 1", "pug_3 2 2 1")
    return tv.OxfordIIITPet(root)


def sun(root: Path) -> Any:
    base = pictures(root / "SUN397", "a/abbey/sun_1.jpg", "a/abbey/sun_2.jpg", "o/office/home/sun_3.jpg")
    text(base / "ClassName.txt", "/a/abbey", "/o/office/home")
    return tv.SUN397(root)


def labels_of(images: ImageSet) -> list[int] | None:
    return None if images.labels is None else images.labels.tolist()


LAYOUTS: dict[Callable[[Path], Any], list[str]] = {
    aircraft: ["707-320", "A300B4"],
    caltech: ["ant", "bee"],
    cars: ["Acura", "BMW"],
    dtd: ["banded", "lined"],
    flowers: tv.Flowers102.classes,
    food: ["cake", "pie"],
    gtsrb: ["0", "1"],
    naturalist: ["00000_Animalia_a_b_c_d_e_ant", "00001_Animalia_a_b_c_d_e_bee"],
    pets: ["Abyssinian", "Pug"],
    sun: ["abbey", "office/home"],
}


@pytest.mark.parametrize("make", LAYOUTS, ids=lambda make: make.__name__)
def test_torchvisions_sets_have_the_labels_of_their_items(
    make: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchvision.datasets.flowers102.check_integrity", lambda file, md5: True)
    data = make(tmp_path)
    images = as_images(data)
    assert labels_of(images) == [int(data[i][1]) for i in range(3)]
    assert images.classes == LAYOUTS[make]


class Named(Dataset[Any]):
    """(image, label), with the labels in a list of any name."""

    def __init__(self, labels: list[Any], classes: list[str] | None = None, name: str = "targets") -> None:
        self.items = list(labels)
        setattr(self, name, labels)
        if classes is not None:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return torch.full((3, 4, 4), i, dtype=torch.uint8), self.items[i]


def test_a_private_list_is_taken_for_the_labels_only_where_items_agree_with_it() -> None:
    for name in ("_labels", "y"):
        data = Named([2, 0, 1, 1], name=name)
        assert labels_of(as_images(data)) == [2, 0, 1, 1]
        data.items = ["a", "b", "c", "d"]  # nothing to compare with
        assert labels_of(as_images(data)) is None
    renumbered = Named([0, 1, 1, 0])
    renumbered.items = [0, 1, 0, 1]  # only the third shows it
    assert labels_of(as_images(renumbered)) is None
    assert labels_of(as_images(Named([1, -1, 0, -1]))) == [1, -1, 0, -1]  # -1 is no label, as in STL10


def test_joined_data_sets_have_the_labels_of_their_parts_by_name() -> None:
    pets, zoo = Named([0, 1, 1], ["cat", "dog"]), Named([1, 0], ["emu", "cat"])
    both = as_images(ConcatDataset([pets, ConcatDataset([Subset(zoo, [1]), Subset(pets, [2, 0])]), zoo]))
    assert both.classes == ["cat", "dog", "emu"]
    assert labels_of(both) == [0, 1, 1, 2, 1, 0, 0, 2]
    numbered: Dataset[Any] = ConcatDataset(
        [Named([0, 2]), TensorDataset(smooth(2, 4, 4), torch.tensor([1, 0])), zoo]
    )
    assert labels_of(as_images(numbered)) == [0, 2, 1, 0, 1, 0]
    assert as_images(numbered).classes == ["0", "1", "2"]
    assert labels_of(as_images(ConcatDataset([pets, Named(["a"])]))) is None  # one part has none


def test_a_run_that_began_without_labels_goes_on_where_they_are_known_by_now() -> None:
    images = as_images(Named([0, 1, 1, 0], name="_labels"))
    saved = {**record(images), "labels": ""}
    assert "contents of 4 of 4 images agree" in check_same_data(saved, images)


@pytest.mark.parametrize(
    ("values", "labels", "classes"),
    [
        (["dog", "cat", None, "dog"], [1, 0, -1, 1], ["cat", "dog"]),
        ([3, 0, -1, 1], [3, 0, -1, 1], ["0", "1", "2", "3"]),
        ([1995, 2021, 10**6, 1995], [0, 1, 2, 0], ["1995", "2021", "1000000"]),
        ([None] * 4, None, []),
    ],
    ids=["words", "numbers", "great numbers", "hidden"],
)
def test_hugging_face_rows_have_labels_of_words_and_numbers_on_disk_and_in_python(
    tmp_path: Path, values: list[Any], labels: list[int] | None, classes: list[str]
) -> None:
    hub = pytest.importorskip("datasets")
    pixels = smooth(4, 9, 11)
    shown = [Image.fromarray(p.permute(1, 2, 0).numpy()) for p in pixels]
    kinds = {"caption": hub.Value("string"), "image": hub.Image(), "Label": hub.Value("string")}
    if not any(isinstance(value, str) for value in values):
        kinds["Label"] = hub.Value("int64")
    columns = {"caption": ["a", "b", "c", "d"], "image": shown, "Label": values}
    rows = hub.Dataset.from_dict(columns, features=hub.Features(kinds))
    rows.save_to_disk(tmp_path / "rows")
    order = [2, 0, 3, 1]
    part = as_images(Subset(rows, order))
    for images in (open_images(f"hf:{tmp_path / 'rows'}"), as_images(rows.with_format("torch"))):
        assert labels_of(images) == labels
        assert images.classes == classes
        assert torch.equal(images.load(1), pixels[1])
    assert labels_of(part) == (None if labels is None else [labels[i] for i in order])
    assert torch.equal(part.load(1), pixels[0])
    assert describe(as_images(rows)).endswith(" from a Dataset in Python.")
