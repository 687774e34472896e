"""The run folder: everything a person needs to understand, continue or use a run, and nobody else's files.

RUN/config.json         the configuration; written last, so its presence means that this is a run
    versions.json       Python, packages, device and threads
    data.json           the images' names, sizes, times and sampled contents, to refuse a resume with other data
    unreadable.csv      the images that could not be read, if there are any
    metrics.jsonl       one line of JSON per logged step; the same numbers in tensorboard/
    checkpoints/, history/   see `adasim.train.checkpoint`
    backbone.safetensors     the result
    lock                held while a process trains here
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from adasim.config import Config
from adasim.errors import UserError
from adasim.files import TEMPORARY, atomic_write, remove, remove_leftovers

_FOLDERS = ("checkpoints", "history", "tensorboard")
_UNFINISHED = {*_FOLDERS, "lock", "versions.json", "data.json"}  # what a kill inside `create` may leave
_PACKAGES = ("torch", "torchvision", "timm", "numpy", "safetensors", "adasim")
_MAY_CHANGE = ("recipe", "device", "deterministic", "compile", "data.", "save.", "eval.")


class RunFolder:
    """A run's folder, locked against a second process until `close` or the process's end, even by a kill.

    To begin: `RunFolder.create(out, config, {**record(images), "device": "cpu"})`.
    To continue: `RunFolder.open(out)`, then `check_same(run.description(), {"config": ...})` and
    `check_same_data(run.facts, images)`.
    """

    def __init__(self, path: Path, config: Config, facts: dict[str, Any], lock: int | None) -> None:
        self.path = path
        self.config = config
        self.facts = facts
        self._lock = lock

    @classmethod
    def create(cls, out: Path, config: Config, facts: dict[str, Any]) -> RunFolder:
        """Make a new run of an absent or empty folder, or refuse before a byte is written.

        Args:
            out: the folder.
            config: the whole configuration.
            facts: what the configuration does not say: the `record` of the data, the `device`.
        """
        out = Path(out)
        try:
            _refuse_foreign(out)
            made = not out.exists()
            out.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(out)
            try:
                _refuse_foreign(out)  # again: somebody may have been quicker
            except UserError:
                _release(lock)
                raise
            try:
                remove_leftovers(out)
                for name in _FOLDERS:
                    (out / name).mkdir(exist_ok=True)
                device = facts.get("device", config.device)
                _write_json(out / "versions.json", versions(device))
                _write_json(out / "data.json", {k: v for k, v in facts.items() if k != "device"})
                _write_json(out / "config.json", config.to_dict())
            except BaseException:
                for name in _UNFINISHED:
                    remove(out / name)
                if made:
                    out.rmdir()
                _release(lock)
                raise
        except OSError as error:
            raise _unwritable(out, error) from error
        return cls(out, config, facts, lock)

    @classmethod
    def open(cls, out: Path, lock: bool = True) -> RunFolder:
        """Open an existing run: locked and cleaned of temporary files to train on, or as it is to look at."""
        out = Path(out)
        if not (out / "config.json").is_file():
            reason = "there is no config.json in it" if out.is_dir() else "there is no such folder"
            raise UserError(
                f"{out} is not the folder of a run: {reason}. Name the --out of an earlier pretraining."
            )
        saved = _read_json(out / "config.json")
        try:
            config = Config.from_dict(saved)
        except UserError as error:
            raise UserError(f"{out / 'config.json'}: {error} Restore the file from a copy.") from None
        facts = _read_json(out / "data.json")
        if not lock:
            return cls(out, config, facts, None)
        try:
            handle = _take_lock(out)
            for folder in (out, out / "checkpoints", out / "history"):
                remove_leftovers(folder)
        except OSError as error:
            raise _unwritable(out, error) from error
        return cls(out, config, facts, handle)

    @classmethod
    def join(cls, out: Path, owner: str) -> RunFolder:
        """Take part, from another process, in the run that `owner` (its `owner()`) holds the lock of."""
        try:
            found = (Path(out) / "lock").read_text()
        except OSError:
            found = ""
        if found != owner:
            raise UserError(
                f"{out} is not the same folder on {socket.gethostname()} as for the first process of the run. "
                f"Name an --out on a disk that all machines of the run share."
            )
        return cls.open(out, lock=False)

    def owner(self) -> str:
        """Who holds the run's lock, as written in it."""
        return (self.path / "lock").read_text()

    def description(self) -> dict[str, Any]:
        """What `check_same` compares."""
        return {"config": self.config.to_dict(), **self.facts}

    def version_changes(self) -> list[str]:
        """A sentence for each package that is not the one the run began with: rounding may then differ."""
        before = _read_json(self.path / "versions.json")
        now = versions(before.get("device", ""))
        return [
            f"This run began with {name} {before[name]} and goes on with {now.get(name)}."
            for name in ("python", *_PACKAGES, "threads")
            if name in before and before[name] != now.get(name)
        ]

    def close(self) -> None:
        if self._lock is not None:
            _release(self._lock)
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def versions(device: str) -> dict[str, Any]:
    """What the numbers of a run depend on beside its configuration."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from a checkout that was never installed
            found[name] = None
    found["torch"] = str(torch.__version__)  # with the build (+cu132), which the package's metadata lack
    return {**found, "device": str(device), "threads": torch.get_num_threads()}


def check_same(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to continue a run with other settings, naming the first differences.

    Both are `{"config": ...}`. Where the images lie, how they are read, the device, saving and evaluation may
    change; whatever shapes the result may not. The images are compared by `adasim.data.check_same_data`.
    """
    before, after = (decisive(description["config"]) for description in (saved, now))
    changed = [
        f"{name} was {before.get(name)} and is now {after.get(name)}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
    if changed:
        more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
        raise UserError(
            f"Cannot resume with other settings: {'; '.join(changed[:3])}{more}. "
            f"Resume without these options, or start a new run with another --out."
        )


def decisive(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that shape the result, by their names on the command line."""
    flat = _flatten(json.loads(json.dumps(config)))
    return {name: value for name, value in flat.items() if not name.startswith(_MAY_CHANGE)}


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


_held: set[int] = set()  # handles of the locks that this process holds


def _drop_inherited() -> None:
    """A forked loader worker must not keep the lock of a main process that was killed."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_drop_inherited)


def _take_lock(folder: Path) -> int:
    """flock rather than a file's existence: the kernel drops it when the process dies, however it dies."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        owner = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise UserError(
                f"{folder} is in use by {owner}. Wait for it, stop it, or choose another --out."
            ) from None
        raise
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    _held.add(handle)
    return handle


def _release(handle: int) -> None:
    if handle in _held:
        _held.discard(handle)
        os.close(handle)


def _refuse_foreign(out: Path) -> None:
    """Only an absent or empty folder, or what a killed `create` left, may become a run."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"--out {out} is a file. Choose a folder that does not exist yet.")
    names = {name for name in os.listdir(out) if not name.endswith(TEMPORARY)}
    if "config.json" in names and "versions.json" in names:
        raise UserError(
            f"{out} already holds another run. Continue it with --resume {out}, or choose another --out."
        )
    if not names <= _UNFINISHED:
        raise UserError(
            f"--out {out} is not empty and not a run (it holds {_few(sorted(names - _UNFINISHED))}). "
            f"Choose a folder that does not exist yet."
        )


def _unwritable(out: Path, error: OSError) -> UserError:
    return UserError(f"Cannot write to {out}: {error.strerror}. Choose another --out.")


def _write_json(path: Path, value: Any) -> None:
    atomic_write(path, json.dumps(value, indent=1).encode() + b"\n")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read ({error}). Restore it, or start again with another --out."
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a file of ours. Restore it, or start again with another --out.")
    return value


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`: the names of the command line."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(
            _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return flat
