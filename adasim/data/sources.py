"""`open_images`: from what a person types after `--data.source` to an `ImageSet`."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adasim.data.embedded import embedded
from adasim.data.folder import FolderImages, find_split, to_tensor
from adasim.data.images import ArrayImages, ImageSet, Unreadable
from adasim.errors import UserError

EMBEDDED_COUNT = 10_000
KINDS = "a folder of images, an .npz file, hf:NAME or hf:FOLDER, or embedded[:COUNT]"


def open_images(source: str, *, size: int = 32, split: str = "train", seed: int = 0) -> ImageSet:
    """Open a data set by name.

    Args:
        source: a folder of images (class folders, nested or flat; train/ and test/ or val/ inside, if
            there are any, are the splits), an `.npz` file, `hf:NAME` or `hf:FOLDER`, or `embedded[:COUNT]`.
        size: side in pixels of the images that `embedded` draws; the others keep theirs.
        split: "train" or "test".
        seed: names the randomness of `embedded`.
    """
    if split not in ("train", "test"):
        raise UserError(f"split={split} must be train or test.")
    kind, _, rest = source.partition(":")
    if kind == "embedded":
        return _embedded(source, rest, size, split, seed)
    if kind == "hf":
        return _hugging_face(rest, split)
    if source.endswith(".npz"):
        return _npz(source, split)
    if os.path.isfile(source):
        raise UserError(f"{source} is a file of a kind that is not known. Give {KINDS}.")
    return FolderImages(find_split(source, split), Path(source).name)


def _embedded(source: str, count: str, size: int, split: str, seed: int) -> ImageSet:
    if count and not (count.isdecimal() and int(count)):
        raise UserError(
            f"data.source={source}: the count must be a whole number above 0, as in embedded:5000."
        )
    number = int(count) if count else EMBEDDED_COUNT
    if split == "test":  # a fifth, but enough for a figure to mean something
        number = max(256, number // 5)
    return embedded(number, size, split, seed)


def _npz(path: str, split: str) -> ImageSet:
    """`images` (uint8; NHWC, NCHW or NHW), `labels`, `masks`; or x_train, y_train, x_test, y_test."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if _wanted(name, split)}
            names = archive.files
    except FileNotFoundError:
        raise UserError(f"No such file: {path}. Check --data.source.") from None
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read as an .npz file: {error}") from None
    divided = "x_train" in names
    pixels = arrays.get(f"x_{split}" if divided else "images")
    if pixels is None or (split == "test" and not divided):
        raise UserError(
            f"{path} has no {split} images: it needs the arrays x_train and x_test"
            f"{' or images' if split == 'train' else ''}, and has {', '.join(names) or 'none'}."
        )
    name = Path(path).stem
    images = _to_nchw(path, pixels)
    labels = arrays.get(f"y_{split}" if divided else "labels")
    masks = None if divided else arrays.get("masks")
    for what, array in (("labels", labels), ("masks", masks)):
        if array is not None and len(array) != len(images):
            raise UserError(f"{path} has {len(images)} images but {len(array)} {what}: they must be as many.")
    return ArrayImages(
        name,
        images,
        None if labels is None else torch.from_numpy(_to_labels(path, labels)),
        masks=None if masks is None else torch.from_numpy(np.ascontiguousarray(masks, dtype=np.uint8)),
    )


def _wanted(name: str, split: str) -> bool:
    return name in ("images", "labels", "masks", f"x_{split}", f"y_{split}")


def _to_nchw(path: str, pixels: np.ndarray) -> Tensor:
    shape = pixels.shape
    if pixels.dtype != np.uint8 or len(shape) not in (3, 4) or not len(pixels):
        raise UserError(
            f"{path}: the images are {pixels.dtype} of shape {shape}; they must be uint8 of shape "
            f"(N, H, W, C), (N, C, H, W) or (N, H, W)."
        )
    images = torch.from_numpy(np.ascontiguousarray(pixels))
    if images.ndim == 3:
        return images[:, None]
    if shape[3] in (1, 3):
        return images.permute(0, 3, 1, 2).contiguous()
    if shape[1] in (1, 3):
        return images
    raise UserError(f"{path}: the images of shape {shape} have neither 1 nor 3 channels.")


def _to_labels(path: str, labels: np.ndarray) -> np.ndarray:
    flat = labels.reshape(len(labels), -1)
    if flat.shape[1] != 1 or not np.issubdtype(labels.dtype, np.integer) or flat.min() < 0:
        raise UserError(f"{path}: the labels must be one whole number from 0 up for each image.")
    return flat[:, 0].astype(np.int64)


class HuggingFaceImages(ImageSet):
    """One split of a Hugging Face data set, decoded on demand."""

    def __init__(self, name: str, rows: Any, image: str, label: str | None) -> None:
        self.name = name
        self._rows = rows
        self._image = image
        if label is not None:
            self.labels = torch.tensor(rows[label][:], dtype=torch.int64)
            self.classes = list(rows.features[label].names)
        else:
            self.classes = []

    def __len__(self) -> int:
        return len(self._rows)

    def load(self, i: int) -> Tensor:
        try:
            return to_tensor(self._rows[int(i)][self._image])
        except Exception as error:  # as with files: decoders raise nearly anything
            raise Unreadable(self.where(i), f"{error} ({type(error).__name__})") from None

    def listing(self) -> list[str]:
        return [f"{self.name} {len(self)} rows, fingerprint {self._rows._fingerprint}"]


def _hugging_face(name: str, split: str) -> ImageSet:
    try:
        import datasets
    except ImportError:
        raise UserError(f"hf:{name} needs the datasets library: pip install 'adasim[hf]'.") from None
    try:
        opened = datasets.load_from_disk(name) if os.path.isdir(name) else datasets.load_dataset(name)
    except Exception as error:
        raise UserError(f"hf:{name} cannot be opened: {error}") from None
    if isinstance(opened, datasets.DatasetDict):
        wanted = ("train",) if split == "train" else ("test", "validation", "valid", "val")
        key = next((k for k in wanted if k in opened), None)
        if key is None:
            raise UserError(f"hf:{name} has no {split} split, only {', '.join(opened)}.")
        opened = opened[key]
    elif split == "test":
        raise UserError(
            f"hf:{name} is one split without test images. Save a DatasetDict with train and test."
        )
    images = [c for c, kind in opened.features.items() if isinstance(kind, datasets.Image)]
    labels = [c for c, kind in opened.features.items() if isinstance(kind, datasets.ClassLabel)]
    if not images:
        raise UserError(f"hf:{name} has no image column: its columns are {', '.join(opened.features)}.")
    return HuggingFaceImages(Path(name).name, opened, images[0], labels[0] if labels else None)
