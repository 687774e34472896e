"""From what a person gives as data, a name or an object in Python, to an `ImageSet`; what it holds, in words; images
rejected or relabelled by verdict."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from adasim.config import DataConfig
from adasim.data.datasets import DatasetImages, HuggingFaceImages, is_hugging_face, labels_of, to_8_bits
from adasim.data.image_folder import Listing, open_folder
from adasim.data.images import ArrayImages, ImageSet, Subset, channels_first, distinct_classes, open_npz
from adasim.registry import SOURCES, is_path
from adasim.util.csv import read_csv
from adasim.util.errors import MissingSplitError, UserError
from adasim.util.rgb import EXTENSIONS, HEIC_ENDINGS
from adasim.util.terminal import printable, spelled

_BUILT_IN = "a folder of images, an .npz file, hf:NAME or hf:FOLDER, and synthetic[:COUNT] (generated images)"
_OWN_KINDS = ("hf", "synthetic", "python")
_UNPACKED_BY = {
    ".zip": "unzip {here} -d {there}",
    **dict.fromkeys((".tar", ".tar.gz", ".tgz"), "mkdir -p {there} && tar -xf {here} -C {there}"),
}
REJECT = "reject"
"""The verdict that leaves an image out."""
RELABEL = "relabel"
VERDICTS = (REJECT, RELABEL, "unsure", "keep")
RESUME_ADVICE = "Hand over the images that the run began with: data=... in Python"
ImagesLike = str | ImageSet | Tensor | np.ndarray | Dataset[Any] | Sequence[Any]
"""What `as_images` takes."""


def open_images(
    source: str, *, size: int = 32, split: str = "train", seed: int = 0, listing: Listing | None = None
) -> ImageSet:
    """Open a data set by name.

    Args:
        source: a folder of images (class folders, nested or flat; train/ and test/ or val/ inside, if there are any,
            are the splits), an `.npz` file, or `KIND:...` for a kind of `adasim.registry.SOURCES`: `hf:NAME` or
            `hf:FOLDER`, `synthetic[:COUNT]`, or one from a plug-in.
        size: side in pixels of the images that `synthetic` draws; files keep theirs.
        split: "train" or "test".
        seed: random seed of `synthetic`.
        listing: what is in a folder of images, if another process has looked already.
    """
    if split not in ("train", "test"):
        raise UserError(f"split={split} must be train or test.")
    others = [f"{name}:..." for name in SOURCES.names() if name not in _OWN_KINDS]
    known = f"Known are {', '.join([_BUILT_IN, *others])}."
    if not source:
        raise UserError(
            "Which images? Name them with --data, as in: adasim pretrain dino-vit-s16 --data ~/photos --out "
            f"runs/photos. {known}"
        )
    kind, _, rest = source.partition(":")
    if kind in SOURCES:
        try:
            return _checked(source, SOURCES[kind](rest, size=size, split=split, seed=seed))
        except UserError as error:
            if split == "test" and kind not in _OWN_KINDS:  # a plug-in may say it by any UserError
                raise MissingSplitError(str(error)) from None
            raise
    if source.endswith(".npz"):
        return open_npz(source, split)
    if os.path.isfile(source):
        raise UserError(f"{source} is {_one_file(source) or f'a file of a kind that is not known. {known}'}")
    if not is_path(source):
        raise UserError(
            f"{source} is no folder, and data of the kind {kind!r} are not known. {known} A kind from a file of your "
            f"own needs --plugin FILE."
        )
    return open_folder(source, split, listing)


def as_images(data: ImagesLike, *, size: int = 32) -> ImageSet:
    """Images of any make as an `ImageSet`.

    Args:
        data: a source string (see `open_images`); an `ImageSet`, which is returned as it is; a tensor or numpy array
            of images, uint8 (N, C, H, W) or (N, H, W), where an array may also be (N, H, W, C); or a map-style data
            set whose items are PIL images, tensors (C, H, W) or (H, W), or arrays that may also be (H, W, C), alone
            or first in a tuple; or a Hugging Face `Dataset`. C is 1 or 3. Floats must lie in 0..1 and are rounded to
            8 bits. The labels of a data set are its list of them, under any name that torchvision has for it, those
            of a `TensorDataset` its second tensor; all items are not read for them, which could take hours. A
            `Subset` and a `ConcatDataset` have those of what they are made of.
        size: side in pixels of the images that the source `synthetic` draws.

    >>> images = as_images(torch.zeros(10, 3, 8, 8, dtype=torch.uint8))
    >>> len(images), tuple(images.load(0).shape)
    (10, (3, 8, 8))
    """
    kind = type(data).__name__
    images: ImageSet
    if isinstance(data, str):
        return open_images(data, size=size)
    if isinstance(data, ImageSet):
        images = _completed(data, kind)
    elif isinstance(data, Tensor | np.ndarray):
        images = _from_array(data, None)
    elif isinstance(data, TensorDataset) and data.tensors[0].ndim > 2:
        images = _from_array(data.tensors[0], labels_of(data)[0])
    elif is_hugging_face(data):
        images = HuggingFaceImages(f"a {kind} in Python", data)
        images.name = kind
    elif not hasattr(data, "__len__") or isinstance(data, Mapping | bytes | IterableDataset):
        raise UserError(
            f"data is a {kind}, which holds no images by number. Give a source string, an ImageSet, a tensor, or a "
            f"data set with __len__ and __getitem__."
        )
    else:
        images = DatasetImages(data)
    if not len(images):
        raise UserError(f"There are no images in data ({kind}).")
    return images


def _from_array(data: Tensor | np.ndarray, labels: Tensor | None) -> ArrayImages:
    try:
        pixels = channels_first(to_8_bits(data), channels_last=isinstance(data, np.ndarray))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"data of shape {tuple(data.shape)} and type {data.dtype} cannot be used: {error}. Give uint8 of shape "
            f"(N, C, H, W) or (N, H, W), with C of 1 or 3."
        ) from None
    what = "a tensor" if isinstance(data, Tensor) else "an array"
    images = ArrayImages(what.split()[1], pixels, labels)
    images.place = f"{what} in Python"
    return images


def source_of(data: ImagesLike) -> str:
    """What stands as `data.source` in the configuration of a run on these images: `python:Tensor`."""
    return data if isinstance(data, str) else f"python:{type(data).__name__}"


def is_from_python(source: str) -> bool:
    """Whether a run's `data.source` says that its images came from Python."""
    return source.startswith("python:")


