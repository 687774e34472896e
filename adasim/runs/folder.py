"""The run folder: everything a person needs to understand, continue or use a run, and nobody else's files.

RUN/config.json         the configuration; written last, so its presence means that this is a run
    run.json            the run's id, which its checkpoints bear too, whether it has saved one, who launched it
    versions.json       Python, packages, device and threads
    data.json           the images' fingerprint and sampled contents, to refuse a resume with other data
    listing.npz         of a folder of images: its files' names, sizes and times
    unreadable.csv      the images that could not be read, if there are any
    metrics.jsonl       one line of JSON per logged step; the same numbers in tensorboard/
    checkpoints/, history/   see `adasim.runs.checkpoint`
    backbone.safetensors     the result
    encoders/           the same as of earlier epochs, with `--save.encoder-every`
    lock                held while a process trains here

The command line asks here, before torch is imported, whether a folder may become a run, or is one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import secrets
import socket
import stat
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adasim import __version__
from adasim.config import Config
from adasim.registry import PAIRS, is_path
from adasim.util.errors import UserError
from adasim.util.files import TEMPORARY, atomic_write, remove, remove_leftovers, write_errors
from adasim.util.terminal import few

if TYPE_CHECKING:  # which imports torch
    from adasim.data.image_folder import Listing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LOCK, _LISTING = "lock", "listing.npz"
_FOLDERS = ("checkpoints", "history", "tensorboard")
_UNFINISHED = {*_FOLDERS, _LOCK, "versions.json", "data.json", _LISTING, "run.json"}
"""What a kill inside `RunFolder.create` may leave."""
_PACKAGES = ("torch", "torchvision", "timm", "numpy", "safetensors", "adasim")
_OF_IMAGES = ("data.source", "data.exclude", "data.labels")
_MAY_CHANGE = ("recipe", "device", "deterministic", "compile", "data.", "save.", "eval.")


@dataclass
class RunFolder:
    """A run's folder, locked against a second process until `close` or the process's end, even by a kill.

    To begin: `RunFolder.create(out, config, {**record(images), "device": "cpu"}, listing=listing_file(images))`.
    To continue: `RunFolder.open(out)`, then `check_same(run.config, config)` and
    `check_same_data(run.facts, images, listing=run.listing())`. Before each save: `check_ours()`.
    """

    path: Path
    config: Config
    facts: dict[str, Any]
    _lock: FolderLock | None = None
    _identity: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Sentences for the person who started the run."""

    def __post_init__(self) -> None:
        if self._lock is not None and not self._lock.by_kernel:
            self.notes.append(
                f"The disk of {self.path} has no file locks: a second process on this run, from another machine, is "
                f"not refused; the earlier of the two stops at its next save."
            )

    @classmethod
    def create(
        cls,
        out: Path,
        config: Config,
        facts: dict[str, Any],
        *,
        listing: bytes | None = None,
        overwrite: bool = False,
    ) -> RunFolder:
        """Make a new run of an absent or empty folder, or refuse before a byte is written.

        Args:
            out: the folder.
            config: the whole configuration.
            facts: what the configuration does not say: the `record` of the data, the `device`.
            listing: what `listing_file` gave for the data.
            overwrite: if the folder holds a run that no process uses, and nothing else, delete it first.
        """
        with write_errors(f"to {out}"), ExitStack() as undo:  # each step says how it is undone
            check_out(out, overwrite)
            if not out.exists():
                out.mkdir(parents=True, exist_ok=True)
                undo.callback(_remove_if_empty, out)
            lock = FolderLock.take(out, strict=overwrite)
            undo.callback(lock.release)
            check_out(out, overwrite)  # again: somebody may have been quicker
            notes = delete_run(out) if overwrite else []
            for name in ("config.json", *_UNFINISHED):
                undo.callback(remove, out / name)
            remove_leftovers(out)
            for name in _FOLDERS:
                (out / name).mkdir(exist_ok=True)
            identity = {"id": secrets.token_hex(8), "saved": False, "launch": launch()}
            recorded = {k: v for k, v in facts.items() if k != "device"}
            if listing is not None:
                atomic_write(out / _LISTING, listing)
            device = facts.get("device", config.device)
            _write_json(out / "versions.json", {**versions(device), "started_in": os.getcwd()})
            _write_json(out / "data.json", {**recorded, "checksum": checksum(recorded)})
            _write_json(out / "run.json", identity)
            _write_json(out / "config.json", config.to_dict())
            undo.pop_all()  # it is made
        return cls(out, config, facts, lock, identity, notes)

    @classmethod
    def open(cls, out: Path, lock: bool = True) -> RunFolder:
        """Open an existing run: locked and cleaned of temporary files to train on, or as it is to look at."""
        require_run(out)
        for path in (out / name for name in (*_DESCRIPTION, "metrics.jsonl", "unreadable.csv")):
            if path.exists() and not path.is_file():  # a pipe would be waited for without end
                raise UserError(
                    f"{path} is not a regular file. Restore it, or start again with another --out."
                )
        config, facts = _read_config(out), read_json(out / "data.json")
        if facts.pop("checksum", None) not in (None, checksum(facts)):
            raise UserError(
                f"{out / 'data.json'} is damaged; the images may be as they were. Restore it from a copy, "
                f"or start a new run with another --out."
            )
        if not lock:
            return cls(out, config, facts)
        identity = read_json(out / "run.json") if (out / "run.json").exists() else {}
        with write_errors(f"to {out}"):
            run = cls(out, config, facts, FolderLock.take(out), identity)
            for name in ("", "checkpoints", "history", "encoders"):
                remove_leftovers(out / name)
        return run

    @classmethod
    def join(cls, out: Path, owner: str) -> RunFolder:
        """Take part, from another process, in the run that `owner` (its `owner()`) holds the lock of."""
        if _text(out / _LOCK) != owner:
            raise UserError(
                f"{out} is not the same folder on {socket.gethostname()} as for the first process of the run. "
                f"Name an --out on a disk that all machines of the run share."
            )
        return cls.open(out, lock=False)

    def owner(self) -> str:
        """Who holds the run's lock, as written in it."""
        return (self.path / _LOCK).read_text()

    @property
    def id(self) -> str | None:
        """What tells this run from any other, also in its checkpoints; None if run.json is lost or was not read."""
        return self._identity.get("id")

    @property
    def has_saved(self) -> bool:
        """Whether a checkpoint was ever saved here."""
        return bool(self._identity.get("saved"))

    def identify(self, **facts: Any) -> None:
        """Keep `id` or `saved` in run.json."""
        identity = {**self._identity, **facts}
        _write_json(self.path / "run.json", identity)
        self._identity = identity

    def follow(self, config: Config) -> None:
        """Let config.json say how long the run now is, and where its images are."""
        source = config.data.source
        if source != self.config.data.source and is_path(source):
            source = os.path.abspath(source)  # the run may have been started in another folder
        data = replace(self.config.data, source=source)
        self.config = replace(self.config, epochs=config.epochs, data=data)
        _write_json(self.path / "config.json", self.config.to_dict())

    def check_ours(self) -> None:
        """Refuse to go on where the folder of this name is no longer the one that was opened.

        Folders are deleted, moved and made anew while a process is stopped or in a long epoch; its lock then stays
        on a file that has no name. A lock file that somebody deleted is put back, if nobody else took the run.
        """
        assert self._lock is not None
        try:
            mark, described = _text(self.path / _LOCK), _text(self.path / "run.json")
            if mark == self._lock.mark:
                if described is None:
                    self.identify()
                return
            mine = described is not None and self.id is not None and f'"{self.id}"' in described
            if mine and mark is None:
                self._lock.release()
                self._lock = FolderLock.take(self.path)
                return
        except OSError:  # a disk that fails at the moment: the save will say so
            return
        if mine:
            raise UserError(
                f"{_holder(mark or '')} has opened the run in {self.path} since this process began, and goes on with "
                f"it. This process stops here and leaves the folder alone."
            )
        elsewhere = "is no longer this run's" if self.path.exists() else "is gone"
        happened = elsewhere if described is None else "holds another run now"
        raise UserError(
            f"{self.path} {happened}: this run's folder was deleted or moved while it was training. What was not "
            f"saved is lost. If you moved it, go on with: adasim pretrain --resume NEW-PLACE"
        )

    def listing(self) -> Listing | None:
        """What was in the folder of images that the run began with; None of other data, and if it is lost."""
        from adasim.data.image_folder import Listing

        return Listing.read(self.path / _LISTING, str(self.facts.get("fingerprint")))

    def version_changes(self) -> list[str]:
        """A sentence for each package that is not the one the run began with: rounding may then differ."""
        before = read_json(self.path / "versions.json", vital=False)
        if not before:
            return [
                f"{self.path / 'versions.json'} is lost or damaged: whether torch, timm and others are those "
                f"that the run began with cannot be told."
            ]
        now = versions(before.get("device", ""))
        return [
            f"This run began with {name} {before[name]} and goes on with {now.get(name)}."
            for name in ("python", *_PACKAGES, "threads")
            if name in before and before[name] != now.get(name)
        ]

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
        raise UserError(f"--out {out} is not UTF-8, as libraries need it. Choose another --out.")
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
    if foreign := sorted(names - _UNFINISHED):
        raise UserError(
            f"--out {out} is not empty and not a run (it holds {few(foreign)}). "
            f"Choose a folder that does not exist yet."
        )


