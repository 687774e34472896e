"""`open_images`: from what a person types after `--data.source` to an `ImageSet`."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adasim.data.contents import UNREADABLE, hash_bytes, hash_file, open_regular
from adasim.data.images import ImageSet, Unreadable
from adasim.data.sources.decode import open_image
from adasim.data.sources.folder import open_folder
from adasim.data.sources.found import few
from adasim.data.sources.npz import open_npz
from adasim.data.synthetic.dataset import embedded
from adasim.errors import UserError
from adasim.rgb import to_tensor

EMBEDDED_COUNT = 10_000
KINDS = "a folder of images, an .npz file, hf:NAME or hf:FOLDER, and embedded[:COUNT] (generated images)"


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
    if not source:
        raise UserError(
            "Which images? Name them with --data, as in: adasim pretrain dino-vit-s16 --data ~/photos --out "
            f"runs/photos. Known are {KINDS}."
        )
    kind, _, rest = source.partition(":")
    if kind == "embedded":
        return _embedded(source, rest, size, split, seed)
    if kind == "hf":
        return _hugging_face(rest, split)
    if source.endswith(".npz"):
        return open_npz(source, split)
    if os.path.isfile(source):
        raise UserError(f"{source} is a file of a kind that is not known. Known are {KINDS}.")
    return open_folder(source, split)


def _embedded(source: str, count: str, size: int, split: str, seed: int) -> ImageSet:
    if count and not (count.isdecimal() and int(count)):
        raise UserError(
            f"data.source={source}: the count must be a whole number above 0, as in embedded:5000."
        )
    number = int(count) if count else EMBEDDED_COUNT
    if split == "test":  # a fifth, but enough for a figure to mean something
        number = max(256, number // 5)
    images = embedded(number, size, split, seed)
    images.place = f"{source} (generated patterns, no photographs)"
    return images


class HuggingFaceImages(ImageSet):
    """One split of a Hugging Face data set, decoded on demand."""

    def __init__(self, name: str, rows: Any, image: str, label: str | None) -> None:
        import datasets

        self.name = name
        # Undecoded: the library would open files of every format that PIL knows.
        self._rows = rows.cast_column(image, datasets.Image(decode=False))
        self._mark = rows._fingerprint
        self._image = image
        self.others: dict[str, int] = {}  # how many images the data set's other splits have
        if label is not None:
            self.labels = torch.tensor(rows[label][:], dtype=torch.int64)
            self.classes = list(rows.features[label].names)
        else:
            self.classes = []

    def __len__(self) -> int:
        return len(self._rows)

    def load(self, i: int) -> Tensor:
        try:
            stored = self._rows[int(i)][self._image]
            data = stored["bytes"]
            with open_regular(stored["path"]) if data is None else io.BytesIO(data) as file:
                return to_tensor(open_image(file))
        except Exception as error:  # as with files: decoders raise nearly anything
            raise Unreadable(self.where(i), f"{error} ({type(error).__name__})") from None

    def listing(self) -> list[str]:
        return [f"{self.name} {len(self)} rows, fingerprint {self._mark}"]

    def unused(self) -> str:
        counts = [f"{count:,} in {split}" for split, count in self.others.items()]
        return f"{few(counts)} are not used" if counts else ""

    def content(self, i: int, whole: bool = False) -> str:
        try:
            stored = self._rows[int(i)][self._image]
            return (
                hash_bytes(stored["bytes"])
                if stored["bytes"] is not None
                else hash_file(stored["path"], whole)
            )
        except Exception:  # a damaged table; loading the image will say why
            return UNREADABLE

    def cache_key(self) -> str:
        states = [os.stat(file["filename"]) for file in self._rows.cache_files]
        marks = [(state.st_size, state.st_mtime_ns, state.st_ctime_ns) for state in states]
        return hash_bytes(f"{self.fingerprint()} {marks}".encode())


def _hugging_face(name: str, split: str) -> ImageSet:
    try:
        import datasets
    except ImportError:
        raise UserError(f"hf:{name} needs the datasets library: pip install 'adasim[hf]'.") from None
    try:
        opened = datasets.load_from_disk(name) if os.path.isdir(name) else datasets.load_dataset(name)
    except Exception as error:
        raise UserError(f"hf:{name} cannot be opened: {error}") from None
    part, others = "", {}
    if isinstance(opened, datasets.DatasetDict):
        wanted = ("train",) if split == "train" else ("test", "validation", "valid", "val")
        key = next((k for k in wanted if k in opened), None)
        if key is None:
            raise UserError(f"hf:{name} has no {split} split, only {', '.join(opened)}.")
        others = {k: len(rows) for k, rows in opened.items() if k != key}
        opened, part = opened[key], key
    elif split == "test":
        raise UserError(
            f"hf:{name} is one split without test images. Save a DatasetDict with train and test."
        )
    images = [c for c, kind in opened.features.items() if isinstance(kind, datasets.Image)]
    labels = [c for c, kind in opened.features.items() if isinstance(kind, datasets.ClassLabel)]
    if not images:
        raise UserError(f"hf:{name} has no image column: its columns are {', '.join(opened.features)}.")
    found = HuggingFaceImages(Path(name).name, opened, images[0], labels[0] if labels else None)
    found.place, found.split, found.others = f"hf:{name}", part, others
    return found