@SOURCES.register("python")
def refuse_by_name(what: str, *, size: int, split: str, seed: int) -> ImageSet:
    """Such images have a name in the configuration of their run, but nothing can open them by it."""
    raise UserError(
        f"The images python:{what} were handed over in Python, and no name opens them. Hand them over again, as in "
        f"adasim.pretrain(config, out, data=images, resume=True); an evaluation takes others with --data."
    )


def is_folder(source: str) -> bool:
    """Whether a source is a folder of image files."""
    return is_path(source) and not source.endswith(".npz") and os.path.isdir(source)


def _one_file(source: str) -> str:
    """What to do with a file where a folder is expected; empty if it is neither archive nor image."""
    path = Path(source)
    for ending, command in _UNPACKED_BY.items():
        if path.name.lower().endswith(ending):
            here, there = (shlex.quote(name) for name in (source, source[: -len(ending)]))
            return (
                f"an archive. Unpack it with `{command.format(here=here, there=there)}`, then name {there}."
            )
    if path.suffix[1:].lower() in (*EXTENSIONS, *HEIC_ENDINGS):
        return f"one image. Name its folder: {shlex.quote(str(path.parent))}"
    return ""


def _checked(source: str, images: object) -> ImageSet:
    """What a source's function gave; what it left out is filled in."""
    if not isinstance(images, ImageSet):
        raise UserError(
            f"What opens {source} gave no ImageSet but {type(images).__name__}. Let it return one; "
            f"adasim.data.as_images makes one of a tensor or a Dataset."
        )
    images.place = images.place or source
    return _completed(images, source)


def _completed(images: ImageSet, name: str) -> ImageSet:
    """A data set of somebody's own, with a name and names of classes where it left them out."""
    images.name = images.name or name
    images.classes = distinct_classes(images.labels, images.classes)
    return images


def describe(images: ImageSet, *, used: Collection[str] | None = ()) -> str:
    """`1,203 images in 2 classes (cat, dog) from photos/train (its split train; 300 in test/ are not among them).
    Left out: 9 .heic (to read them: pip install pillow-heif), 3 .txt.`

    Args:
        used: other splits of the source that are used, too, so that only what is in none of them is named; with None,
            nothing is.
    """
    text = f"{len(images):,} {'image' if len(images) == 1 else 'images'}"
    if images.labels is None:
        text += " without labels"
    else:
        count = len(images.classes)
        names = f" ({', '.join(map(printable, images.classes))})" if count <= 4 else ""
        bare = int((images.labels < 0).sum())
        some = f", {bare:,} of them without a label," if bare else ""
        text += f" in {count:,} {'class' if count == 1 else 'classes'}{names}{some}"
    if images.place:
        text += f" from {printable(images.place)}"
    notes = [f"its split {images.split}" if images.split else "", "" if used is None else images.unused(used)]
    text += f" ({'; '.join(filter(None, notes))})." if any(notes) else "."
    text += f" {images.class_note}" if images.class_note else ""
    return text + (f" Left out: {images.left_out}." if images.left_out else "")