def check_source(run: Path, source: str) -> None:
    """Say where the images of a run were, if they are not found there (or, named relative to the folder that it was
    started in, not from here)."""
    if not is_path(source) or os.path.exists(source):
        return
    elsewhere = "say where they are now with --data NEW-PLACE"
    folder = read_json(run / "versions.json", vital=False).get("started_in")
    if os.path.isabs(source) or folder == os.getcwd():
        raise UserError(
            f"The images of {run} were at {source}, and there is nothing now. Put them back, or {elsewhere}."
        )
    raise UserError(
        f"{run} was started from {folder or 'another folder'} with --data {source}, and here, in {os.getcwd()}, "
        f"there is no {source}. Go to that folder, or {elsewhere}."
    )


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
_DESCRIPTION = (_LISTING, "data.json", "config.json", "run.json", "versions.json")
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
    if not {"adasim", "torch"} <= read_json(out / "versions.json", vital=False).keys():
        raise UserError(
            f"{out} is not the folder of a run of adasim: its versions.json is not ours. --overwrite "
            f"deletes runs alone. Choose another --out."
        )
    if foreign := [str(path.relative_to(out)) for path in sorted(out.rglob("*")) if not _belongs(out, path)]:
        raise UserError(
            f"--overwrite deletes runs alone, and {out} also holds {few(foreign)}. Move that elsewhere, or "
            f"choose another --out."
        )


