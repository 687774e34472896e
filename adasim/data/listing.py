"""The names, sizes and times of all image files under a folder, in a few buffers.

A million paths as Python strings take some 150 MB, and forked loader processes copy them page by page, since every
look at a string changes its count of references. Here names lie one after another in one tensor, folders once each.
Tensors are shared by forked processes, and torch hands them to spawned ones through shared memory.
"""

from __future__ import annotations

import io
import json
import os
import stat
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from adasim.data.decode import EXTENSIONS
from adasim.util.errors import UserError

GONE = (-1, -1, -1)
"""The state of a link to nothing: it stays in the list, and reading it will say why."""
_ARRAYS = ("folders", "marks", "counts", "names", "states", "began", "left_out", "fingerprint")
_FORMAT = 1


class Names:
    """Byte strings without zero bytes, one after another, a zero byte after each: uint8 (bytes,)."""

    def __init__(self, text: bytes | np.ndarray) -> None:
        array = np.frombuffer(bytearray(text), dtype=np.uint8) if isinstance(text, bytes) else text
        self.text = torch.from_numpy(array)
        self._ends = torch.from_numpy(np.flatnonzero(array == 0))  # where the zero byte after each is

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> bytes:
        return self._between(i, i + 1)[:-1]

    def part(self, start: int, stop: int) -> list[bytes]:
        """The names from `start` on, before `stop`."""
        return self._between(start, stop).split(b"\0")[:-1] if start < stop else []

    def _between(self, start: int, stop: int) -> bytes:
        ends = self._ends.numpy()
        return self.text.numpy()[ends[start - 1] + 1 if start else 0 : ends[stop - 1] + 1].tobytes()


@dataclass(frozen=True, eq=False)
class Listing:
    """N image files in the F folders that were looked into, in the order of the walk."""

    folders: Names
    """Relative paths with a / at their end; the folder itself is the empty one, and the first."""
    marks: np.ndarray
    """int64 (F, 2), each folder's inode and change time in ns: another as soon as a name in it is; -1 of one that
    could not be opened."""
    counts: np.ndarray
    """int64 (F,), images directly in each folder."""
    names: Names
    """N names, without their folders."""
    states: Tensor
    """int64 (N, 3): size, modification and change time."""
    began: int
    """When the walk began, in ns."""
    left_out: dict[str, int] = field(default_factory=dict)
    """What was not taken, by its ending or by a word of `image_folder.left_out_words`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", torch.from_numpy(np.cumsum(self.counts)))

    def __len__(self) -> int:
        return len(self.names)

    def path(self, i: int) -> bytes:
        """Where image i is, relative to the folder."""
        ends: Tensor = self._ends  # type: ignore[attr-defined]
        folder = int(np.searchsorted(ends.numpy(), i, side="right"))
        return self.folders[folder] + self.names[i]

    def by_folder(self) -> Iterator[tuple[bytes, int, int]]:
        """(path, first image, one past its last) of each folder."""
        stop = 0
        for folder, count in zip(self.folders.part(0, len(self.folders)), self.counts.tolist(), strict=True):
            start, stop = stop, stop + count
            yield folder, start, stop

    def lines(self) -> Iterator[list[str]]:
        """`path size` of every image, folder by folder."""
        sizes = self.states[:, 0].numpy()
        for folder, start, stop in self.by_folder():
            if start < stop:
                prefix = _text(folder)
                names = _text(b"\0".join(self.names.part(start, stop))).split("\0")
                pairs = zip(names, sizes[start:stop].tolist(), strict=True)
                yield [f"{prefix}{name} {size}" for name, size in pairs]

    def same_files(self, other: Listing) -> bool:
        """Whether names, order and sizes are the same."""
        mine, theirs = ([x for x in listing.by_folder() if x[1] < x[2]] for listing in (self, other))
        return (
            mine == theirs
            and torch.equal(self.names.text, other.names.text)
            and torch.equal(self.states[:, 0], other.states[:, 0])
        )

    # ---- as a file ----

    def to_bytes(self, fingerprint: str) -> bytes:
        """An .npz file. The fingerprint tells which record it belongs to."""
        file = io.BytesIO()
        np.savez(
            file,
            folders=self.folders.text.numpy(),
            marks=self.marks,
            counts=self.counts,
            names=self.names.text.numpy(),
            states=self.states.numpy(),
            began=np.array([_FORMAT, self.began]),
            left_out=_array(json.dumps(self.left_out)),
            fingerprint=_array(fingerprint),
        )
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, fingerprint: str) -> Listing | None:
        """What `to_bytes` made with this fingerprint; None of anything else, and of a damaged file."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                found = {name: file[name] for name in _ARRAYS}  # each with its checksum
            kind, began = found["began"].tolist()
            if kind != _FORMAT or found["fingerprint"].tobytes().decode() != fingerprint:
                return None
            left_out = json.loads(found["left_out"].tobytes())
            names, folders = Names(found["names"]), Names(found["folders"])
            states = torch.from_numpy(found["states"])
            listing = cls(folders, found["marks"], found["counts"], names, states, began, left_out)
        except Exception:  # a damaged archive raises nearly anything
            return None
        right = (
            states.shape == (len(names), 3)
            and found["counts"].shape == (len(folders),)
            and found["counts"].sum() == len(names)
            and found["marks"].shape == (len(folders), 2)
        )
        return listing if right else None


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def _array(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8)


