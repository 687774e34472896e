"""A folder of image files: found once, in a fixed order; decoded on demand to 8-bit RGB."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adasim.data.contents import hash_file
from adasim.data.images import ImageSet, Reduction
from adasim.data.sources.decode import EXTENSIONS, decode, decode_reduced
from adasim.data.sources.found import few, left_out_words, printable
from adasim.errors import UserError

SPLIT_FOLDERS = {"train": ("train", "training"), "test": ("test", "val", "valid", "validation")}
_GONE = (-1, -1, -1)


class FolderImages(ImageSet):
    """Every image file under a folder, depth first, names sorted: the order of torchvision's ImageFolder.

    The class of an image is the first-level folder it lies in, however deep. When any image lies directly in
    the folder, there are no classes. Links are followed, but not back to a folder above them.
    """

    def __init__(self, root: str | Path, name: str | None = None) -> None:
        self.root = str(root)
        self.name = name or Path(root).name
        self.place = self.root
        paths: list[bytes] = []
        states: list[tuple[int, int, int]] = []
        left_out: Counter[str] = Counter()
        for path, state in _walk(os.fsencode(self.root), left_out):
            paths.append(path)
            states.append(state)
        self.left_out = left_out_words(left_out)
        if not paths:
            raise UserError(
                f"No images in {self.root}: looked for files ending in {', '.join(sorted(EXTENSIONS))}"
                f"{' and found ' + self.left_out if self.left_out else ''}. "
                f"Name the folder that holds them."
            )
        # One buffer instead of a million strings: small, and forked loader processes never touch (copy) it.
        self._paths = b"".join(paths)
        self._ends = np.cumsum([len(p) for p in paths], dtype=np.int64)
        self._states = np.asarray(states, dtype=np.int64)  # (N, 3): size, modification and change time
        self.labels, self.classes = _classes(paths)

    def __len__(self) -> int:
        return len(self._ends)

    def load(self, i: int) -> Tensor:
        return decode(self.where(i))

    def load_reduced(self, i: int, reduction: Reduction) -> tuple[Tensor, int]:
        return decode_reduced(self.where(i), reduction)

    def where(self, i: int) -> str:
        return os.path.join(self.root, self._path(i))

    def listing(self) -> list[str]:
        return [f"{self._path(i)} {size}" for i, size in enumerate(self._states[:, 0].tolist())]

    def times(self) -> list[int]:
        return self._states[:, 1].tolist()

    def content(self, i: int, whole: bool = False) -> str:
        return hash_file(self.where(i), whole)

    def cache_key(self) -> str:
        # The change time is the file system's own: a renaming sets it, and no program can set it back.
        return hashlib.sha256(self.fingerprint().encode() + self._states.tobytes()).hexdigest()

    def _path(self, i: int) -> str:
        start = self._ends[i - 1] if i else 0
        return os.fsdecode(self._paths[start : self._ends[i]])


class _Divided(FolderImages):
    """The part of a folder that is one split of it."""

    def __init__(self, root: str, part: str) -> None:
        super().__init__(os.path.join(root, part), Path(root).name)
        self.split = part
        self._whole = root

    def unused(self) -> str:
        places: Counter[str] = Counter()
        for path, _ in _walk(os.fsencode(self._whole), Counter(), without=os.fsencode(self.split)):
            top, below, _ = os.fsdecode(path).partition("/")
            places[f"in {printable(top)}/" if below else "directly in it"] += 1
        if not places:
            return ""
        counts = [f"{count:,} {place}" for place, count in places.most_common()]
        return (
            f"{few(counts)} are not used; to use all, put a link to {printable(self._whole)} into an empty folder "
            f"and name that folder"
        )


def open_folder(root: str, split: str) -> FolderImages:
    """The images of this split where the folder is divided into train/ and test/ (or val/), else all of them."""
    if not os.path.isdir(root):
        raise UserError(f"No such folder: {root}. Check --data.source.")
    found = {
        key: next((n for n in names if os.path.isdir(os.path.join(root, n))), None)
        for key, names in SPLIT_FOLDERS.items()
    }
    if found["train"] and found["test"]:
        return _Divided(root, found[split] or "")
    if split == "test":
        raise UserError(
            f"{root} has no test images: it is not divided into train/ and test/ (or val/). "
            f"Divide it, or name a folder of test images."
        )
    return FolderImages(root)


def _walk(
    root: bytes, left_out: Counter[str], without: bytes = b""
) -> Iterator[tuple[bytes, tuple[int, int, int]]]:
    """(relative path, (size, modification and change time)) of every image file: a folder's own first, then
    each subfolder's. What is not taken is counted in `left_out`, by its ending or by a word of
    `found.left_out_words`.
    """
    pending: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(b"", frozenset())]
    while pending:
        prefix, above = pending.pop()
        folder = os.path.join(root, prefix)
        try:
            status = os.stat(folder)
            here = (status.st_dev, status.st_ino)
            if here in above:
                left_out["loop"] += 1
                continue
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError as error:
            if not prefix:
                raise UserError(f"{os.fsdecode(root)} cannot be opened: {error.strerror}.") from None
            left_out["closed"] += 1
            continue
        folders = []
        for entry in entries:
            if entry.name.startswith(b".") or prefix + entry.name == without:
                continue
            if _is_folder(entry):
                folders.append((prefix + entry.name + b"/", above | {here}))
            elif (ending := _ending(entry.name)) not in EXTENSIONS:
                left_out[f".{ending}"] += 1
            elif (state := _state(entry)) is None:
                left_out["special"] += 1
            else:
                yield prefix + entry.name, state
        pending += reversed(folders)


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _ending(name: bytes) -> str:
    return name.rpartition(b".")[2].lower().decode("latin-1") if b"." in name else ""


def _state(entry: os.DirEntry[bytes]) -> tuple[int, int, int] | None:
    """Size, modification and change time; None of what is no regular file, nor a link to one."""
    try:
        status = entry.stat()
    except OSError:  # a dangling link: it stays in the list, and reading it will say why
        return _GONE
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns) if stat.S_ISREG(status.st_mode) else None


def _classes(paths: list[bytes]) -> tuple[Tensor | None, list[str]]:
    if any(b"/" not in p for p in paths):
        return None, []
    names = sorted({p.partition(b"/")[0] for p in paths})
    number = {name: c for c, name in enumerate(names)}
    labels = torch.tensor([number[p.partition(b"/")[0]] for p in paths])
    return labels, [os.fsdecode(name) for name in names]
