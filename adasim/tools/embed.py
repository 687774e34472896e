"""`embed`: the features of all images of a data set, with their file names and labels, in memory or as a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from adasim.data import ImageSet, ImagesLike, as_images
from adasim.data.sources.excluded import file_name
from adasim.eval.extractor import Extractor, Say, open_extractor
from adasim.models import Backbone
from adasim.options import Options
from adasim.tools.outputs import check_features_file, listing_beside
from adasim.util.csv import to_csv
from adasim.util.errors import UserError
from adasim.util.files import atomic_write, remedy


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
    workers: int = 2,
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
    target = None if out is None else check_features_file(Path(out), overwrite)
    verdicts = None if exclude is None else Path(exclude)
    options = Options(size=size, device=device, workers=workers, exclude=verdicts, no_cache=not cache)
    extractor = open_extractor(model, options, say=say)
    images = extractor.open_images(source(data), split)
    found = embedding(extractor, images)
    if target is not None:
        _write(target, found, _about(extractor, images))
    return found


def embedding(extractor: Extractor, images: ImageSet) -> Embedding:
    """Features by one encoder, made or found again; all images that can be read, however many cannot."""
    found = extractor.features(images, max_unreadable=1.0)
    files = [file_name(images, i) for i in found.ids.tolist()]
    return Embedding(found.values, files, found.labels, images.classes, found.unreadable)


def source(data: ImagesLike | Path) -> str | ImageSet:
    """What a person hands over as images: a name or path, or images of any make."""
    return str(data) if isinstance(data, str | Path) else as_images(data)


def _about(extractor: Extractor, images: ImageSet) -> dict[str, str]:
    """What the features are of, and by what."""
    encoder = extractor.encoder
    return {
        "encoder": encoder.name,
        "data": images.name,
        "split": images.split,
        "transform": json.dumps(encoder.transform.to_timm(), sort_keys=True),
    }


def _write(out: Path, found: Embedding, about: dict[str, str]) -> None:
    writers: dict[str, Any] = {".npz": _write_npz, ".parquet": _write_parquet, ".npy": _write_npy}
    try:
        if out.suffix == ".npy":  # the list first: once the features are there, everything is
            atomic_write(listing_beside(out), lambda file: _write_listing(file, found))
        atomic_write(out, lambda file: writers[out.suffix](file, found, about))
    except OSError as error:
        raise UserError(
            f"{out} cannot be written: {error.strerror or error}. {remedy(error)} or choose another --out; unless "
            f"--no-cache was given the features are kept, and the same command writes them at once."
        ) from None


def _write_npz(file: BinaryIO, found: Embedding, about: dict[str, str]) -> None:
    # Names without a pickle: text of one width.
    arrays = {"features": found.features.numpy(), "files": np.array(found.files, dtype=np.str_)}
    if found.labels is not None:
        arrays |= {"labels": found.labels.numpy(), "classes": np.array(found.classes, dtype=np.str_)}
    arrays |= {name: np.array(value) for name, value in about.items()}
    np.savez(file, **arrays)  # type: ignore[arg-type]


def _write_npy(file: BinaryIO, found: Embedding, about: dict[str, str]) -> None:
    np.save(file, found.features.numpy())


def _write_parquet(file: BinaryIO, found: Embedding, about: dict[str, str]) -> None:
    import pyarrow
    import pyarrow.parquet

    width = found.features.shape[1]
    values = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(found.features.numpy().reshape(-1)), width)
    columns: dict[str, Any] = {"file": [_utf8(name) for name in found.files]}
    if found.labels is not None:
        columns["label"] = [_utf8(name) for name in _class_names(found)]
    table = pyarrow.table(columns | {"features": values}).replace_schema_metadata(about)
    pyarrow.parquet.write_table(table, file)


def _write_listing(file: BinaryIO, found: Embedding) -> None:
    labels = [""] * len(found) if found.labels is None else _class_names(found)
    table = to_csv(("file", "label"), zip(found.files, labels, strict=True))
    file.write(table.encode("utf-8", "surrogateescape"))


def _class_names(found: Embedding) -> list[str]:
    assert found.labels is not None
    return [found.classes[label] if label >= 0 else "" for label in found.labels.tolist()]


def _utf8(name: str) -> str:
    r"""A file name whose bytes are no UTF-8 with those bytes as \xe9."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