def _belongs(out: Path, path: Path) -> bool:
    """Whether a file or folder of this name can be part of a run, or is what a killed write left."""
    name, mode = path.relative_to(out), path.lstat().st_mode
    if any(part.endswith(TEMPORARY) for part in name.parts):
        return True
    folder, _, inside = str(name).partition("/")
    if folder not in _CONTENTS:
        return str(name) in (*_PRODUCTS, *_DESCRIPTION, _LOCK) and stat.S_ISREG(mode)
    if not inside:
        return stat.S_ISDIR(mode)
    return bool(re.fullmatch(_CONTENTS[folder], inside)) and (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def delete_run(out: Path) -> list[str]:
    """Delete the run in `out`, if there is one, but not its lock, which the caller holds; says what is gone.

    What says that this is a run goes last: a deletion cut short leaves a run that can be overwritten again.
    """
    if not (out / "config.json").exists():
        return []
    checkpoints = sum(not path.name.endswith(TEMPORARY) for path in (out / "checkpoints").glob("step-*"))
    encoder = "an" if (out / "backbone.safetensors").exists() else "no"
    for name in (*_CONTENTS, *_PRODUCTS, *_DESCRIPTION):
        remove(out / name)
    return [f"Overwrote the run in {out} ({checkpoints} checkpoint(s), {encoder} encoder)."]


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
    began = read_json(out / "run.json", vital=False).get("launch", now)  # damage is told when it is opened
    return any(began.get(name) == now[name] for name in by)


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
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            by_kernel = _flock(handle)
            before = os.pread(handle, 1000, 0).decode(errors="replace")
            here = re.match(rf"process (\d+) on {re.escape(socket.gethostname())}\n\w+ (\d+)\n", before)
            alive = here is not None and _began(here[1]) == here[2]
            if by_kernel is None or (not by_kernel and alive):
                raise UserError(
                    f"{folder} is in use by {_holder(before)}. Wait for it, stop it, or choose another --out."
                )
            if strict and not by_kernel and before and not here:
                raise UserError(
                    f"{folder} may be in use by {_holder(before)}, and its disk has no file locks to tell. "
                    f"If that process is dead, delete {folder / _LOCK}."
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
    stat = _text(Path(f"/proc/{pid}/stat"))
    return stat.rpartition(")")[2].split()[19] if stat else ""


def _holder(mark: str) -> str:
    return mark.partition("\n")[0].strip() or "another process"


# Settings: which of them may differ between two processes of a run, or between runs of one setting.


def check_same(before: Config, now: Config) -> None:
    """Refuse to continue a run with other settings, naming the first differences.

    Where the images lie, how they are read, the device, saving and evaluation may change, so may `micro_batch`, and
    the run may become longer; whatever else shapes the result may not. The images are compared by
    `adasim.data.check_same_data`.
    """
    if changed := changed_settings(decisive(before), decisive(now)):
        raise UserError(
            f"Cannot resume with other settings: {changed}. "
            f"Resume without these options, or start a new run with another --out."
        )


def decisive(config: Config, also: Collection[str] = ()) -> dict[str, Any]:
    """The settings that shape the result, and those named `also`, by their names on the command line."""
    flat = flatten(json.loads(json.dumps(config.to_dict())))
    return {name: flat[name] for name in flat if name in also or not name.startswith(_MAY_CHANGE)}


def changed_settings(before: dict[str, Any], after: dict[str, Any]) -> str:
    """In words, which `decisive` settings differ so that a run cannot go on; empty if none does."""
    # micro_batch matters to batch norm alone: see `pretrain`. A setting that `before` does not have is newer than it
    # and at its default, or another method's or policy's, which are named.
    names = before.keys() - {"micro_batch"}
    if before.get("method") != after.get("method"):  # whose settings have nothing in common
        own = tuple(f"{settings.get('method')}." for settings in (before, after))
        names = {name for name in names if not name.startswith(own)}
    changed = []
    for name in sorted(names):
        if before.get(name) == after.get(name) or (name == "epochs" and before[name] < after[name]):
            continue
        only = " (it can only be raised)" if name == "epochs" else ""
        changed.append(f"{name} was {before.get(name)} and is now {after.get(name)}{only}")
    more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
    return "; ".join(changed[:3]) + more


def group_by_setting(runs: Sequence[tuple[Config, str | None]]) -> list[tuple[dict[str, Any], list[int]]]:
    """Each setting with the numbers of the runs that have it with some random seed, in the runs' order.

    Args:
        runs: of each its configuration, and the fingerprint of its images: they are the same wherever they lay.
    """
    places_of: dict[str, dict[str, Any]] = {}
    members: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for number, (config, fingerprint) in enumerate(runs):
        settings = settings_of(config)
        if fingerprint is not None:
            where = {name: settings[name] for name in _OF_IMAGES}
            settings |= places_of.setdefault(fingerprint, where)
        members.setdefault(json.dumps(settings, sort_keys=True), (settings, []))[1].append(number)
    return list(members.values())


def settings_of(config: Config) -> dict[str, Any]:
    """All settings that shape what is learnt but the seed, by their names on the command line; without those that
    have no effect beside the others."""
    shaping = decisive(config, also=_OF_IMAGES)
    idle = {"seed", "neighbors.watch", "neighbors.cache", "views.in_memory", "views.reduced_jpeg"}
    if not PAIRS[config.pairs].draws_from_memory and not config.neighbors.watch:
        idle |= {name for name in shaping if name.startswith("neighbors.") and name != "neighbors.oracle_p"}
    if config.pairs in ("standard", "nearest", "oracle"):
        idle.add("neighbors.tau")
    if config.pairs != "oracle":
        idle.add("neighbors.oracle_p")
    return {name: value for name, value in shaping.items() if name not in idle}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`: the names of the command line."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return flat


def versions(device: str) -> dict[str, Any]:
    """What the numbers of a run depend on beside its configuration."""
    import torch

    packages = {name: metadata.version(name) for name in _PACKAGES if name != "adasim"}
    packages["torch"] = str(torch.__version__)  # with the build (+cu132), which the package's metadata lack
    packages["adasim"] = __version__  # also of a checkout that was never installed
    system = {"python": platform.python_version(), "platform": platform.platform()}
    return {**system, **packages, "device": str(device), "threads": torch.get_num_threads()}


# Files


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # not empty: somebody was quicker, and it is theirs
        folder.rmdir()


def _text(path: Path) -> str | None:
    """A small file's text; None if there is no such file."""
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def checksum(tree: Any) -> str:
    """SHA-256 of a tree of JSON, whatever the order of its names."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _write_json(path: Path, value: Any) -> None:
    atomic_write(path, json.dumps(value, indent=1).encode() + b"\n")


def _read_config(out: Path) -> Config:
    saved = read_json(out / "config.json")
    try:
        return Config.from_dict(saved)
    except UserError as error:
        if "architecture" in saved or "model_type" in saved:
            raise UserError(
                f"{out} is an encoder for timm or transformers and not the folder of a run. Name the run that it "
                f"was exported from; adasim explore and gallery take an encoder as --backbone."
            ) from None
        raise UserError(f"{out / 'config.json'}: {error} Restore the file from a copy.") from None


def read_json(path: Path, *, vital: bool = True) -> dict[str, Any]:
    """What a file of a run says; a damaged one is refused, unless it is not vital: then it says nothing."""
    value, problem = None, "is not a file of ours"
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        problem = f"cannot be read ({error})"
    if isinstance(value, dict):
        return value
    if not vital:
        return {}
    raise UserError(f"{path} {problem}. Restore it, or start again with another --out.")
