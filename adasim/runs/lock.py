"""One process at a time in a run folder: RUN/lock names its holder and is held while that process lives.

flock rather than the file's existence: the kernel drops it when the process dies, however it dies. Some network
disks have no flock; there the file's content alone must do. It refuses a second process on the same machine,
and whoever opens the run later writes their own content, which the earlier process notices before its next save.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
from contextlib import suppress
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


class FolderLock:
    """Holds a folder until `release` or the process's end, even by a kill. Use `FolderLock.take(folder)`."""

    def __init__(self, handle: int, mark: str, by_kernel: bool) -> None:
        self.mark = mark
        """The lock file's content: who holds it (first line), and what no other holder has."""
        self.by_kernel = by_kernel
        """False on a disk without flock."""
        self._handle = handle

    @classmethod
    def take(cls, folder: Path, *, surely: bool = False) -> FolderLock:
        """Lock the folder, or say who holds it.

        Args:
            folder: an existing folder.
            surely: refuse also where the disk has no flock and nobody can tell whether the holder that the
                file names, on another machine, is still alive.
        """
        if fcntl is None:
            raise UserError(
                "Training needs file locks as Linux and macOS have them. On Windows, run adasim inside WSL."
            )
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            by_kernel = _flock(handle)
            before = os.pread(handle, 1000, 0).decode(errors="replace")
            if by_kernel is None or (by_kernel is False and _alive(before)):
                raise UserError(
                    f"{folder} is in use by {_name(before)}. Wait for it, stop it, or choose another --out."
                )
            if surely and not by_kernel and before and not _is_here(before):
                raise UserError(
                    f"{folder} may be in use by {_name(before)}, and its disk has no file locks to tell. "
                    f"If that process is dead, delete {folder / LOCK}."
                )
            me = os.getpid()
            mark = f"process {me} on {socket.gethostname()}\n{secrets.token_hex(8)} {_started(me)}\n"
            os.ftruncate(handle, 0)
            os.pwrite(handle, mark.encode(), 0)
            os.fsync(handle)  # on a network disk: else other machines see it only when the file is closed
        except BaseException:
            os.close(handle)
            raise
        _held.add(handle)
        return cls(handle, mark, bool(by_kernel))

    def release(self) -> None:
        if self._handle in _held:
            if not self.by_kernel:  # nothing else would say that it is free
                with suppress(OSError):
                    os.ftruncate(self._handle, 0)
            _held.discard(self._handle)
            os.close(self._handle)


def _flock(handle: int) -> bool | None:
    """True: it is ours now. None: somebody else's. False: this disk has no such locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        # EACCES: on some network disks.
        if isinstance(error, BlockingIOError) or error.errno == errno.EACCES:
            return None
        if error.errno in _UNSUPPORTED:
            return False
        raise


def _name(mark: str) -> str:
    return mark.partition("\n")[0].strip() or "another process"


def _is_here(mark: str) -> bool:
    return _name(mark).endswith(f" on {socket.gethostname()}")


def _alive(mark: str) -> bool:
    """Whether the process that wrote it runs on this machine."""
    match = re.match(r"process ([0-9]+) on .*\n\w+ ([0-9]+)\n", mark)
    return match is not None and _is_here(mark) and _started(int(match[1])) == match[2]


def _started(pid: int) -> str:
    """When a process began, in ticks since the machine did: ids are used again, pairs of both are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
