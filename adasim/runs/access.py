"""May this process make, open, replace or go on with the run in a folder? Asked first, and without torch.

`check_out` and `require_run` look before anything is opened; `FolderLock` lets one process at a time in;
`delete_run` is --overwrite; `began_here` is for restarts by Slurm or torchrun.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from adasim.util.errors import UserError
from adasim.util.files import TEMPORARY, remove

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK, LISTING = "lock", "listing.npz"
FOLDERS = ("checkpoints", "history", "tensorboard")
UNFINISHED = {*FOLDERS, LOCK, "versions.json", "data.json", LISTING, "run.json"}
"""What a kill inside `RunFolder.create` may leave."""


def require_run(out: Path) -> None:
    """Refuse what is not the folder of a run."""
    if not (out / "config.json").is_file():
        reason = "there is no config.json in it" if out.is_dir() else "there is no such folder"
        raise UserError(
            f"{out} is not the folder of a run: {reason}. Name the --out of an earlier pretraining."
        )


def check_out(out: Path, overwrite: bool) -> None:
    """Only an absent or empty folder, or what a killed `RunFolder.create` left, may become a run."""
    if any("\ud800" <= character <= "\udfff" for character in str(out)):
        raise UserError(f"--out {out} is not UTF-8, as TensorBoard needs it. Choose another --out.")
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"--out {out} is a file. Choose a folder that does not exist yet.")
    names = {name for name in os.listdir(out) if not name.endswith(TEMPORARY)}
    if "config.json" in names and "versions.json" in names:
        if overwrite:
            return check_replaceable(out)
        raise UserError(
            f"{out} already holds another run. Continue it with --resume {out}, replace it with --overwrite, "
            f"or choose another --out."
        )
    if not names <= UNFINISHED:
        raise UserError(
            f"--out {out} is not empty and not a run (it holds {_few(sorted(names - UNFINISHED))}). "
            f"Choose a folder that does not exist yet."
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


# --overwrite: delete a run to make place for a new one, and never anything else.

_PRODUCTS = (
    *("metrics.jsonl", "backbone.safetensors", "results.jsonl", "unreadable.csv", "explore.html"),
    *("neighbours.png", "curves.png", "curves.svg"),
    *(
        f"gallery-{pick}.{kind}"
        for pick in ("random", "intriguing", "other-class", "picked")
        for kind in ("png", "pdf", "csv", "tex")
    ),
)
# Deleted last, and run.json after config.json: it tells a restart that this run is not its own.
_DESCRIPTION = (LISTING, "data.json", "config.json", "run.json", "versions.json")
_CONTENTS = {
    "checkpoints": r"step-[0-9]{9,}(\.[0-9]+)?(/(manifest\.json|[A-Za-z0-9_-]+\.safetensors))?",
    "history": r"epoch-[0-9]{6,}-[0-9a-f]+\.safetensors",
    "tensorboard": r"events\.out\.tfevents\..+",
    "encoders": r"epoch-[0-9]{4,}\.safetensors",
    "features": r"[0-9a-f]+(\.safetensors|\.parts(/[0-9]+-[0-9]+\.safetensors)?)",
    "explore-sheets": r"sheet-[0-9]{5}\.webp",
}
"""Folders of a run, and what their contents are called."""


def check_replaceable(out: Path) -> None:
    """Refuse to overwrite what is not a run, or a run that somebody keeps other things in, links included."""
    try:
        versions = json.loads((out / "versions.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        versions = None
    if not isinstance(versions, dict) or not {"adasim", "torch"} <= versions.keys():
        raise UserError(
            f"{out} is not the folder of a run of adasim: its versions.json is not ours. --overwrite "
            f"deletes runs alone. Choose another --out."
        )
    if foreign := [name for name in sorted(map(str, _names_in(out))) if not _belongs(out, name)]:
        raise UserError(
            f"--overwrite deletes runs alone, and {out} also holds {_few(foreign)}. Move that elsewhere, or "
            f"choose another --out."
        )


def delete_run(out: Path) -> list[str]:
    """Delete the run in `out`, if there is one, but not its lock, which the caller holds; says what is gone.

    What says that this is a run goes last: a deletion cut short leaves a run that can be overwritten again.
    """
    if not (out / "config.json").exists():
        return []
    check_replaceable(out)
    saved = (out / "checkpoints").glob("step-*")
    checkpoints = sum(not path.name.endswith(TEMPORARY) for path in saved)
    encoder = "an" if (out / "backbone.safetensors").exists() else "no"
    for name in (*_CONTENTS, *_PRODUCTS, *_DESCRIPTION):
        remove(out / name)
    return [f"Overwrote the run in {out} ({checkpoints} checkpoint(s), {encoder} encoder)."]


def _names_in(out: Path) -> list[Path]:
    """All files and folders, relative to `out`, but for what killed writes left."""
    names = (path.relative_to(out) for path in out.rglob("*"))
    return [name for name in names if not any(part.endswith(TEMPORARY) for part in name.parts)]


def _belongs(out: Path, name: str) -> bool:
    """Whether a file or folder of this name can be part of a run."""
    mode = (out / name).lstat().st_mode
    folder, _, inside = name.partition("/")
    if not inside and folder not in _CONTENTS:
        return name in (*_PRODUCTS, *_DESCRIPTION, LOCK) and stat.S_ISREG(mode)
    if not inside:
        return stat.S_ISDIR(mode)
    fits = folder in _CONTENTS and re.fullmatch(_CONTENTS[folder], inside) is not None
    return fits and (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


# Restarts: a process that is started again goes on with the run that its own launch began.

_LAUNCHERS = {"SLURM_RESTART_COUNT": "SLURM_JOB_ID", "TORCHELASTIC_RESTART_COUNT": "TORCHELASTIC_RUN_ID"}
"""Where a launcher counts its restarts, and where it names what it starts again: the same name each time."""


def launch() -> dict[str, str | None]:
    """What the launchers call this start of the program, for RUN/run.json."""
    return {name: os.environ.get(name) for name in _LAUNCHERS.values()}


def restarted() -> set[str]:
    """The names, as in `launch`, of the launchers that have started this process again: requeue, `--max-restarts`.

    Not every node of torchrun counts every restart.
    """
    counts = {name: os.environ.get(count, "") for count, name in _LAUNCHERS.items()}
    return {name for name, count in counts.items() if count.isdecimal() and int(count) > 0}


def began_here(out: Path, by: Collection[str]) -> bool:
    """Whether the run in `out`, if there is one, was begun by a launch that has been `restarted` since.

    True also where nobody can tell: of a run that has lost its launch, and of two launches by torchrun without a
    name of their own ("none").
    """
    if not by or not (out / "config.json").is_file():
        return False
    now = launch()
    try:
        began = json.loads((out / "run.json").read_bytes()).get("launch", now)
        return any(began.get(name) == now[name] for name in by)
    except (OSError, ValueError, AttributeError, RecursionError):  # damage is told when the run is opened
        return True


# The lock: RUN/lock names its holder. flock rather than the file's existence, because the kernel drops it when the
# process dies, however it dies. Some network disks have no flock: there the file's content refuses a second process
# on the same machine, and an earlier process notices the content of a later one before its next save.

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
            if by_kernel is None or (by_kernel is False and _alive(before)):
                raise UserError(
                    f"{folder} is in use by {_name(before)}. Wait for it, stop it, or choose another --out."
                )
            if strict and not by_kernel and before and not _is_here(before):
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
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):  # the latter on some network disks
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
