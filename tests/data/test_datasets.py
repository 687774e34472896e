"""Tensors, arrays and data sets of other libraries become one kind of thing, with their labels."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset
from torchvision import datasets as tv

from adasim.config import ViewsConfig
from adasim.data import (
    ImagesLike,
    PairLoader,
    as_images,
    check_same_data,
    describe,
    open_images,
    record,
    synthetic,
)
from adasim.util.errors import MissingSplitError, UserError

from .pictures import labels_of, picture, smooth

PIXELS = smooth(20, 12, 10)
GREY = smooth(20, 12, 10, channels=1)


class Items(Dataset[Any]):
    """Items made by a function of their number."""

    def __init__(self, make: Callable[[int], Any], count: int = 20) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


class Named(Dataset[Any]):
    """(image, label) as torchvision's data sets are, with the labels in a list of any name."""

    def __init__(self, labels: list[Any], classes: Any = None, name: str = "targets") -> None:
        self.items = list(labels)
        setattr(self, name, labels)
        if classes is not None:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return PIXELS[i], self.items[i]


THIRDS = [i % 3 for i in range(20)]


def pil(i: int) -> Image.Image:
    return picture(PIXELS[i])


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (PIXELS, PIXELS),
        (GREY, GREY),
        (GREY[:, 0], GREY),
        (PIXELS.float() / 255, PIXELS),
        (PIXELS.double() / 255, PIXELS),
        (PIXELS.numpy(), PIXELS),
        (PIXELS.permute(0, 2, 3, 1).numpy(), PIXELS),
        (TensorDataset(PIXELS), PIXELS),
        ([pil(i) for i in range(20)], PIXELS),
        (Items(pil), PIXELS),
        (Items(lambda i: PIXELS[i]), PIXELS),
        (Items(lambda i: {"number": i, "image": pil(i)}), PIXELS),
        (Items(lambda i: (PIXELS[i].float() / 255, "a word")), PIXELS),
        (Items(lambda i: PIXELS[i].permute(1, 2, 0).numpy()), PIXELS),
        (Items(lambda i: GREY[i, 0].numpy()), GREY),
    ],
)
def test_images_of_any_make_are_the_same_pixels(data: ImagesLike, shown: Tensor) -> None:
    images = as_images(data)
    assert len(images) == 20
    assert all(torch.equal(images.load(i), shown[i].expand(3, -1, -1)) for i in range(20))
    assert images.labels is None
    assert describe(images).startswith("20 images without labels from a")


def test_labels_are_taken_from_the_data_sets_own_list() -> None:
    data = Named(THIRDS, ("cat", "dog", "emu"))
    images = as_images(data)
    assert labels_of(images) == THIRDS
    assert images.classes == ["cat", "dog", "emu"]
    some = as_images(Subset(data, [4, 2, 9]))
    assert labels_of(some) == [1, 2, 0]
    assert some.classes == images.classes
    assert labels_of(as_images(TensorDataset(PIXELS, torch.arange(20)))) == list(range(20))


def test_classes_of_one_name_are_told_apart_by_their_numbers() -> None:
    data = Named(THIRDS, (("crane",), ("emu", "Dromaius"), ("crane",)))  # as torchvision's ImageNet
    assert as_images(data).classes == ["crane (0)", "emu, Dromaius", "crane (2)"]
    bare = synthetic(48)
    bare.classes = []  # as a set of one's own may leave them
    assert as_images(bare).classes == [str(c) for c in range(int(bare.labels.max()) + 1)]


