"""`open_images`: from what a person types after `--data` to an `ImageSet`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

from adasim.data.images import ImageSet, distinct_classes
from adasim.data.sources.decode import EXTENSIONS, HEIC_ENDINGS
from adasim.data.sources.folder import open_folder
from adasim.data.sources.listing import Listing
from adasim.data.sources.npz import open_npz
from adasim.registry import SOURCES, is_path
from adasim.util.errors import MissingSplitError, UserError

_BUILT_IN = "a folder of images, an .npz file, hf:NAME or hf:FOLDER, and synthetic[:COUNT] (generated images)"
_UNPACKED_BY = {
    ".zip": "unzip {here} -d {there}",
    **dict.fromkeys((".tar", ".tar.gz", ".tgz"), "mkdir -p {there} && tar -xf {here} -C {there}"),
}
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