# ---- walking a folder ----

_SETTLED_NS = 5_000_000_000
"""A change time is as coarse as the file system makes it (2 s at worst): a folder that was changed this shortly
before it was read may have been changed again afterwards, within the same tick."""
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_CLOSED = (-1, -1)
_OFTEN = {f".{form}" for ending in EXTENSIONS for form in (ending, ending.upper())}
"""Endings as nearly everybody writes them, of four and five characters."""


def scan(root: bytes, without: str = "") -> Listing:
    """Every image file under `root`: a folder's own first, then each subfolder's, names sorted as bytes.

    Args:
        without: the name of something directly in `root` that is passed over.
    """
    began = time.time_ns()
    walk = _Walk(root, without)
    while walk.pending:
        walk.enter(*walk.pending.pop())
    walk.count_folders_named_like_images()
    states = np.concatenate(walk.states) if walk.states else np.empty((0, 3), np.int64)
    return Listing(
        Names(b"".join(folder + b"\0" for folder in walk.folders)),
        np.array(walk.marks, dtype=np.int64).reshape(-1, 2),
        np.array(walk.counts, dtype=np.int64),
        Names(b"".join(walk.names)),
        torch.from_numpy(states),
        began,
        dict(walk.left_out),
    )


class _Walk:
    """What was found so far, folder by folder, and the folders still to be entered, the next one last."""

    def __init__(self, root: bytes, without: str) -> None:
        self.root = root
        self.pending: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(b"", frozenset())]
        self.folders: list[bytes] = []
        self.marks: list[tuple[int, int]] = []
        self.counts: list[int] = []
        self.names: list[bytes] = []
        self.states: list[np.ndarray] = []
        self.left_out: Counter[str] = Counter()
        self._without = without

    def enter(self, prefix: bytes, above: frozenset[tuple[int, int]]) -> None:
        """Take the images directly in a folder; `above` are the folders that it lies in, by device and inode."""
        handle = None
        try:
            handle = os.open(os.path.join(self.root, prefix), _FOLDER)
            status = os.fstat(handle)
            here = (status.st_dev, status.st_ino)
            if here in above:
                self.left_out["loop"] += 1
                return
            with os.scandir(handle) as found:
                entries = _sorted(found)
            self._take(prefix, above | {here}, entries, _mark(status), handle)
        except OSError as error:
            if not prefix:
                raise UserError(f"{os.fsdecode(self.root)} cannot be opened: {error.strerror}.") from None
            self.left_out["closed"] += 1
            self._add(prefix, _CLOSED, [], [])
        finally:
            if handle is not None:
                os.close(handle)

    def _take(
        self,
        prefix: bytes,
        above: frozenset[tuple[int, int]],
        entries: list[os.DirEntry[str]],
        mark: tuple[int, int],
        handle: int,
    ) -> None:
        folders: list[tuple[bytes, frozenset[tuple[int, int]]]] = []
        names: list[str] = []
        states: list[int] = []  # three for each name
        without = "" if prefix else self._without
        for entry in entries:  # a million times: no call that can be spared
            name = entry.name
            if name[0] == "." or name == without:
                continue
            try:
                if entry.is_dir():
                    folders.append((prefix + os.fsencode(name) + b"/", above))
                    continue
            except OSError:  # a link to itself
                pass
            if name[-4:] not in _OFTEN and name[-5:] not in _OFTEN and not self._is_image(name):
                continue
            try:
                status = os.stat(name, dir_fd=handle)  # quicker than entry.stat(), which keeps what it found
            except OSError:  # a dangling link
                names.append(name)
                states += GONE
                continue
            if stat.S_ISREG(status.st_mode):
                names.append(name)
                states += (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            else:
                self.left_out["special"] += 1
        self._add(prefix, mark, names, states)
        self.pending += reversed(folders)

    def _is_image(self, name: str) -> bool:
        """Whether it is one by its ending; else it is counted as left out."""
        ending = _lower(name.rpartition(".")[2]) if "." in name else ""
        if ending not in EXTENSIONS:
            self.left_out[f".{ending}"] += 1
        return ending in EXTENSIONS

    def _add(self, prefix: bytes, mark: tuple[int, int], names: list[str], states: list[int]) -> None:
        self.folders.append(prefix)
        self.marks.append(mark)
        self.counts.append(len(names))
        if names:
            self.names.append(os.fsencode("\0".join(names)) + b"\0")
            self.states.append(np.array(states, dtype=np.int64).reshape(-1, 3))

    def count_folders_named_like_images(self) -> None:
        """Those with no image below them: somebody may take them for images that were read."""
        for f, folder in enumerate(self.folders):
            ending = os.fsdecode(folder[:-1].rpartition(b"/")[2].rpartition(b".")[2])
            if b"." not in folder or _lower(ending) not in EXTENSIONS or self.marks[f] == _CLOSED:
                continue
            below = f
            while below < len(self.folders) and self.folders[below].startswith(folder):
                if self.counts[below]:
                    break
                below += 1
            else:
                self.left_out["folder"] += 1


def refresh(listing: Listing, root: bytes) -> Listing | None:
    """The listing with its files' sizes and times as they are now; None where a folder may hold other names.

    A folder's change time moves with every file that is added, removed or renamed in it, and no program can set it
    back. So names need not be read and sorted again, but each file is asked for its size and times.
    """
    if not len(listing.marks) or listing.marks[:, 1].max() > listing.began - _SETTLED_NS:
        return None
    states = np.empty((len(listing), 3), dtype=np.int64)
    for (folder, start, stop), mark in zip(listing.by_folder(), listing.marks.tolist(), strict=True):
        try:
            handle = os.open(os.path.join(root, folder), _FOLDER)
        except OSError:
            if tuple(mark) == _CLOSED:
                continue
            return None
        try:
            if _mark(os.fstat(handle)) != tuple(mark):
                return None
            now: list[int] = []
            for name in listing.names.part(start, stop):
                try:
                    status = os.stat(name, dir_fd=handle)
                except OSError:
                    now += GONE
                    continue
                if not stat.S_ISREG(status.st_mode):  # a link, to something else by now
                    return None
                now += (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            states[start:stop] = np.array(now, dtype=np.int64).reshape(-1, 3)
        finally:
            os.close(handle)
    return Listing(
        listing.folders,
        listing.marks,
        listing.counts,
        listing.names,
        torch.from_numpy(states),
        listing.began,
        listing.left_out,
    )


def _sorted(found: os._ScandirIterator[str]) -> list[os.DirEntry[str]]:
    """In the order of the names' bytes, which is not always that of their characters."""
    entries = sorted(found, key=attrgetter("name"))
    if not all(entry.name.isascii() for entry in entries):
        entries.sort(key=lambda entry: os.fsencode(entry.name))
    return entries


def _mark(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino & 0x7FFF_FFFF_FFFF_FFFF, status.st_ctime_ns  # inodes may have all of 64 bits


def _lower(ending: str) -> str:
    """In small letters, where they are ASCII; others as Latin-1."""
    return os.fsencode(ending).lower().decode("latin-1")
