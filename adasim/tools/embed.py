"""`embed`: the features of all images of a data set, with their file names and labels, in memory or as a file; and
`similar`: those images that are most similar to one, and a sheet of them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from adasim.data import ImageSet, ImagesLike, Unreadable, as_images
from adasim.data.sources import file_name
from adasim.eval.evaluation import Extractor, Say, open_extractor
from adasim.eval.features import Features, encode, frozen, require_finite
from adasim.models import Backbone
from adasim.neighbors import search
from adasim.options import Options
from adasim.tools import sheet
from adasim.tools.outputs import check_features_file
from adasim.util.csv import to_csv
from adasim.util.errors import UserError
from adasim.util.files import atomic_write, write_errors
from adasim.util.rgb import decode, to_tensor
from adasim.util.terminal import shortened


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

    def label_names(self) -> list[str]:
        """The label of each row in words; "" where it has none."""
        labels = [-1] * len(self) if self.labels is None else self.labels.tolist()
        return [self.classes[label] if label >= 0 else "" for label in labels]


def embed(
    model: str | Path | Backbone,
    data: ImagesLike | Path,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    **options: Any,
) -> Embedding:
    """The features of all images of `data`; written to `out`, too, if it is given.

    Args:
        model: what the command line calls MODEL (docs/use.md), or an encoder that is loaded.
        data: the images, as after `--data` or for `adasim.pretrain`.
        out: a file to make. `.npz` holds the arrays features, files, labels and classes; `.parquet` the columns file,
            label and features; `.npy` the features alone, with file and label in a .csv beside it.
        overwrite: replace `out` if it is there.
        split: "train" or "test", of data that are divided.
        size: side in pixels of what the encoder sees, instead of its own.
        device: where the encoder runs; "auto" by default.
        workers: processes that read images from files; "auto" by default.
        exclude: a file of verdicts; the images that it rejects are left out.
        cache: keep the features (in the run folder, or in the user's cache) for the next time, and go on from where
            an earlier call was interrupted; True by default.
        say: is called with sentences for a person: what was found, what was left out.

    >>> photos = embed("runs/photos", "photos/", "features.npz")         # doctest: +SKIP
    >>> photos.features.shape, photos.files[0]                            # doctest: +SKIP
    """
    if out is not None:
        check_features_file(Path(out), overwrite)
    extractor, images, features = _all_features(model, data, **options)
    files = [file_name(images, i) for i in features.ids.tolist()]
    labels = None if images.labels is None else images.labels[features.ids]
    embedding = Embedding(features.values, files, labels, images.classes, features.unreadable)
    if out is not None:
        about = {
            "encoder": extractor.encoder.name,
            "data": images.name,
            "split": images.split,
            "transform": json.dumps(extractor.encoder.transform.to_timm(), sort_keys=True),
        }
        _write(Path(out), embedding, about)
    return embedding


def _all_features(
    model: str | Path | Backbone,
    data: ImagesLike | Path,
    *,
    split: str = "train",
    size: int | None = None,
    device: str = "auto",
    workers: int | Literal["auto"] = "auto",
    exclude: str | Path | None = None,
    cache: bool = True,
    say: Say = lambda sentence: None,
) -> tuple[Extractor, ImageSet, Features]:
    """The encoder, the images and their features, however many cannot be read."""
    verdicts = None if exclude is None else Path(exclude)
    options = Options(size=size, device=device, workers=workers, exclude=verdicts, no_cache=not cache)
    extractor = open_extractor(model, options, say=say)
    images = extractor.open_images(str(data) if isinstance(data, str | Path) else as_images(data), split)
    return extractor, images, extractor.features(images, max_unreadable=1.0)


def _write(out: Path, embedding: Embedding, about: dict[str, str]) -> None:
    """One file, or two: the list first, so that once the features are there, everything is."""
    features, files = embedding.features.numpy(), embedding.files
    way_out = "or choose another --out; features that are kept are written at once the next time"
    with write_errors(out, way_out):
        if out.suffix == ".npy":
            table = to_csv(("file", "label"), zip(files, embedding.label_names(), strict=True))
            atomic_write(out.with_suffix(".csv"), table.encode("utf-8", "surrogateescape"))
            atomic_write(out, lambda file: np.save(file, features))
        elif out.suffix == ".npz":  # names without a pickle: text of one width
            arrays = {"features": features, "files": np.array(files, dtype=np.str_)}
            if embedding.labels is not None:
                classes = np.array(embedding.classes, dtype=np.str_)
                arrays |= {"labels": embedding.labels.numpy(), "classes": classes}
            arrays |= {name: np.array(value) for name, value in about.items()}
            atomic_write(out, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]
        else:
            atomic_write(out, lambda file: _write_parquet(file, embedding, about))


def _write_parquet(file: BinaryIO, embedding: Embedding, about: dict[str, str]) -> None:
    import pyarrow
    import pyarrow.parquet

    def utf8(names: list[str]) -> list[str]:
        r"""Bytes of file names that are no UTF-8 as \xe9."""
        return [name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for name in names]

    values = pyarrow.array(embedding.features.numpy().reshape(-1))
    columns: dict[str, Any] = {"file": utf8(embedding.files)}
    if embedding.labels is not None:
        columns["label"] = utf8(embedding.label_names())
    columns["features"] = pyarrow.FixedSizeListArray.from_arrays(values, embedding.features.shape[1])
    pyarrow.parquet.write_table(pyarrow.table(columns).replace_schema_metadata(about), file)


# ---- the most similar ----


@dataclass(frozen=True)
class Similar:
    """The nearest images, best first."""

    files: list[str]
    """Where each is, from the folder on."""
    scores: list[float]
    """Cosine similarity to the image asked for: 1 is the same direction."""
    ids: list[int]
    """Numbers of the images in the data set."""
    query: Tensor = field(repr=False)
    """The image asked for, uint8 (3, H, W)."""
    images: ImageSet = field(repr=False)

    def __len__(self) -> int:
        return len(self.files)


def similar(
    model: str | Path | Backbone,
    image: str | Path | Image.Image | Tensor,
    among: ImagesLike | Path,
    k: int = 10,
    **options: Any,
) -> Similar:
    """The `k` images most similar to `image`, by cosine similarity of features; exact, ties by order of files.

    If `image` is itself a file of `among`, it is not among the answers. The features of `among` are those of
    `adasim.embed`, kept from an earlier call or made now.

    Args:
        model: what the command line calls MODEL (docs/use.md), or an encoder that is loaded.
        image: a file, a PIL image, or uint8 (3, H, W).
        among: the images to search, as for `adasim.embed`; the other arguments are those, too.

    >>> nearest = similar("runs/photos", "cat.jpg", "photos/", k=5)      # doctest: +SKIP
    >>> nearest.files, nearest.scores                                     # doctest: +SKIP
    """
    if k < 1:
        raise UserError(f"k={k} must be at least 1.")
    query = image if isinstance(image, Tensor) else _read(image)
    extractor, images, features = _all_features(model, among, **options)
    rows = normalize(features.values, dim=1)  # (n, D)
    wanted = normalize(_feature(extractor, query), dim=1)  # (1, D)
    scores, places = (answer[0] for answer in search(wanted, rows, min(k + 1, len(rows))))
    ranked = [
        (int(features.ids[place]), score)
        for place, score in zip(places.tolist(), scores.tolist(), strict=True)
        if place >= 0
    ]
    if isinstance(image, str | Path):  # not the image itself
        files = ((i, score, images.where(i)) for i, score in ranked)
        ranked = [
            (i, s) for i, s, file in files if not (os.path.exists(file) and os.path.samefile(file, image))
        ]
    ids, best = [i for i, _ in ranked[:k]], [score for _, score in ranked[:k]]
    return Similar([file_name(images, i) for i in ids], best, ids, query, images)


def _read(image: str | Path | Image.Image) -> Tensor:
    if isinstance(image, Image.Image):
        return to_tensor(image)
    try:
        return decode(str(image))
    except Unreadable as error:
        raise UserError(f"{image} cannot be read: {error.reason}. Name an image file.") from None


def _feature(extractor: Extractor, query: Tensor) -> Tensor:
    backbone = extractor.encoder.backbone
    with frozen(backbone), torch.inference_mode():
        view = extractor.encoder.transform(query)[None].to(extractor.device)
        feature = encode(backbone.to(extractor.device), view).float().cpu()
    require_finite(feature, backbone)
    return feature


def contact_sheet(path: Path, nearest: Similar, name: str) -> None:
    """Write a PNG, whole or not at all: the image asked for, by its name, and beside it the nearest ones."""
    query = sheet.Cell(nearest.query, "your image", shortened(name, 40), framed=True)
    found = zip(nearest.ids, nearest.scores, nearest.files, strict=True)
    cells = [
        sheet.Cell((nearest.images, i), f"{place}.  {score:.3f}", shortened(file, 16))
        for place, (i, score, file) in enumerate(found, 1)
    ]
    headings = ("", "place and cosine similarity")
    figure = sheet.draw([(query, cells)], "The most similar images", (), headings, enlarged=2.4, per_line=5)
    atomic_write(path, sheet.render(figure))
