import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adasim.data import as_images, check_same_data, describe, open_images, record
from adasim.registry import SOURCES
from adasim.util.errors import MissingSplitError, UserError

from .pictures import save_image, smooth

NESTED = ["a/abbey/1", "a/abbey/deep/2", "a/apartment/outdoor/3", "b/bar/4", "z/zoo/outdoor/5"]
WAY_OUT = "; if they are others, put their folders side by side."


@pytest.mark.parametrize(
    ("files", "classes", "labels", "note"),
    [
        (["cat/1", "cat/kittens/2", "dog/3"], ["cat", "dog"], [0, 0, 1], ""),
        (["cat/images/1", "dog/images/2"], ["cat", "dog"], [0, 1], ""),
        (
            NESTED,
            ["a/abbey", "a/apartment/outdoor", "b/bar", "z/zoo/outdoor"],
            [0, 0, 1, 2, 3],
            " The classes are the folders that hold images, such as a/abbey.",
        ),
        (
            ["all/cat/1", "all/dog/2"],
            ["all/cat", "all/dog"],
            [0, 1],
            " The classes are the folders that hold images, such as all/cat.",
        ),
        (
            ["cat/1", "dog/husky/2", "dog/poodle/3"],
            ["cat", "dog"],
            [0, 1, 1],
            " Warning: cat holds images itself, dog only in folders below it. The classes are taken to be cat, dog"
            + WAY_OUT,
        ),
        (
            ["art/cat/1", "art/dog/2", "photo/dog/3"],
            ["art", "photo"],
            [0, 0, 1],
            " Warning: there is a folder dog in each of art, photo. The classes are taken to be art, photo"
            + WAY_OUT,
        ),
    ],
    ids=["plain", "one folder in each", "SUN397", "one folder around all", "two levels", "repeated names"],
)
def test_the_classes_of_nested_folders_are_those_that_hold_images_and_a_doubt_is_said(
    tmp_path: Path, files: list[str], classes: list[str], labels: list[int], note: str
) -> None:
    for name in files:
        save_image(smooth(1, 8, 8)[0], tmp_path / f"{name}.png")
    data = open_images(str(tmp_path))
    assert data.classes == classes
    assert data.labels is not None
    assert data.labels.tolist() == labels
    assert describe(data).endswith(f" from {tmp_path}.{note}")


@pytest.mark.parametrize("test_name", ["test", "val"])
def test_a_divided_folder_is_read_by_split(tmp_path: Path, test_name: str) -> None:
    save_image(smooth(1, 8, 8)[0], tmp_path / "train/cat/a.png")
    save_image(smooth(1, 8, 8)[0], tmp_path / "train/dog/b.png")
    save_image(smooth(1, 8, 8)[0], tmp_path / test_name / "dog/c.png")
    train, test = open_images(str(tmp_path)), open_images(str(tmp_path), split="test")
    assert len(train) == 2
    assert train.classes == ["cat", "dog"]
    assert test.listing()[0].startswith("dog/c.png")


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NHW"])
def test_npz_arrays_of_any_layout_give_the_same_kind_of_image(tmp_path: Path, layout: str) -> None:
    pixels = smooth(5, 10, 12, channels=1 if layout == "NHW" else 3)
    array = {"NHWC": pixels.permute(0, 2, 3, 1), "NCHW": pixels, "NHW": pixels[:, 0]}[layout].numpy()
    masks = np.ones((5, 10, 12), np.int64)
    np.savez(tmp_path / "d.npz", images=array, labels=np.array([[0], [1], [2], [1], [0]]), masks=masks)
    data = open_images(str(tmp_path / "d.npz"))
    assert torch.equal(data.load(3), pixels[3].expand(3, -1, -1))
    assert data.labels is not None
    assert data.labels.tolist() == [0, 1, 2, 1, 0]
    assert data.classes == ["0", "1", "2"]
    array_of_all, mask = data.as_array(), data.mask(0)
    assert array_of_all is not None
    assert torch.equal(array_of_all, pixels)
    assert mask is not None
    assert mask.dtype == torch.uint8


def test_npz_with_train_and_test_arrays_is_read_by_split(tmp_path: Path) -> None:
    a, b = smooth(4, 8, 8).numpy(), smooth(2, 8, 8, seed=1).numpy()
    np.savez(tmp_path / "d.npz", x_train=a, y_train=np.arange(4), x_test=b, y_test=np.arange(2))
    assert len(open_images(str(tmp_path / "d.npz"))) == 4
    assert torch.equal(open_images(str(tmp_path / "d.npz"), split="test").load(1), torch.from_numpy(b[1]))


