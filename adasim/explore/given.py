"""Features that somebody else made: read from a file, and put in the order of the images."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adasim.explore.collection import Collection
from adasim.util.errors import UserError
from adasim.util.terminal import printable


def given_features(file: Path, collection: Collection, data: str, say: Callable[[str], None]) -> Tensor:
    """A row (D,) for each image of `data`; NaN, which `say` is told, for images that the file does not name."""
    features, files = read_features(file)
    if files:
        features = _placed(features, files, collection, file, data)
    elif len(features) != len(collection):
        train = collection.sets[0]
        divided = train.split and os.path.isdir(train.place)
        alone = f" For training images alone: --data {train.place}" if divided else ""
        raise UserError(
            f"{file} has {len(features):,} features and {data} {len(collection):,} images. One row per image is "
            f"needed, in the order of the images: training images first, then test images, each by name; or an array "
            f"files that names the image of each row.{alone}"
        )
    missing = (~torch.isfinite(features).all(1)).nonzero()[:, 0].tolist()
    if len(missing) == len(features):
        raise UserError(f"{file} has not one row of finite features. Make them anew.")
    if missing:
        first = collection.names[missing[0]]
        say(f"{file} has no features of {len(missing):,} images, such as {first}: they get no neighbours.")
    return features


def _placed(features: Tensor, files: list[str], collection: Collection, file: Path, data: str) -> Tensor:
    """Rows (N, D) in the order of the images, by the names of their files; NaN where an image has none."""
    row_of: dict[int, int] = {}
    for row, name in enumerate(files):
        known, fitting = printable(name), collection.fitting(name)
        if not fitting:
            raise UserError(
                f"Row {row:,} of {file} is of {known}, which is not among the images of {data}: these are features "
                f"of other images. Make them anew, or restore the images."
            )
        if len(fitting) > 1:
            few = " and ".join(collection.names[i] for i in fitting[:2])
            raise UserError(
                f"Row {row:,} of {file} is of {known}, and {len(fitting):,} images of {data} fit, such as {few}. "
                f"Name more of the paths in its array files, or one split alone with --data."
            )
        before = row_of.setdefault(fitting[0], row)
        if before != row:
            raise UserError(
                f"Rows {before:,} and {row:,} of {file} are both of {collection.names[fitting[0]]}. Leave one out."
            )
    placed = torch.full((len(collection), features.shape[1]), torch.nan)
    placed[list(row_of)] = features  # in the order of the rows
    return placed


def read_features(file: Path) -> tuple[Tensor, list[str]]:
    """The two-dimensional array `features` (or the only one that there is) of an .npz or .npy file; and which image
    each row is of, if an array `files` of names says so, as `adasim embed` writes it with the
    `split` that they are of."""
    try:
        found: Any = np.load(file, allow_pickle=False)
        if isinstance(found, np.ndarray):
            arrays = {"features": found}
        else:
            with found:
                arrays = {name: found[name] for name in found.files}
    except Exception as error:  # a damaged archive raises nearly anything
        reason = getattr(error, "strerror", None) or "it is no .npz file of plain arrays"
        raise UserError(f"{file} cannot be read: {reason}.") from None
    tables = {
        name: array
        for name, array in arrays.items()
        if array.ndim == 2 and array.shape[1] and array.dtype.kind in "fiu"
    }
    name = "features" if "features" in tables else next(iter(tables), "")
    if not name or (name != "features" and len(tables) > 1):
        held = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "nothing"
        raise UserError(
            f"{file} holds {held}. Features are needed as an array (images, width) named features."
        )
    features = tables[name]
    names: list[str] = []
    if (files := arrays.get("files")) is not None:
        if files.dtype.kind not in "US" or files.shape != features.shape[:1]:
            raise UserError(
                f"The array files of {file} has shape {files.shape} and type {files.dtype}. One name for each "
                f"of the {len(features):,} rows of {name} is needed; or leave it out."
            )
        split = arrays.get("split", np.array(""))
        before = f"{split}/" if split.shape == () and str(split) else ""
        names = [before + (os.fsdecode(name) if isinstance(name, bytes) else name) for name in files.tolist()]
    return torch.from_numpy(np.ascontiguousarray(features, dtype=np.float32)), names
