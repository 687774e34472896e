"""The names, sizes and times of all image files under a folder, in a few buffers.

A million paths as Python strings take some 150 MB, and forked loader processes copy them page by page, since every
look at a string changes its count of references. Here names lie one after another in one tensor, folders once each.
Tensors are shared by forked processes, and torch hands them to spawned ones through shared memory.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

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
    """What was not taken, by its ending or by a word of `found.left_out_words`."""

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
