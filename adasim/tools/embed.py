"""`embed`: the features of all images of a data set, with their file names and labels, in memory or as a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from torch import Tensor

from adasim.data import ImageSet, ImagesLike, as_images
from adasim.data.sources import file_name
from adasim.eval.evaluation import Say, open_extractor
from adasim.models import Backbone
from adasim.options import Options
from adasim.tools.outputs import check_features_file
from adasim.util.csv import to_csv
from adasim.util.files import atomic_write, write_errors


@dataclass(frozen=True)
class Embedding:
    """Features of the readable images of a data set, row by row."""

    features: Tensor
    """(n, D), float32, as the encoder gives them: not normalised."""
    files: list[str]
    """Where each image is, from the folder on; `name[i]` where images are no files."""
    labels: Tensor | None
    """(n,), int64: numbers of `classes`."""
    classes: list[str]
    unreadable: dict[int, str]
    """{id: where and why} of the images left out."""

    def __len__(self) -> int:
        return len(self.files)


def embed(
    model: str | Path | Backbone,
    data: ImagesLike | Path,
    out: str | Path | None = None,
    *,
    split: str = "train",
    size: int | None = None,
    device: str = "auto",
    workers: int | Literal["auto"] = "auto",
    exclude: str | Path | None = None,
    cache: bool = True,
    overwrite: bool = False,
    say: Say = lambda sentence: None,
) -> Embedding:
    """The features of all images of `data`; written to `out`, too, if it is given.

    Args:
        model: what the command line calls MODEL (docs/use.md), or an encoder that is loaded.
        data: the images, as after `--data` or for `adasim.pretrain`.
        out: a file to make. `.npz` holds the arrays features, files, labels and classes; `.parquet` the columns file,
            label and features; `.npy` the features alone, with file and label in a .csv beside it.
        split: "train" or "test", of data that are divided.
        size: side in pixels of what the encoder sees, instead of its own.
        device: where the encoder runs.
        workers: processes that read images from files.
        exclude: a file of verdicts; the images that it rejects are left out.
        cache: keep the features (in the run folder, or in the user's cache) for the next time, and go on from where
            an earlier call was interrupted.
        overwrite: replace `out` if it is there.
        say: is called with sentences for a person: what was found, what was left out.

    >>> found = embed("runs/photos", "photos/", "features.npz")          # doctest: +SKIP
    >>> found.features.shape, found.files[0]                              # doctest: +SKIP
    """
    if out is not None:
        check_features_file(Path(out), overwrite)
    verdicts = None if exclude is None else Path(exclude)
    options = Options(size=size, device=device, workers=workers, exclude=verdicts, no_cache=not cache)
    extractor = open_extractor(model, options, say=say)
    images = extractor.open_images(source(data), split)
    features = extractor.features(images, max_unreadable=1.0)  # however many cannot be read
    files = [file_name(images, i) for i in features.ids.tolist()]
    embedding = Embedding(features.values, files, features.labels, images.classes, features.unreadable)
    if out is not None:
        about = {
            "encoder": extractor.encoder.name,
            "data": images.name,
            "split": images.split,
            "transform": json.dumps(extractor.encoder.transform.to_timm(), sort_keys=True),
        }
        _write(Path(out), embedding, about)
    return embedding


def source(data: ImagesLike | Path) -> str | ImageSet:
    """What a person hands over as images: a name or path, or images of any make."""
    return str(data) if isinstance(data, str | Path) else as_images(data)


def _write(out: Path, embedding: Embedding, about: dict[str, str]) -> None:
    with write_errors(
        out, "or choose another --out; features that are kept are written at once the next time"
    ):
        if out.suffix == ".npy":  # the list first: once the features are there, everything is
            atomic_write(out.with_suffix(".csv"), _listing(embedding))
            atomic_write(out, lambda file: np.save(file, embedding.features.numpy()))
        else:
            write = _write_npz if out.suffix == ".npz" else _write_parquet
            atomic_write(out, lambda file: write(file, embedding, about))


def _write_npz(file: BinaryIO, embedding: Embedding, about: dict[str, str]) -> None:
    # Names without a pickle: text of one width.
    arrays = {"features": embedding.features.numpy(), "files": np.array(embedding.files, dtype=np.str_)}
    if embedding.labels is not None:
        arrays |= {"labels": embedding.labels.numpy(), "classes": np.array(embedding.classes, dtype=np.str_)}
    arrays |= {name: np.array(value) for name, value in about.items()}
    np.savez(file, **arrays)  # type: ignore[arg-type]


def _write_parquet(file: BinaryIO, embedding: Embedding, about: dict[str, str]) -> None:
    import pyarrow
    import pyarrow.parquet

    width = embedding.features.shape[1]
    values = pyarrow.FixedSizeListArray.from_arrays(
        pyarrow.array(embedding.features.numpy().reshape(-1)), width
    )
    columns: dict[str, Any] = {"file": [_utf8(name) for name in embedding.files]}
    if embedding.labels is not None:
        columns["label"] = [_utf8(name) for name in _class_names(embedding)]
    table = pyarrow.table(columns | {"features": values}).replace_schema_metadata(about)
    pyarrow.parquet.write_table(table, file)


def _listing(embedding: Embedding) -> bytes:
    """Which row is which image."""
    names = [""] * len(embedding) if embedding.labels is None else _class_names(embedding)
    table = to_csv(("file", "label"), zip(embedding.files, names, strict=True))
    return table.encode("utf-8", "surrogateescape")


def _class_names(embedding: Embedding) -> list[str]:
    assert embedding.labels is not None
    return [embedding.classes[label] if label >= 0 else "" for label in embedding.labels.tolist()]


def _utf8(name: str) -> str:
    r"""A file name whose bytes are no UTF-8 with those bytes as \xe9."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
