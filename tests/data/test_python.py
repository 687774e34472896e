"""Images that are handed over in Python: tensors, arrays and data sets become one kind of thing."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from adasim.config import ViewsConfig
from adasim.data import ImagesLike, PairLoader, as_images, check_same_data, describe, record, synthetic
from adasim.util.errors import UserError

from .pictures import smooth

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


class Labelled(Items):
    """As torchvision's data sets are: (image, label), `targets` and `classes`."""

    classes = ("cat", "dog", "emu")

    def __init__(self) -> None:
        super().__init__(lambda i: (pil(i), i % 3))
        self.targets = [i % 3 for i in range(20)]


def pil(i: int) -> Image.Image:
    return Image.fromarray(PIXELS[i].permute(1, 2, 0).numpy())


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
    data = Labelled()
    images = as_images(data)
    assert images.labels is not None
    assert images.labels.tolist() == data.targets
    assert images.classes == ["cat", "dog", "emu"]
    some = as_images(Subset(data, [4, 2, 9]))
    assert some.labels is not None
    assert some.labels.tolist() == [1, 2, 0]
    assert some.classes == images.classes
    pair = as_images(TensorDataset(PIXELS, torch.arange(20)))
    assert pair.labels is not None
    assert pair.labels.tolist() == list(range(20))


def test_classes_of_one_name_are_told_apart_by_their_numbers() -> None:
    data = Labelled()
    data.classes = (("crane",), ("emu", "Dromaius"), ("crane",))  # type: ignore[assignment]  # as torchvision's ImageNet
    assert as_images(data).classes == ["crane (0)", "emu, Dromaius", "crane (2)"]
    bare = synthetic(48)
    bare.classes = []  # as a set of one's own may leave them
    assert as_images(bare).classes == [str(c) for c in range(int(bare.labels.max()) + 1)]


@pytest.mark.parametrize(
    "targets", [["cat"] * 20, [-1] * 20, [0.5] * 20, [0] * 19, [[0, 1]] * 20, [1] * 20, [10**9] * 20]
)
def test_a_list_that_cannot_be_the_labels_is_not_taken_for_them(targets: list[Any]) -> None:
    data = Labelled()  # whose first label is 0
    data.targets = targets
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


def batches(images: ImagesLike, workers: int) -> list[Tensor]:
    views = ViewsConfig(in_memory=False, size=8)
    loader = PairLoader(as_images(images), views, batch_size=5, seed=0, workers=workers)
    try:
        return [view for batch in loader.epoch(0, torch.arange(20)) for view in batch.views]
    finally:
        loader.close()


def test_loader_workers_read_a_data_set_that_cannot_be_pickled() -> None:
    alone, shared = batches(Items(lambda i: pil(i)), 0), batches(Items(lambda i: pil(i)), 2)
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(alone, batches(PIXELS, 2), strict=True))


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
