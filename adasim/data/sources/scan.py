"""Walking a folder for image files: all of it, or, where names cannot have changed, the files' states alone."""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from operator import attrgetter

import numpy as np
import torch

from adasim.data.sources.decode import EXTENSIONS
from adasim.data.sources.listing import GONE, Listing, Names
from adasim.util.errors import UserError

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
