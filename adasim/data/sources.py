"""From what a person types after `--data` to an `ImageSet`: opened, described in words, rejected images left out."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection
from copy import copy
from pathlib import Path

import torch

from adasim.data.decode import EXTENSIONS, HEIC_ENDINGS
from adasim.data.image_folder import open_folder
from adasim.data.images import ImageSet, Subset, distinct_classes
from adasim.data.listing import Listing
from adasim.data.npz import open_npz
from adasim.registry import SOURCES, is_path
from adasim.util.csv import read_csv
from adasim.util.errors import MissingSplitError, UserError
from adasim.util.terminal import printable, spelled

_BUILT_IN = "a folder of images, an .npz file, hf:NAME or hf:FOLDER, and synthetic[:COUNT] (generated images)"
_UNPACKED_BY = {
    ".zip": "unzip {here} -d {there}",
    **dict.fromkeys((".tar", ".tar.gz", ".tgz"), "mkdir -p {there} && tar -xf {here} -C {there}"),
}
REJECT = "reject"
"""The verdict that leaves an image out."""
_TOLD = ("hf", "synthetic", "python")  # kinds that `_BUILT_IN` names, or that nobody types


def open_images(
    source: str,
    *,
    size: int = 32,
    split: str = "train",
    seed: int = 0,
    known: Callable[[str], Listing | None] | None = None,
) -> ImageSet:
    """Open a data set by name.

    Args:
        source: a folder of images (class folders, nested or flat; train/ and test/ or val/ inside, if there are any,
            are the splits), an `.npz` file, or `KIND:...` for a kind of `adasim.registry.SOURCES`: `hf:NAME` or
            `hf:FOLDER`, `synthetic[:COUNT]`, or one from a plug-in.
        size: side in pixels of the images that `synthetic` draws; files keep theirs.
        split: "train" or "test".
        seed: random seed of `synthetic`.
        known: of a folder of images, gives what is in it if that is known, so that it need not be looked for.
    """
    if split not in ("train", "test"):
        raise UserError(f"split={split} must be train or test.")
    if not source:
        raise UserError(
            "Which images? Name them with --data, as in: adasim pretrain dino-vit-s16 --data ~/photos --out "
            f"runs/photos. Known are {_known()}."
        )
    kind, _, rest = source.partition(":")
    if kind in SOURCES:
        try:
            return _opened(source, SOURCES[kind](rest, size=size, split=split, seed=seed))
        except UserError as error:
            if split == "test" and kind not in _TOLD:  # a plug-in may say it by any UserError
                raise MissingSplitError(str(error)) from None
            raise
    if source.endswith(".npz"):
        return open_npz(source, split)
    if os.path.isfile(source):
        raise _one_file(source)
    if not is_path(source):
        raise UserError(
            f"{source} is no folder, and data of the kind {kind!r} are not known. Known are {_known()}. A kind "
            f"from a file of your own needs --plugin FILE."
        )
    return open_folder(source, split, known)


def is_folder(source: str) -> bool:
    """Whether a source is a folder of image files."""
    return is_path(source) and not source.endswith(".npz") and os.path.isdir(source)


def _one_file(source: str) -> UserError:
    """What to do with a file where a folder is expected."""
    path = Path(source)
    archive = next((ending for ending in _UNPACKED_BY if path.name.lower().endswith(ending)), None)
    if archive is not None:
        folder = path.with_name(path.name[: -len(archive)] or "images")
        here, there = shlex.quote(source), shlex.quote(str(folder))
        command = _UNPACKED_BY[archive].format(here=here, there=there)
        return UserError(f"{source} is an archive. Unpack it with `{command}`, then name {there}.")
    if path.suffix[1:].lower() in (*EXTENSIONS, *HEIC_ENDINGS):
        return UserError(f"{source} is one image. Name its folder: {shlex.quote(str(path.parent))}")
    return UserError(f"{source} is a file of a kind that is not known. Known are {_known()}.")


def _known() -> str:
    others = [f"{name}:..." for name in SOURCES.names() if name not in _TOLD]
    return ", ".join([_BUILT_IN, *others])


def _opened(source: str, images: object) -> ImageSet:
    """What a source's function gave; a name, a place and names of classes are filled in where it left them out."""
    if not isinstance(images, ImageSet):
        raise UserError(
            f"What opens {source} gave no ImageSet but {type(images).__name__}. Let it return one; "
            f"adasim.data.as_images makes one of a tensor or a Dataset."
        )
    images.name = images.name or source
    images.place = images.place or source
    images.classes = distinct_classes(images.labels, images.classes)
    return images


def describe(images: ImageSet, *, used: Collection[str] | None = ()) -> str:
    """`1,203 images in 2 classes (cat, dog) from photos/train (its split train; 300 in test/ are not among them).
    Left out: 9 .heic (to read them: pip install pillow-heif), 3 .txt.`

    Args:
        used: other splits of the source that are used, too, so that only what is in none of them is named; with None,
            nothing is.
    """
    labelled = "without labels"
    if images.labels is not None:
        count = len(images.classes)
        names = f" ({', '.join(map(printable, images.classes))})" if count <= 4 else ""
        labelled = f"in {count:,} {'class' if count == 1 else 'classes'}{names}"
    text = f"{len(images):,} {'image' if len(images) == 1 else 'images'} {labelled}"
    if images.place:
        text += f" from {printable(images.place)}"
    notes = [f"its split {images.split}"] if images.split else []
    if used is not None and (rest := images.unused(used)):
        notes.append(rest)
    text += f" ({'; '.join(notes)})." if notes else "."
    text += f" {images.class_note}" if images.class_note else ""
    return text + (f" Left out: {images.left_out}." if images.left_out else "")


# ---- images left out by a file of verdicts ----


def file_name(images: ImageSet, i: int) -> str:
    """Where image i is, from the data set's folder on; `name[i]` where images are no files."""
    where, folder = images.where(i), images.place.rstrip(os.sep) + os.sep
    inside = images.place and where.startswith(folder)
    return where.removeprefix(folder).lstrip(os.sep) if inside else where


def file_key(images: ImageSet, i: int) -> str:
    """What image i is called in lists: its path below the source, split included, or `name[i]`."""
    name = file_name(images, i)
    return f"{images.split}/{name}" if images.split else name


def leave_out(images: ImageSet, verdicts: str | Path | None) -> ImageSet:
    """The images without those that a file of verdicts rejects; all of them where no file is named.

    Where none of its names fits, all images stay, and `left_out` says so.
    """
    rejected = _read_rejected(verdicts) if verdicts else set()
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


def _read_rejected(path: str | Path) -> set[str]:
    """The names of the images that a file of verdicts rejects."""
    columns, rows = read_csv(Path(path))
    if not {"file", "verdict"} <= set(columns):
        raise UserError(
            f"{path} is no list of verdicts: it has no columns file and verdict. Export one from the page of "
            f"adasim explore."
        )
    return {row["file"] for row in rows if row.get("verdict") == REJECT}