@pytest.mark.parametrize(
    "targets", [["cat"] * 20, [-1] * 20, [0.5] * 20, [0] * 19, [[0, 1]] * 20, [1] * 20, [10**9] * 20]
)
def test_a_list_that_cannot_be_the_labels_is_not_taken_for_them(targets: list[Any]) -> None:
    data = Named(targets)
    data.items = THIRDS  # the first is 0
    assert as_images(data).labels is None


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(PIXELS)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (PIXELS[0, 0], "no height and width"),
        (PIXELS.permute(0, 2, 3, 1), "1 or 3 channels"),
        (PIXELS.int(), "neither uint8 nor floats"),
        (PIXELS.float(), "0..1, and these go from"),
        (PIXELS.float() / 255 - 0.5, "leave a normalisation out"),
        (torch.full((4, 3, 8, 8), torch.nan), "floats must lie in 0..1"),
        (PIXELS[:0], "There are no images"),
        (PIXELS[..., :0], "no height and width"),
        ((PIXELS, torch.arange(20)), "no images: tuple.* no height"),
        ([], "There are no images"),
        (Items(pil, 0), "There are no images"),
        (Items(lambda i: {"image": 7}), "a dict is no image"),
        (Items(lambda i: PIXELS[i].float()), r"Items\[0\]: floats must lie in 0..1"),
        (Items(lambda i: 1 / 0), "division by zero"),
        ({"images": PIXELS}, "a dict, which holds no images by number"),
        (Stream(), "holds no images by number"),
        (7, "holds no images by number"),
        (Items(lambda i: torch.randint(0, 255, (3, 8, 8)).byte()), "another image each time"),
    ],
)
def test_what_holds_no_images_is_refused_in_a_sentence(data: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        as_images(data)


def test_an_item_that_cannot_be_had_is_quarantined() -> None:
    def make(i: int) -> Image.Image:
        if i == 13:
            raise OSError("gone")
        return pil(i)

    views = ViewsConfig(in_memory=False, size=8)
    loader = PairLoader(as_images(Items(make)), views, batch_size=5, seed=0, max_unreadable=0.1)
    assert len(list(loader.epoch(0, torch.arange(20)))) == 4
    assert loader.quarantined == {13: "Items[13]: gone (OSError)"}


def test_one_thread_at_a_time_asks_a_data_set() -> None:
    """As its author may expect who has only ever used a DataLoader: one file handle, no locks."""
    inside, most = [0], [0]

    def make(i: int) -> Image.Image:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.001)
        inside[0] -= 1
        return pil(i)

    images = as_images(Items(make))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(images.load, range(20)))
    assert most == [1]


@pytest.mark.parametrize("make", [lambda x: x, lambda x: Items(lambda i: x[i])], ids=["tensor", "data set"])
def test_the_same_images_are_known_again_and_others_are_refused(make: Callable[[Tensor], ImagesLike]) -> None:
    images = as_images(make(PIXELS))
    saved = json.loads(json.dumps(record(images)))
    again = as_images(make(PIXELS.clone()))
    assert again.fingerprint() == images.fingerprint()
    assert again.cache_key() == images.cache_key()
    assert "of 20 images agree" in check_same_data(saved, again)
    other = PIXELS.clone()
    other[7, 0, 0, 0] ^= 1
    for changed in (other, PIXELS[:19], PIXELS.flip(0), PIXELS.transpose(2, 3)):
        images = as_images(make(changed))
        assert images.fingerprint() != again.fingerprint()
        assert images.cache_key() != again.cache_key()
        with pytest.raises(UserError, match=r"Cannot resume with other data: .*\. Hand them over"):
            check_same_data(saved, images, advice="Hand them over")


# Labels of torchvision's data sets in their official layouts, of joined ones, of Hugging Face's


def pictures(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 7), (40, 0, 0)).save(root / name)
    return root


def caltech(root: Path) -> Any:
    images = root / "caltech101" / "101_ObjectCategories"
    pictures(images, "ant/image_0001.jpg", "ant/image_0002.jpg", "bee/image_0001.jpg")
    (images / "BACKGROUND_Google").mkdir()
    return tv.Caltech101(root)


def gtsrb(root: Path) -> Any:
    pictures(root / "gtsrb" / "GTSRB" / "Training", "00000/1.ppm", "00001/2.ppm", "00001/3.ppm")
    return tv.GTSRB(root)


def naturalist(root: Path) -> Any:
    kinds = [f"0000{c}_Animalia_a_b_c_d_e_{name}" for c, name in enumerate(("ant", "bee"))]
    pictures(root / "2021_train_mini", f"{kinds[0]}/1.jpg", f"{kinds[1]}/2.jpg", f"{kinds[1]}/3.jpg")
    return tv.INaturalist(root, version="2021_train_mini")