def test_a_hugging_face_data_set_on_disk_is_found_by_column_type(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    pixels = smooth(4, 9, 11)
    rows = {"picture": [Image.fromarray(p.permute(1, 2, 0).numpy()) for p in pixels], "kind": [0, 1, 1, 0]}
    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["x", "y"])})
    table = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": table, "validation": table.select([2])}).save_to_disk(tmp_path / "hf")
    data = open_images(f"hf:{tmp_path / 'hf'}")
    assert torch.equal(data.load(2), pixels[2])
    assert data.labels is not None
    assert data.labels.tolist() == [0, 1, 1, 0]
    assert data.classes == ["x", "y"]
    assert len(open_images(f"hf:{tmp_path / 'hf'}", split="test")) == 1
    more = datasets.DatasetDict({"train": table, "test": table.select([0, 1]), "extra": table.select([3])})
    more.save_to_disk(tmp_path / "more")
    (extra,) = open_images(f"hf:{tmp_path / 'more'}").more_splits({"train", "test"})
    assert (extra.split, len(extra)) == ("extra", 1)
    rows["kind"] = [None, None, 1, 0]
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "partly")
    assert open_images(f"hf:{tmp_path / 'partly'}").labels.tolist() == [-1, -1, 1, 0]  # type: ignore[union-attr]
    gone = datasets.Dataset.from_dict({**rows, "kind": [None] * 4}, features=features)
    datasets.DatasetDict({"train": table, "test": gone, "val": table}).save_to_disk(tmp_path / "gone")
    assert open_images(f"hf:{tmp_path / 'gone'}", split="test").split == "val"
    with pytest.raises(MissingSplitError, match="one split without test images"):
        open_images(f"hf:{tmp_path / 'partly'}", split="test")
    hidden = table.remove_columns("kind").add_column("kind", [-1] * len(table)).cast(features)
    datasets.DatasetDict({"test": hidden, "validation": table}).save_to_disk(tmp_path / "hidden")
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


def test_synthetic_takes_a_count_and_a_size() -> None:
    assert len(open_images("synthetic:48")) == 48
    array = open_images("synthetic:48", size=40, split="test").as_array()
    assert array is not None
    assert array.shape == (256, 1, 40, 40)


def test_a_kind_of_data_of_ones_own_is_opened_by_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(SOURCES, "_things", {name: SOURCES[name] for name in SOURCES.names()})

    @SOURCES.register("lmdb")
    def open_lmdb(rest: str, *, size: int, split: str, seed: int) -> Any:
        asked.append((rest, size, split, seed))
        images = as_images(smooth(5, 8, 8)) if rest else None
        if images is not None:
            images.labels = torch.arange(5) - 1  # without names
        return images

    data = open_images("lmdb:/some/where:else", size=48, split="test", seed=3)
    assert asked == [("/some/where:else", 48, "test", 3)]
    assert len(data) == 5
    assert data.classes == ["0", "1", "2", "3"]
    with pytest.raises(UserError, match=r"\(generated images\), lmdb:\.\.\."):
        open_images("")
    with pytest.raises(UserError, match="lmdb: gave no ImageSet but NoneType"):
        open_images("lmdb:")


def test_an_unknown_prefix_gets_a_sentence_with_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UserError, match=r"'lmbd' are not known\. Known are a folder .* hf:NAME .* --plugin FILE"
    ):
        open_images("lmbd:/some/where")
    save_image(smooth(1, 8, 8)[0], tmp_path / "odd:name" / "a.png")
    monkeypatch.chdir(tmp_path)
    assert len(open_images("odd:name")) == 1


def test_what_cannot_be_opened_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("words")
    np.savez(tmp_path / "none.npz", faces=np.zeros(3))
    real_import = builtins.__import__

    def without_datasets(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    for source, says in {
        str(tmp_path / "nowhere"): "No such folder",
        str(tmp_path / "empty"): "No images in",
        str(tmp_path / "notes.txt"): "not known",
        str(tmp_path / "nowhere.npz"): "No such file",
        str(tmp_path / "none.npz"): "faces",
        "hf:anything": "pip install",
        "python:Tensor": "handed over in Python",
        "synthetic:many": "whole number",
        "synthetic:0": "whole number",
    }.items():
        with pytest.raises(UserError, match=says):
            open_images(source)


def test_a_folder_that_is_not_divided_has_no_test_split(tmp_path: Path) -> None:
    save_image(smooth(1, 8, 8)[0], tmp_path / "cat/a.png")
    with pytest.raises(UserError, match="no test images"):
        open_images(str(tmp_path), split="test")
