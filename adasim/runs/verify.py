"""Which checkpoint may be trusted: one of this run that is whole, file by file.

Nothing in it is believed: names are plain, files are regular, sizes and hashes agree, headers parse.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from adasim.runs.manifest import (
    PLAIN,
    InvalidCheckpoint,
    OtherFormat,
    require_kind,
    unseal,
)
from adasim.util.files import sha256_file

STEP = re.compile(r"step-([0-9]{9,})(?:\.([0-9]+))?")
EPOCH = re.compile(r"epoch-([0-9]{6,})-([0-9a-f]{16})\.safetensors")
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. Tensors are read when asked for."""

    path: Path
    step: int
    info: dict[str, Any]
    """What `save` was given, after a trip through JSON (tuples became lists)."""
    groups: tuple[str, ...]
    history: tuple[str, ...]
    """Names of the history files, in the order that `save` was given."""
    lost: dict[str, str] = field(default_factory=dict)
    """Those of them that are not whole, and why."""
    run: str | None = None
    """The id of the run that saved it."""

    def tensors(self, group: str) -> dict[str, Tensor]:
        """One group's tensors on the CPU: pages of the file, copied only when written to."""
        return _read(self.path / f"{group}{SUFFIX}")

    def history_tensors(self, name: str) -> dict[str, Tensor]:
        """One epoch's tensors, by its name in `history`."""
        if name not in self.history or name in self.lost:
            raise KeyError(name)
        return _read(self.path.parent.parent / "history" / name)


class Verifier:
    """Looks through checkpoints in `folder` for those of `run` (its id; None: of any) that are whole."""

    def __init__(self, folder: Path, run: str | None) -> None:
        self.history = folder / "history"
        self.run = run
        self._hashes: dict[tuple[int, ...], str] = {}  # file as it was when hashed -> SHA-256

    def of_others(self, path: Path) -> set[str] | None:
        """The history files of a checkpoint that is another run's or another version's; None for one of ours."""
        try:
            manifest = unseal(path / "manifest.json")
            if self.run is None or manifest["run"] == self.run:
                return None
            return {entry["name"] for entry in manifest["history"]}
        except OtherFormat:
            return set()
        except (InvalidCheckpoint, OSError, KeyError, TypeError):
            return None

    def verify(self, path: Path) -> Checkpoint:
        """Read the manifest and check every file it names, trusting nothing in it."""
        try:
            require_kind(path, stat.S_ISDIR, "folder")
            manifest = unseal(path / "manifest.json")
            step, groups, history = manifest["step"], manifest["groups"], manifest["history"]
            if self.run is not None and manifest["run"] != self.run:
                raise InvalidCheckpoint("it belongs to another run")
            if step != order(path)[0]:
                raise InvalidCheckpoint(f"its manifest speaks of step {step}")
            if not isinstance(manifest["info"], dict):
                raise InvalidCheckpoint("its manifest has no info")
            for group, entry in groups.items():
                self._check(path, f"{group}{SUFFIX}", entry)
            names = tuple(entry["name"] for entry in history)
            lost = {}
            for name, entry in zip(names, history, strict=True):
                _require_plain(name)
                try:
                    self._check(self.history, name, entry)
                except (InvalidCheckpoint, OSError) as problem:
                    reason = getattr(problem, "strerror", None)  # of an OSError
                    lost[name] = f"{name} could not be read ({reason})" if reason else str(problem)
            return Checkpoint(path, step, manifest["info"], tuple(groups), names, lost, manifest["run"])
        except OSError as error:
            raise InvalidCheckpoint(
                f"{error.filename or path} could not be read ({error.strerror})"
            ) from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InvalidCheckpoint(f"its manifest is malformed ({error!r})") from error

    def _check(self, folder: Path, name: str, entry: dict[str, Any]) -> None:
        _require_plain(name)
        path = folder / name
        if not os.path.lexists(path):
            raise InvalidCheckpoint(f"{name} is missing")
        size = require_kind(path, stat.S_ISREG, "regular file").st_size
        if size != entry["size"]:
            raise InvalidCheckpoint(f"{name} has {size} bytes instead of {entry['size']}")
        if self.hash(path) != entry["sha256"]:
            raise InvalidCheckpoint(f"the content of {name} has changed (its SHA-256 differs)")
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise InvalidCheckpoint(f"{name} is not a safetensors file ({error})") from error

    def entry(self, path: Path) -> dict[str, Any]:
        return {"size": path.stat().st_size, "sha256": self.hash(path)}

    def hash(self, path: Path) -> str:
        """SHA-256 of a file; known files that have not been touched since are not read again.

        Without this every save would read the whole window of history, and retention every kept checkpoint.
        """
        version = _version(path)
        if version not in self._hashes:
            self._hashes[version] = sha256_file(path)
        return self._hashes[version]

    def know(self, path: Path, sha256: str) -> None:
        """Remember the hash of a file that another process has just computed."""
        self._hashes[_version(path)] = sha256

    def forget(self) -> None:
        """Drop all known hashes: every file is read again when it is next needed."""
        self._hashes.clear()


def order(path: Path) -> tuple[int, int]:
    """(step, revision) of a checkpoint's folder."""
    match = STEP.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _version(path: Path) -> tuple[int, ...]:
    """Which file this is, and as of when."""
    status = path.stat()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _require_plain(name: str) -> None:
    if not PLAIN.fullmatch(name):
        raise InvalidCheckpoint(f"its manifest names {name!r}, which is not a plain file name")


def _read(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
