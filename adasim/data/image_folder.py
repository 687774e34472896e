"""A folder of image files: which there are, what their classes are, and what is on record of them for a resume.

A million paths as Python strings take some 150 MB, and forked loader processes copy them page by page, since every
look at a string changes its count of references. In a `Listing` names lie one after another in one tensor, folders
once each. Tensors are shared by forked processes.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adasim.data.images import ImageSet, sample_ids
from adasim.util.errors import MissingSplitError, UserError
from adasim.util.rgb import EXTENSIONS, HEIC_ENDINGS, Reduction, decode, decode_reduced, hash_file
from adasim.util.terminal import few, printable

SPLIT_FOLDERS = {"train": ("train", "training"), "test": ("test", "val", "valid", "validation")}
_CHECKED_FILES = 256
_CONVERTIBLE = {
    *(".avif", ".jxl", ".jp2", ".j2k", ".jpx", ".psd", ".svg", ".eps", ".exr", ".tga", ".ico", ".pdf"),
    *(".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".dcm"),
}
_HINTS = {  # what to do about files with such an ending, which are images, too
    **dict.fromkeys(_CONVERTIBLE, " (convert them to JPEG or PNG)"),
    **{f".{ending}": " (to read them: pip install pillow-heif)" for ending in HEIC_ENDINGS},
}
_WORDS = {  # of what is left out for another reason than its ending
    ".": ("file without an ending", "files without an ending"),
    "special": ("pipe, socket or device", "pipes, sockets or devices"),
    "loop": ("link that leads back to a folder above it", "links that lead back to a folder above them"),
    "closed": ("folder that cannot be opened", "folders that cannot be opened"),
}
_GONE = (-1, -1, -1)  # the state of a link to nothing: it stays in the list, and reading it will say why


@dataclass(eq=False)
class Listing:
    """N image files in the F folders that were looked into, in the order of the walk."""

    folders: list[bytes]
    """Relative paths with a / at their end; the folder itself is the empty one, and the first."""
    counts: np.ndarray
    """int64 (F,), images directly in each folder."""
    names: Tensor
    """Their N names without folders, one after another, a zero byte after each: uint8 (bytes,)."""
    states: Tensor
    """int64 (N, 3): size, modification and change time."""
    left_out: dict[str, int] = field(default_factory=dict)
    """What was not taken, by its ending or by a key of `_WORDS`."""

    def __post_init__(self) -> None:
        self._folder_ends = np.cumsum(self.counts)
        self._name_ends = torch.from_numpy(np.flatnonzero(self.names.numpy() == 0))

    def __len__(self) -> int:
        return len(self._name_ends)

    def part(self, start: int, stop: int) -> list[bytes]:
        """The names from `start` on, before `stop`, of which there is at least one."""
        ends = self._name_ends.numpy()
        first = ends[start - 1] + 1 if start else 0
        return self.names.numpy()[first : ends[stop - 1]].tobytes().split(b"\0")

    def path(self, i: int) -> bytes:
        """Where image i is, relative to the folder."""
        f = int(np.searchsorted(self._folder_ends, i, side="right"))
        return self.folders[f] + self.part(i, i + 1)[0]

    def by_folder(self) -> Iterator[tuple[bytes, int, int]]:
        """(path, first image, one past its last) of each folder with images of its own."""
        ends = self._folder_ends.tolist()
        places = zip(self.folders, [0, *ends], ends, strict=False)
        return (place for place in places if place[1] < place[2])

    def lines(self) -> Iterator[list[str]]:
        """`path size` of every image, folder by folder."""
        sizes = self.states[:, 0].numpy()
        for folder, start, stop in self.by_folder():
            prefix = folder.decode("utf-8", "surrogateescape")
            names = b"\0".join(self.part(start, stop)).decode("utf-8", "surrogateescape").split("\0")
            pairs = zip(names, sizes[start:stop].tolist(), strict=True)
            yield [f"{prefix}{name} {size}" for name, size in pairs]

    def select(self, ids: Tensor) -> Listing:
        """The listing of some of the files alone, whose numbers ascend."""
        names = self.part(0, len(self))
        folders = np.repeat(np.arange(len(self.counts)), self.counts)[ids.numpy()]
        counts = np.bincount(folders, minlength=len(self.counts))
        chosen = _joined([names[i] for i in ids.tolist()])
        return replace(self, counts=counts, names=chosen, states=self.states[ids])

    def to_bytes(self, fingerprint: str) -> bytes:
        """An .npz file. The fingerprint tells which record it belongs to."""
        file = io.BytesIO()
        np.savez(
            file,
            folders=_joined(self.folders).numpy(),
            counts=self.counts,
            names=self.names.numpy(),
            states=self.states.numpy(),
            fingerprint=np.frombuffer(fingerprint.encode(), dtype=np.uint8),
        )
        return file.getvalue()

    @classmethod
    def read(cls, file: str | os.PathLike[str] | io.BytesIO, fingerprint: str) -> Listing | None:
        """What `to_bytes` made with this fingerprint; None of anything else, and if it is lost or damaged."""
        try:
            with np.load(file, allow_pickle=False) as arrays:
                folders = arrays["folders"].tobytes().split(b"\0")[:-1]
                names, states = (torch.from_numpy(arrays[key]) for key in ("names", "states"))
                listing = cls(folders, arrays["counts"], names, states)
                same = arrays["fingerprint"].tobytes().decode() == fingerprint
            shapes = listing.counts.shape == (len(folders),) and states.shape == (len(listing), 3)
            return listing if same and shapes and listing.counts.sum() == len(listing) else None
        except Exception:  # a damaged archive raises nearly anything
            return None


def _joined(names: list[bytes]) -> Tensor:
    """The names one after another, a zero byte after each: uint8 (bytes,)."""
    return torch.from_numpy(np.frombuffer(bytearray(b"\0".join([*names, b""])), dtype=np.uint8))


# ---- walking a folder ----


def scan(root: bytes, without: str = "") -> Listing:
    """Every image file under `root`: a folder's own first, then each subfolder's, names sorted.

    Args:
        without: the name of something directly in `root` that is passed over.
    """
    left_out = Counter[str]()
    folders: list[bytes] = []
    texts: list[bytes] = []  # the names in each folder with images, zero bytes between them
    states: list[np.ndarray] = []
    # Folders still to be read, the next one last, and the folders that each lies in, by device and inode.
    pending: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(b"", frozenset())]
    while pending:
        folder, above = pending.pop()
        try:
            handle = os.open(os.path.join(root, folder), os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
            try:
                status = os.fstat(handle)
                here = (status.st_dev, status.st_ino)
                if here in above:
                    left_out["loop"] += 1
                    continue
                text, numbers, inside = _read_folder(handle, "" if folder else without, left_out)
            finally:
                os.close(handle)
        except OSError as error:
            if not folder:
                raise UserError(f"{os.fsdecode(root)} cannot be opened: {error.strerror}.") from None
            left_out["closed"] += 1
            continue
        folders.append(folder)
        texts += [text] if text else []
        states.append(numbers)
        pending += [(folder + os.fsencode(name) + b"/", above | {here}) for name in reversed(inside)]
    counts = np.array([len(numbers) for numbers in states], dtype=np.int64)
    return Listing(folders, counts, _joined(texts), torch.from_numpy(np.concatenate(states)), dict(left_out))


def _read_folder(handle: int, without: str, left_out: Counter[str]) -> tuple[bytes, np.ndarray, list[str]]:
    """The names of the images directly in an open folder, zero bytes between them, their states (n, 3), and the names
    of the folders in it."""
    with os.scandir(handle) as opened:
        entries = sorted(opened, key=attrgetter("name"))
    folders: list[str] = []
    names: list[str] = []
    states: list[int] = []  # three for each name
    for entry in entries:  # a million times: no call that can be spared
        name = entry.name
        if name[0] == "." or name == without:
            continue
        try:
            if entry.is_dir():
                folders.append(name)
                continue
        except OSError:  # a link to itself
            pass
        _, dot, ending = name.rpartition(".")
        if not dot or ending.lower() not in EXTENSIONS:
            left_out[(dot and f".{ending.lower()}") or "."] += 1
            continue
        try:
            status = os.stat(name, dir_fd=handle)  # quicker than entry.stat(), which keeps what it found
        except OSError:  # a dangling link
            names.append(name)
            states += _GONE
            continue
        if stat.S_ISREG(status.st_mode):
            names.append(name)
            states += (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        else:
            left_out["special"] += 1
    return os.fsencode("\0".join(names)), np.array(states, dtype=np.int64).reshape(-1, 3), folders


# ---- the images ----


class FolderImages(ImageSet):
    """Every image file under a folder, depth first, names sorted: the order of torchvision's ImageFolder.

    Classes are the first-level folders, or the folders that hold images where those are deeper. When any image lies
    directly in the folder, there are no classes. Links are followed, but not back to a folder above them.

    Args:
        root: the folder.
        listing: what is in the folder, where that is known already; else it is looked for.
        is_split: whether the folder is one split of the folder above it.
    """

    def __init__(self, root: str | Path, listing: Listing | None = None, *, is_split: bool = False) -> None:
        self.root = self.place = str(root)
        self._whole, part = os.path.split(self.root) if is_split else (self.root, "")
        self.name, self.split = Path(self._whole).name, part
        self.files = scan(os.fsencode(self.root)) if listing is None else listing
        self.left_out = _left_out_words(self.files.left_out)
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
        return [line for lines in self.files.lines() for line in lines]

    def listing_bytes(self) -> Iterator[bytes]:
        return ("\n".join([*lines, ""]).encode("utf-8", "surrogateescape") for lines in self.files.lines())

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
        known = [self.where(i) for i in ids if tuple(self.files.states[i].tolist()) != _GONE]
        missing = [path for path in known if not os.path.exists(path)]
        if missing:
            raise UserError(
                f"{len(missing):,} of {len(ids):,} images that were looked for are missing "
                f"({printable(missing[0])}), though the first process of the run has found them. Mount the data "
                f"there, or copy all of them."
            )

    def more_splits(self, known: set[str]) -> list[ImageSet]:
        names = [n for names in SPLIT_FOLDERS.values() for n in names if self.split and n not in known]
        paths = [os.path.join(self._whole, name) for name in names]
        return [FolderImages(path, is_split=True) for path in paths if os.path.isdir(path)]

    def unused(self, also: Collection[str] = ()) -> str:
        if not self.split:
            return ""
        places = Counter[str]()
        for folder, start, stop in scan(os.fsencode(self._whole), without=self.split).by_folder():
            top = os.fsdecode(folder.partition(b"/")[0])
            if top not in also:
                places[f"in {printable(top)}/" if top else "directly in it"] += stop - start
        if not places:
            return ""
        counts = few(f"{count:,} {place}" for place, count in places.most_common())
        return (
            f"{counts} are not among them; to use all, put a link to {printable(self._whole)} into an empty folder "
            f"and name that folder"
        )


def open_folder(root: str, split: str, listing: Listing | None = None) -> FolderImages:
    """The images of this split where the folder is divided into train/ and test/ (or val/), else all of them."""
    if not os.path.isdir(root):
        raise UserError(f"No such folder: {root}. Check its spelling.")
    if Path(root).name in ("", ".."):  # `.` and its like name nothing
        root = os.path.abspath(root)
    paths = {key: [os.path.join(root, name) for name in names] for key, names in SPLIT_FOLDERS.items()}
    parts = {key: next(filter(os.path.isdir, folders), "") for key, folders in paths.items()}
    if all(parts.values()):
        return FolderImages(parts[split], listing, is_split=True)
    if split == "test":
        raise MissingSplitError(
            f"{root} has no test images: it is not divided into train/ and test/ (or val/). "
            f"Divide it, or name a folder of test images."
        )
    return FolderImages(root, listing)


def _classes(files: Listing) -> tuple[Tensor | None, list[str], str]:
    """Labels (N,), the names of the classes, and a sentence on them.

    A few images beside the folders have the label -1; where half of all lie there, folders are no classes.
    """
    if 2 * files.counts[0] >= len(files):
        return None, [], ""
    holders: list[bytes] = []  # the uppermost folders with images of their own
    inside = np.full(len(files), -1)  # of each image, the last of these; -1: the images beside all folders
    for folder, start, stop in files.by_folder():
        if folder and not (holders and folder.startswith(holders[-1])):  # what is below one follows it
            holders.append(folder)
        inside[start:stop] = len(holders) - 1
    chosen, note = _class_folders([os.fsdecode(holder[:-1]) for holder in holders])
    names = sorted(set(chosen))
    number = {name: c for c, name in enumerate(names)}
    return torch.tensor([*(number[name] for name in chosen), -1])[inside], names, note


def _class_folders(holders: list[str]) -> tuple[list[str], str]:
    """The class of each uppermost folder with images of its own, and a sentence where people may expect another.

    First-level folders are the classes, each with all that is below it. Where they hold no images themselves, as in
    SUN397's `a/abbey/1.jpg`, the folders that do are the classes. Where there are two ways to read that, it is the
    upper level, with a warning.
    """
    tops = [holder.partition("/")[0] for holder in holders]
    if len(set(tops)) == len(tops):
        return tops, ""
    shared = os.path.commonpath(holders)
    level = shared.count("/") + 2 if shared else 1  # the first on which they differ
    upper = ["/".join(holder.split("/")[:level]) for holder in holders]
    below = [holder[len(top) + 1 :] for holder, top in zip(holders, upper, strict=True)]
    chosen = upper if len(set(upper)) == len(upper) else holders
    if chosen is upper or (all(below) and len(set(below)) == len(below)):
        return chosen, f"The classes are the folders that hold images, such as {printable(chosen[0])}."
    if all(below):
        twice = next(name for name, count in Counter(below).items() if count > 1)
        places = (top for top, rest in zip(upper, below, strict=True) if rest == twice)
        doubt = f"there is a folder {printable(twice)} in each of {few(map(printable, places))}"
    else:
        other = next(top for top, rest in zip(upper, below, strict=True) if rest)
        one = upper[below.index("")]
        doubt = f"{printable(one)} holds images itself, {printable(other)} only in folders below it"
    return upper, (
        f"Warning: {doubt}. The classes are taken to be {few(map(printable, dict.fromkeys(upper)))}; if they are "
        f"others, put their folders side by side."
    )


def _left_out_words(counts: dict[str, int]) -> str:
    """`9 .heic (to read them: pip install pillow-heif), 3 .cr2 (convert them to JPEG or PNG), 3 .txt`"""
    words = []
    for what, count in sorted(counts.items(), key=lambda item: (item[0] not in _HINTS, -item[1], item[0])):
        one, many = _WORDS.get(what, (what, what))
        words.append(f"{count:,} {printable(one if count == 1 else many)}{_HINTS.get(what, '')}")
    return few(words, 6)
