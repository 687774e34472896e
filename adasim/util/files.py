"""The one atomic write: a file is there whole, or it is not there.

A write goes to a temporary name in the same folder (a rename is atomic only within one file system), reaches
the disk (`fsync`), takes its final name (`rename`), and then the folder's own entry reaches the disk. A
killed process leaves at most a temporary name behind, which `remove_leftovers` recognises by its suffix.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from adasim.util.errors import UserError

TEMPORARY = ".adasim-tmp"
"""Suffix of every temporary name: whatever bears it may be deleted when no run is active in that folder."""


def atomic_write(path: Path, data: bytes | Callable[[BinaryIO], None]) -> None:
    """Write `path` whole or not at all: bytes, or a function that writes into the open file.

    On any error, an interrupt included, what stood at `path` before is untouched and no temporary file stays.
    """
    path = Path(path)
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            if callable(data):
                data(file)
            else:
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync(path.parent)


@contextmanager
def write_errors(where: object, way_out: str = "or choose another --out") -> Iterator[None]:
    """What cannot be written within becomes one sentence, with what helps."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Make room" if full else "Make it writable"
        raise UserError(f"Cannot write {where}: {error.strerror or error}. {remedy}, {way_out}.") from None


def temporary_name(path: Path) -> Path:
    """A name beside `path` for what is not finished yet; no two are equal, on any machine that shares the folder."""
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")


def sync(path: Path) -> None:
    """Wait until a finished file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's content in hexadecimal, read in pieces (it may exceed the memory)."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_leftovers(folder: Path) -> list[Path]:
    """Delete what killed writes left in `folder` (not in its subfolders) and return the deleted paths.

    Call it only while nobody else writes there, that is, under the run's lock.
    """
    if not Path(folder).is_dir():
        return []
    leftovers = sorted(p for p in Path(folder).iterdir() if p.name.endswith(TEMPORARY))
    for path in leftovers:
        remove(path)
    return leftovers


def remove(path: Path) -> None:
    """Delete a file, a link (never what it points to) or a folder with all that it holds; absent is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