# ---- a file of verdicts ----


def file_name(images: ImageSet, i: int) -> str:
    """Where image i is, from the data set's folder on; `name[i]` where images are no files."""
    where, folder = images.where(i), images.place.rstrip(os.sep) + os.sep
    inside = images.place and where.startswith(folder)
    return where.removeprefix(folder).lstrip(os.sep) if inside else where


def file_key(images: ImageSet, i: int) -> str:
    """What image i is called in lists: its path below the source, split included, or `name[i]`."""
    name = file_name(images, i)
    return f"{images.split}/{name}" if images.split else name


def verdict_rows(path: Path) -> list[dict[str, str]]:
    """The rows with a verdict of a file that the page of `adasim explore` has exported."""
    columns, rows = read_csv(path)
    if not {"file", "verdict"} <= set(columns):
        raise UserError(
            f"{path} is no list of verdicts: it has no columns file and verdict. Export one from the page of "
            f"adasim explore."
        )
    rows = [row for row in rows if row.get("file") and row.get("verdict")]
    for row in rows:
        if row["verdict"] not in VERDICTS:
            raise UserError(
                f"{path} has the verdict {printable(row['verdict'])!r} on {printable(row['file'])}. Verdicts are "
                f"{REJECT} (leave out), relabel, unsure and keep."
            )
    return rows


def read_verdicts(path: Path) -> dict[str, tuple[str, str]]:
    """{name of an image: (verdict, new label)}; of several the weightiest: leave out, then a new label."""
    weight = {REJECT: 3, RELABEL: 1}
    verdicts: dict[str, tuple[str, str]] = {}
    for row in verdict_rows(path):
        entry = (row["verdict"], row.get("new_label", ""))
        rank = [
            weight.get(verdict, 0) + bool(label)
            for verdict, label in (entry, verdicts.get(row["file"], ("", "")))
        ]
        if row["file"] not in verdicts or rank[0] > rank[1]:
            verdicts[row["file"]] = entry
    return verdicts


def with_verdicts(images: ImageSet, config: DataConfig) -> ImageSet:
    """The images as a run sees them: without those that `exclude` rejects, with the new labels of `labels`."""
    return relabel(leave_out(images, config.exclude), config.labels)


def relabel(images: ImageSet, verdicts: str | Path | None) -> ImageSet:
    """The images with the new labels that a file of verdicts gives them. A label that no image had so far is a new
    class, after the others; where images had no labels at all, the rest stay without one."""
    if not verdicts:
        return images
    given = read_verdicts(Path(verdicts))
    new = {name: label for name, (verdict, label) in given.items() if verdict == RELABEL and label}
    if not new:
        return images
    numbers = {printable(name): c for c, name in enumerate(images.classes)}
    changed = copy(images)
    changed.labels = torch.full((len(images),), -1) if images.labels is None else images.labels.clone()
    count = 0
    for i in range(len(images)):
        label = new.get(spelled(file_key(images, i)))
        if label is not None:
            changed.labels[i] = numbers.setdefault(label, len(numbers))
            count += 1
    if not count:
        return _noted(
            images,
            f"None of {len(new):,} new labels is used: they are for names like {printable(min(new))}, and images "
            f"here are called like {spelled(file_key(images, 0))}.",
        )
    changed.classes = [*images.classes, *list(numbers)[len(images.classes) :]]
    return _noted(changed, f"{count:,} {'has a new label' if count == 1 else 'have new labels'} by verdict.")


def _noted(images: ImageSet, sentence: str) -> ImageSet:
    noted = copy(images)
    noted.class_note = f"{images.class_note} {sentence}".lstrip()
    return noted


def leave_out(images: ImageSet, verdicts: str | Path | None) -> ImageSet:
    """The images without those that a file of verdicts rejects; all of them where no file is named.

    Where none of its names fits, all images stay, and `left_out` says so.
    """
    if not verdicts:
        return images
    rejected = {row["file"] for row in verdict_rows(Path(verdicts)) if row["verdict"] == REJECT}
    if not rejected:
        return images
    names = [spelled(file_key(images, i)) for i in range(len(images))]
    ids = torch.tensor([i for i, name in enumerate(names) if name not in rejected], dtype=torch.int64)
    if not len(ids):
        raise UserError(f"The verdicts reject all {len(images):,} images of {images.name}. Keep some.")
    if len(ids) == len(images):
        rest = copy(images)
        words = f"they are called like {printable(min(rejected))}, and these like {names[0]}"
        said = f"none of the {len(rejected):,} rejected by verdict ({words})"
    else:
        rest = Subset(images, ids)
        said = f"{len(images) - len(ids):,} rejected by verdict"
    rest.left_out = f"{images.left_out}, {said}" if images.left_out else said
    return rest
