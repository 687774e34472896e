import builtins
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adasim.data import as_images, open_images
from adasim.registry import SOURCES
from adasim.util.errors import UserError

from .pictures import save_image, smooth


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
        "": r"Which images.*--data ~/photos",
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


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "my photos.zip",
            "an archive. Unpack it with `unzip 'my photos.zip' -d 'my photos'`, then name 'my photos'.",
        ),
        ("p.TAR", "an archive. Unpack it with `mkdir -p p && tar -xf p.TAR -C p`, then name p."),
        ("p.tar.gz", "an archive. Unpack it with `mkdir -p p && tar -xf p.tar.gz -C p`, then name p."),
        ("p.tgz", "an archive. Unpack it with `mkdir -p p && tar -xf p.tgz -C p`, then name p."),
        ("here/a.HEIC", "one image. Name its folder: here"),
    ],
)
def test_an_archive_or_one_image_is_refused_with_what_to_do(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    Path(name).write_bytes(b"?")
    with pytest.raises(UserError, match=f"^{re.escape(f'{name} is {says}')}$"):
        open_images(name)
