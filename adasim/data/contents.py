"""What files hold, as hashes: of every byte, or of a sample whose cost is bounded."""

from __future__ import annotations

import hashlib
import os
import stat
from io import BufferedReader

import numpy as np

UNREADABLE = "unreadable"
_PIECES, _PIECE = 4, 16 * 1024  # a sampled file is read in so many pieces of so many bytes


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file, or a link to one, for reading. Anything else is refused, and never waited for: a
    named pipe would block for ever.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115  (the caller closes it)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a regular file")
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def hash_file(path: str | os.PathLike[str], whole: bool) -> str:
    """Hash of the file's bytes: of all, or of four pieces of 16 KB, spread from its first byte to its last.

    Files up to 64 KB are always read whole. A file that cannot be read gives `UNREADABLE`.
    """
    try:
        with open_regular(path) as file:
            if whole:
                return hashlib.file_digest(file, "sha256").hexdigest()[:32]
            size = os.fstat(file.fileno()).st_size
            if size <= _PIECES * _PIECE:
                return hash_bytes(file.read())
            digest = hashlib.sha256()
            for n in range(_PIECES):
                file.seek((size - _PIECE) * n // (_PIECES - 1))
                digest.update(file.read(_PIECE))
            return digest.hexdigest()[:32]
    except OSError:
        return UNREADABLE


def hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def sample_ids(count: int, limit: int) -> list[int]:
    """Which of `count` images are looked into: all up to the limit, else `limit` of them at even distances."""
    return np.linspace(0, count - 1, min(count, limit)).round().astype(np.int64).tolist()
