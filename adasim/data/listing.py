"""Which image files lie under a folder: their names, sizes and times, in a few buffers.

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
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from adasim.data.decode import EXTENSIONS
from adasim.util.errors import UserError

GONE = (-1, -1, -1)
"""The state of a link to nothing: it stays in the list, and reading it will say why."""
_ARRAYS = ("folders", "marks", "counts", "names", "states", "began", "left_out", "fingerprint")
_FORMAT = 2
_SETTLED_NS = 5_000_000_000
"""A change time is as coarse as the file system makes it (2 s at worst): a folder that was changed this shortly
before it was read may have been changed again afterwards, within the same tick."""
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_CLOSED = (-1, -1)
_USUAL_ENDINGS = {f".{form}" for ending in EXTENSIONS for form in (ending, ending.upper())}
"""Endings as nearly everybody writes them, of four and five characters."""


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
    """When the walk began, in ns; 0 of a listing that has not all files of its folders."""
    left_out: dict[str, int] = field(default_factory=dict)
    """What was not taken, by its ending or by a word of `image_folder.left_out_words`."""
    first_level_classes: bool = False
    """Of a run (and file of format 1) from when first-level folders were the classes at any depth: they stay so."""

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.counts)

    def path(self, i: int) -> bytes:
        """Where image i is, relative to the folder."""
        folder = int(np.searchsorted(self._ends, i, side="right"))
        return self.folders[folder] + self.names[i]

    def by_folder(self) -> Iterator[tuple[bytes, int, int]]:
        """(path, first image, one past its last) of each folder."""
        stop = 0
        for folder, count in zip(self.folders.part(0, len(self.folders)), self.counts.tolist(), strict=True):
            start, stop = stop, stop + count
            yield folder, start, stop

    def lines(self) -> Iterator[str]:
        """`path size` of every image."""
        return chain.from_iterable(self.lines_by_folder())

    def lines_by_folder(self) -> Iterator[list[str]]:
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

    def select(self, ids: Tensor) -> Listing:
        """The listing of some of the files alone, whose numbers ascend. It cannot be refreshed."""
        names = self.names.part(0, len(self))
        folders = np.repeat(np.arange(len(self.counts)), self.counts)[ids.numpy()]
        return replace(
            self,
            counts=np.bincount(folders, minlength=len(self.counts)),
            names=Names(b"".join(names[i] + b"\0" for i in ids.tolist())),
            states=self.states[ids],
            began=0,
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
            began=np.array([1 if self.first_level_classes else _FORMAT, self.began]),
            left_out=np.frombuffer(json.dumps(self.left_out).encode(), dtype=np.uint8),
            fingerprint=np.frombuffer(fingerprint.encode(), dtype=np.uint8),
        )
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, fingerprint: str) -> Listing | None:
        """What `to_bytes` made with this fingerprint; None of anything else, and of a damaged file."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                arrays = {name: file[name] for name in _ARRAYS}  # each with its checksum
            form, began = arrays["began"].tolist()
            if form not in (1, _FORMAT) or arrays["fingerprint"].tobytes().decode() != fingerprint:
                return None
            left_out = json.loads(arrays["left_out"].tobytes())
            names, folders = Names(arrays["names"]), Names(arrays["folders"])
            marks, counts, states = arrays["marks"], arrays["counts"], arrays["states"]
            states_now = torch.from_numpy(states)
            listing = cls(folders, marks, counts, names, states_now, began, left_out, form == 1)
        except Exception:  # a damaged archive raises nearly anything
            return None
        shapes = (marks.shape, counts.shape, states.shape)
        expected = ((len(folders), 2), (len(folders),), (len(names), 3))
        return listing if shapes == expected and counts.sum() == len(names) else None


# ---- walking a folder ----


def scan(root: bytes, without: str = "") -> Listing:
    """Every image file under `root`: a folder's own first, then each subfolder's, names sorted as bytes.

    Args:
        without: the name of something directly in `root` that is passed over.
    """
    began = time.time_ns()
    left_out: Counter[str] = Counter()
    folders: list[bytes] = []
    marks: list[tuple[int, int]] = []
    names: list[bytes] = []
    states: list[np.ndarray] = []
    # Folders still to be read, the next one last, and the folders that each lies in, by device and inode.
    pending: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(b"", frozenset())]
    while pending:
        folder, above = pending.pop()
        try:
            handle = os.open(os.path.join(root, folder), _FOLDER)
            try:
                status = os.fstat(handle)
                here = (status.st_dev, status.st_ino)
                if here in above:
                    left_out["loop"] += 1
                    continue
                text, numbers, inside = _read_folder(handle, "" if folder else without, left_out)
                mark = _mark(status)
            finally:
                os.close(handle)
        except OSError as error:
            if not folder:
                raise UserError(f"{os.fsdecode(root)} cannot be opened: {error.strerror}.") from None
            left_out["closed"] += 1
            text, numbers, inside, mark, here = b"", np.empty((0, 3), np.int64), [], _CLOSED, (0, 0)
        folders.append(folder)
        marks.append(mark)
        names.append(text)
        states.append(numbers)
        above |= {here}
        pending += [(folder + os.fsencode(name) + b"/", above) for name in reversed(inside)]
    counts = [len(numbers) for numbers in states]
    if named_like_images := _named_like_images(folders, marks, counts):
        left_out["folder"] = named_like_images
    return Listing(
        Names(b"".join(folder + b"\0" for folder in folders)),
        np.array(marks, dtype=np.int64),
        np.array(counts, dtype=np.int64),
        Names(b"".join(names)),
        torch.from_numpy(np.concatenate(states)),
        began,
        dict(left_out),
    )


def _read_folder(handle: int, without: str, left_out: Counter[str]) -> tuple[bytes, np.ndarray, list[str]]:
    """The names of the images directly in an open folder, a zero byte after each, their states (n, 3), and the
    names of the folders in it."""
    with os.scandir(handle) as opened:
        entries = sorted(opened, key=attrgetter("name"))
    if not all(entry.name.isascii() for entry in entries):  # the order of bytes is another then
        entries.sort(key=lambda entry: os.fsencode(entry.name))
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
        if name[-4:] not in _USUAL_ENDINGS and name[-5:] not in _USUAL_ENDINGS:
            ending = _ending(name)
            if ending not in EXTENSIONS:
                left_out[f".{ending}"] += 1
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
            left_out["special"] += 1
    text = os.fsencode("\0".join(names)) + b"\0" if names else b""
    return text, np.array(states, dtype=np.int64).reshape(-1, 3), folders


def _named_like_images(folders: list[bytes], marks: list[tuple[int, int]], counts: list[int]) -> int:
    """How many folders are named like images and have none below them: somebody may take them for images."""
    number = 0
    for f, folder in enumerate(folders):
        if _ending(os.fsdecode(os.path.basename(folder[:-1]))) in EXTENSIONS and marks[f] != _CLOSED:
            end = f
            while end < len(folders) and folders[end].startswith(folder):
                end += 1
            number += not any(counts[f:end])
    return number


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
    return replace(listing, states=torch.from_numpy(states))


def _mark(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino & 0x7FFF_FFFF_FFFF_FFFF, status.st_ctime_ns  # inodes may have all of 64 bits


def _ending(name: str) -> str:
    """What follows the last dot, in small letters where they are ASCII; others as Latin-1."""
    return os.fsencode(name.rpartition(".")[2]).lower().decode("latin-1") if "." in name else ""


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")