def sun(root: Path) -> Any:
    base = pictures(root / "SUN397", "a/abbey/sun_1.jpg", "a/abbey/sun_2.jpg", "o/office/home/sun_3.jpg")
    (base / "ClassName.txt").write_text("/a/abbey\n/o/office/home\n")
    return tv.SUN397(root)


LAYOUTS: dict[Callable[[Path], Any], list[str]] = {
    caltech: ["ant", "bee"],
    gtsrb: ["0", "1"],
    naturalist: ["00000_Animalia_a_b_c_d_e_ant", "00001_Animalia_a_b_c_d_e_bee"],
    sun: ["abbey", "office/home"],
}


@pytest.mark.parametrize("make", LAYOUTS, ids=lambda make: make.__name__)
def test_torchvisions_sets_have_the_labels_of_their_items(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    data = make(tmp_path)
    images = as_images(data)
    assert labels_of(images) == [int(data[i][1]) for i in range(3)]
    assert images.classes == LAYOUTS[make]


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
    shown = [picture(p) for p in pixels]
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


def test_a_hugging_face_data_set_on_disk_is_found_by_column_type(tmp_path: Path) -> None:
    hub = pytest.importorskip("datasets")
    pixels = smooth(4, 9, 11)
    rows = {"picture": [picture(p) for p in pixels], "kind": [0, 1, 1, 0]}
    features = hub.Features({"picture": hub.Image(), "kind": hub.ClassLabel(names=["x", "y"])})
    table = hub.Dataset.from_dict(rows, features=features)
    hub.DatasetDict({"train": table, "validation": table.select([2])}).save_to_disk(tmp_path / "hf")
    data = open_images(f"hf:{tmp_path / 'hf'}")
    assert torch.equal(data.load(2), pixels[2])
    assert labels_of(data) == [0, 1, 1, 0]
    assert data.classes == ["x", "y"]
    assert len(open_images(f"hf:{tmp_path / 'hf'}", split="test")) == 1
    more = hub.DatasetDict({"train": table, "test": table.select([0, 1]), "extra": table.select([3])})
    more.save_to_disk(tmp_path / "more")
    (extra,) = open_images(f"hf:{tmp_path / 'more'}").more_splits({"train", "test"})
    assert (extra.split, len(extra)) == ("extra", 1)
    rows["kind"] = [None, None, 1, 0]
    hub.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "partly")
    assert labels_of(open_images(f"hf:{tmp_path / 'partly'}")) == [-1, -1, 1, 0]
    gone = hub.Dataset.from_dict({**rows, "kind": [None] * 4}, features=features)
    hub.DatasetDict({"train": table, "test": gone, "val": table}).save_to_disk(tmp_path / "gone")
    assert open_images(f"hf:{tmp_path / 'gone'}", split="test").split == "val"
    with pytest.raises(MissingSplitError, match="one split without test images"):
        open_images(f"hf:{tmp_path / 'partly'}", split="test")
    hidden = table.remove_columns("kind").add_column("kind", [-1] * len(table)).cast(features)
    hub.DatasetDict({"test": hidden, "validation": table}).save_to_disk(tmp_path / "hidden")
    assert open_images(f"hf:{tmp_path / 'hidden'}", split="test").split == "validation"  # which has labels
    assert data.fingerprint() == open_images(f"hf:{tmp_path / 'hf'}").fingerprint()
    assert data.cache_key() == open_images(f"hf:{tmp_path / 'hf'}").cache_key()
    assert describe(data) == (
        f"4 images in 2 classes (x, y) from hf:{tmp_path / 'hf'} "
        "(its split train; 1 in validation are not among them)."
    )
    saved = record(data)
    assert "contents of 4 of 4 images agree" in check_same_data(saved, data)
    table = next((tmp_path / "hf/train").glob("*.arrow"))  # the library's own fingerprint is not in it
    content = table.read_bytes()
    place = content.index(b"IDAT") + 12
    table.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(UserError, match="1 of 4 images that were looked into hold something else"):
        check_same_data(saved, open_images(f"hf:{tmp_path / 'hf'}"))
