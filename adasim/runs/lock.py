"""RUN/lock names its holder, and is locked by it.

flock rather than the file's existence, because the kernel drops it when the process dies, however it dies. Some
network disks have no flock: there the file's content refuses a second process on the same machine, and an earlier
process notices the content of a later one before its next save.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from adasim.util.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
_held: set[int] = set()  # handles of the locks that this process holds


def _drop_inherited() -> None:
    """A forked loader worker must not keep the lock of a main process that was killed."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_inherited)


@dataclass(frozen=True)
class FolderLock:
    """Holds a folder until `release` or the process's end, even by a kill. Use `FolderLock.take(folder)`."""

    handle: int
    mark: str
    """The lock file's content: who holds it (first line), and what no other holder has."""
    by_kernel: bool
    """False on a disk without flock."""

    @classmethod
    def take(cls, folder: Path, *, strict: bool = False) -> FolderLock:
        """Lock the folder, or say who holds it.

        Args:
            folder: an existing folder.
            strict: refuse also where the disk has no flock and nobody can tell whether the holder that the file
                names, on another machine, is still alive.
        """
        if fcntl is None:
            raise UserError(
                "Training needs file locks as Linux and macOS have them. On Windows, run adasim inside WSL."
            )
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            by_kernel = _flock(handle)
            before = os.pread(handle, 1000, 0).decode(errors="replace")
            here = re.match(rf"process (\d+) on {re.escape(socket.gethostname())}\n\w+ (\d+)\n", before)
            alive = here is not None and _began(here[1]) == here[2]
            if by_kernel is None or (not by_kernel and alive):
                raise UserError(
                    f"{folder} is in use by {holder(before)}. Wait for it, stop it, or choose another --out."
                )
            if strict and not by_kernel and before and not here:
                raise UserError(
                    f"{folder} may be in use by {holder(before)}, and its disk has no file locks to tell. "
                    f"If that process is dead, delete {folder / LOCK}."
                )
            me = os.getpid()
            mark = f"process {me} on {socket.gethostname()}\n{secrets.token_hex(8)} {_began(me)}\n"
            os.ftruncate(handle, 0)
            os.pwrite(handle, mark.encode(), 0)
            os.fsync(handle)  # on a network disk: else other machines see it only when the file is closed
        except BaseException:
            os.close(handle)
            raise
        _held.add(handle)
        return cls(handle, mark, bool(by_kernel))

    def release(self) -> None:
        if self.handle in _held:
            if not self.by_kernel:  # nothing else would say that it is free
                with suppress(OSError):
                    os.ftruncate(self.handle, 0)
            _held.discard(self.handle)
            os.close(self.handle)


def _flock(handle: int) -> bool | None:
    """True: it is ours now. None: somebody else's. False: this disk has no such locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):  # the latter on some network disks
            return None
        if error.errno in _UNSUPPORTED:
            return False
        raise


def _began(pid: object) -> str:
    """When a process began, in ticks since the machine did: ids are used again, pairs of both are not."""
    stat = text(Path(f"/proc/{pid}/stat"))
    return stat.rpartition(")")[2].split()[19] if stat else ""


def holder(mark: str) -> str:
    return mark.partition("\n")[0].strip() or "another process"


def text(path: Path) -> str | None:
    """A small file's text; None if there is no such file."""
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
