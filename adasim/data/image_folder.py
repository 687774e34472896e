"""A folder of image files: listed once, in a fixed order; decoded on demand to 8-bit RGB."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adasim.data.decode import EXTENSIONS, HEIC_ENDINGS, decode, decode_reduced, hash_file
from adasim.data.images import ImageSet, Reduction, sample_ids
from adasim.data.listing import GONE, Listing, scan
from adasim.util.errors import MissingSplitError, UserError
from adasim.util.terminal import few, printable

SPLIT_FOLDERS = {"train": ("train", "training"), "test": ("test", "val", "valid", "validation")}
_CHECKED_FILES = 256
_CONVERTIBLE = {
    *("avif", "jxl", "jp2", "j2k", "jpx", "psd", "svg", "eps", "exr", "tga", "ico", "pdf"),
    *("raw", "dng", "cr2", "cr3", "nef", "arw", "orf", "rw2", "dcm"),
}
_WORDS = {  # of what is left out for another reason than its ending
    ".": ("file without an ending", "files without an ending"),
    "special": ("pipe, socket or device", "pipes, sockets or devices"),
    "loop": ("link that leads back to a folder above it", "links that lead back to a folder above them"),
    "folder": ("folder named like an image", "folders named like images"),
    "closed": ("folder that cannot be opened", "folders that cannot be opened"),
}


class FolderImages(ImageSet):
    """Every image file under a folder, depth first, names sorted: the order of torchvision's ImageFolder.

    Classes are the first-level folders, or the folders that hold images where those are deeper. When any image lies
    directly in the folder, there are no classes. Links are followed, but not back to a folder above them.

    Args:
        root: the folder.
        name: for people; else the folder's own.
        listing: what is in the folder, where that is known already; else it is looked for.
    """

    def __init__(self, root: str | Path, name: str | None = None, listing: Listing | None = None) -> None:
        self.root = str(root)
        self.name = name or Path(root).name
        self.place = self.root
        self.files = scan(os.fsencode(self.root)) if listing is None else listing
        self.left_out = left_out_words(Counter(self.files.left_out))
        if not len(self.files):
            has_heic = any(f".{ending}" in self.files.left_out for ending in HEIC_ENDINGS)
            raise UserError(
                f"No images in {self.root}: looked for files ending in {', '.join(sorted(EXTENSIONS))}"
                f"{' and found ' + self.left_out if self.left_out else ''}."
                f"{'' if has_heic else ' Name the folder that holds them.'}"
            )
        self.labels, self.classes, self.class_note = _classes(self.files)
        self._fingerprint = ""

    def __len__(self) -> int:
        return len(self.files)

    def load(self, i: int) -> Tensor:
        return decode(self.where(i))

    def load_reduced(self, i: int, reduction: Reduction) -> tuple[Tensor, int]:
        return decode_reduced(self.where(i), reduction)

    def where(self, i: int) -> str:
        return os.path.join(self.root, os.fsdecode(self.files.path(i)))

    def listing(self) -> list[str]:
        return list(self.files.lines())

    def listing_bytes(self) -> Iterator[bytes]:
        for lines in self.files.lines_by_folder():
            lines.append("")
            yield "\n".join(lines).encode("utf-8", "surrogateescape")

    def times(self) -> list[int]:
        return self.files.states[:, 1].tolist()

    def content(self, i: int, whole: bool = False) -> str:
        return hash_file(self.where(i), whole)

    def fingerprint(self) -> str:
        # Once: a million lines are to be hashed.
        self._fingerprint = self._fingerprint or super().fingerprint()
        return self._fingerprint

    def cache_key(self) -> str:
        # The change time is the file system's own: a renaming sets it, and no program can set it back.
        states = self.files.states.numpy().tobytes()
        return hashlib.sha256(self.fingerprint().encode() + states).hexdigest()

    def check_there(self) -> None:
        """Look for some of the files where another process has listed them; a `UserError` if any is missing."""
        ids = sample_ids(len(self), _CHECKED_FILES)
        known = (i for i in ids if tuple(self.files.states[i].tolist()) != GONE)
        missing = [self.where(i) for i in known if not os.path.exists(self.where(i))]
        if missing:
            raise UserError(
                f"{len(missing):,} of {len(ids):,} images that were looked for are missing "
                f"({printable(missing[0])}), though the first process of the run has found them. Mount the data "
                f"there, or copy all of them."
            )


class _Divided(FolderImages):
    """The part of a folder that is one split of it."""

    def __init__(self, root: str, part: str, listing: Listing | None) -> None:
        super().__init__(os.path.join(root, part), Path(root).name, listing)
        self.split = part
        self._whole = root

    def more_splits(self, known: set[str]) -> list[ImageSet]:
        names = [name for names in SPLIT_FOLDERS.values() for name in names if name not in known]
        there = [name for name in names if os.path.isdir(os.path.join(self._whole, name))]
        return [_Divided(self._whole, name, None) for name in there]

    def unused(self, also: Collection[str] = ()) -> str:
        places: Counter[str] = Counter()
        for folder, start, stop in scan(os.fsencode(self._whole), without=self.split).by_folder():
            top = os.fsdecode(folder.partition(b"/")[0])
            if start < stop and top not in also:
                places[f"in {printable(top)}/" if top else "directly in it"] += stop - start
        if not places:
            return ""
        counts = [f"{count:,} {place}" for place, count in places.most_common()]
        return (
            f"{few(counts)} are not among them; to use all, put a link to {printable(self._whole)} into an empty "
            f"folder and name that folder"
        )


def open_folder(root: str, split: str, known: Callable[[str], Listing | None] | None = None) -> FolderImages:
    """The images of this split where the folder is divided into train/ and test/ (or val/), else all of them.

    Args:
        root: the folder.
        split: "train" or "test".
        known: gives what is in a folder if that is known, or None; it is then looked for.
    """
    if not os.path.isdir(root):
        raise UserError(f"No such folder: {root}. Check its spelling.")
    if Path(root).name in ("", ".."):  # `.` and its like name nothing
        root = os.path.abspath(root)
    parts = {
        key: next((n for n in names if os.path.isdir(os.path.join(root, n))), None)
        for key, names in SPLIT_FOLDERS.items()
    }
    known = known or (lambda folder: None)
    if parts["train"] and parts["test"]:
        part = parts[split] or ""
        return _Divided(root, part, known(os.path.join(root, part)))
    if split == "test":
        raise MissingSplitError(
            f"{root} has no test images: it is not divided into train/ and test/ (or val/). "
            f"Divide it, or name a folder of test images."
        )
    return FolderImages(root, listing=known(root))


def _classes(files: Listing) -> tuple[Tensor | None, list[str], str]:
    """Labels (N,), the names of the classes, and a sentence on them; no labels where an image lies in no folder."""
    if files.counts[0]:
        return None, [], ""
    holders: list[bytes] = []  # the uppermost folders with images of their own
    inside: list[int] = []  # of each folder, the last of these: what is below one follows it
    for folder, start, stop in files.by_folder():
        if start < stop and not (holders and folder.startswith(holders[-1])):
            holders.append(folder)
        inside.append(len(holders) - 1)
    chosen, note = _class_folders([holder[:-1] for holder in holders], files.first_level_classes)
    names = sorted(set(chosen))
    number = {name: c for c, name in enumerate(names)}
    labels = np.repeat(np.array([number[name] for name in chosen])[inside], files.counts)
    return torch.from_numpy(labels), [os.fsdecode(name) for name in names], note


def _class_folders(holders: list[bytes], first_level: bool) -> tuple[list[bytes], str]:
    """The class of each uppermost folder with images of its own, and a sentence where people may expect another.

    First-level folders are the classes, each with all that is below it. Where they hold no images themselves, as in
    SUN397's `a/abbey/1.jpg`, the folders that do are the classes. Where there are two ways to read that, it is the
    upper level, with a warning.
    """
    tops = [holder.partition(b"/")[0] for holder in holders]
    if first_level or len(set(tops)) == len(tops):
        return tops, ""
    shared = os.path.commonpath(holders)
    level = shared.count(b"/") + 2 if shared else 1  # the first on which they differ
    upper = [b"/".join(holder.split(b"/")[:level]) for holder in holders]
    below = [holder[len(top) + 1 :] for holder, top in zip(holders, upper, strict=True)]
    shown = [printable(os.fsdecode(top)) for top in upper]
    repeated = [name for name, count in Counter(below).items() if count > 1]
    if len(set(upper)) == len(upper) or (all(below) and not repeated):
        chosen = upper if len(set(upper)) == len(upper) else holders
        example = printable(os.fsdecode(chosen[0]))
        return chosen, f"The classes are the folders that hold images, such as {example}."
    if all(below):
        places = few(top for top, rest in zip(shown, below, strict=True) if rest == repeated[0])
        doubt = f"there is a folder {printable(os.fsdecode(repeated[0]))} in each of {places}"
    else:
        other = next(top for top, rest in zip(shown, below, strict=True) if rest)
        doubt = f"{shown[below.index(b'')]} holds images itself, {other} only in folders below it"
    return upper, (
        f"Warning: {doubt}. The classes are taken to be {few(dict.fromkeys(shown))}; if they are others, put their "
        f"folders side by side."
    )


def left_out_words(counts: Counter[str]) -> str:
    """`9 .heic (to read them: pip install pillow-heif), 3 .cr2 (convert them to JPEG or PNG), 3 .txt`"""
    words = []
    for what, count in sorted(counts.items(), key=lambda item: (not _hint(item[0]), -item[1], item[0])):
        one, many = _WORDS.get(what, (what, what))
        words.append(f"{count:,} {printable(one if count == 1 else many)}{_hint(what)}")
    return few(words, 6)


def _hint(what: str) -> str:
    """What to do about files with this ending that are images, too."""
    ending = what.removeprefix(".")
    if ending in HEIC_ENDINGS:
        return " (to read them: pip install pillow-heif)"
    return " (convert them to JPEG or PNG)" if ending in _CONVERTIBLE else ""
