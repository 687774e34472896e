"""Whether a checkpoint is whole: manifest.json vouches for itself and, by size and SHA-256, for every file it names.

`verify` is the one door: names are plain, files are regular, sizes and hashes agree, headers parse.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from adasim import __version__
from adasim.runs.folder import checksum
from adasim.runs.tensors import read_tensors
from adasim.util.files import sha256_file

FORMAT = 3
SUFFIX = ".safetensors"
STEP = re.compile(r"step-([0-9]{9,})(?:\.([0-9]+))?")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # no separators, no leading dot: cannot leave its folder


class InvalidCheckpoint(Exception):  # noqa: N818
    """A checkpoint is not whole; the message says what is wrong with it."""


class OtherFormat(InvalidCheckpoint):
    """It is whole, and was written by another version of adasim."""


class OtherRun(InvalidCheckpoint):
    """It belongs to another run, and needs these files of history."""

    def __init__(self, history: set[str]) -> None:
        super().__init__("it belongs to another run")
        self.history = history


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. Tensors are read when asked for."""

    path: Path
    step: int
    info: dict[str, Any]
    """What `save` was given, after a trip through JSON (tuples became lists)."""
    history: tuple[str, ...]
    """Names of the history files, in the order that `save` was given."""
    lost: dict[str, str] = field(default_factory=dict)
    """Those of them that are not whole, and why."""
    run: str | None = None
    """The id of the run that saved it."""

    def tensors(self, group: str) -> dict[str, Tensor]:
        """One group's tensors on the CPU: pages of the file, copied only when written to."""
        return read_tensors(self.path / f"{group}{SUFFIX}")

    def history_tensors(self, name: str) -> dict[str, Tensor]:
        """One epoch's tensors, by its name in `history`."""
        return read_tensors(self.path.parent.parent / "history" / name)


class FileHashes:
    """SHA-256 of files; those that have not been touched since are not read again.

    Without this every save would read the whole window of history, and retention every checkpoint that is kept.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], str] = {}

    def of(self, path: Path) -> str:
        version = self._version(path)
        if version not in self._known:
            self._known[version] = sha256_file(path)
        return self._known[version]

    def entry(self, path: Path) -> dict[str, Any]:
        """What a manifest says of a file."""
        return {"size": path.stat().st_size, "sha256": self.of(path)}

    def know(self, path: Path, sha256: str) -> None:
        """Remember the hash of a file that another process has just computed."""
        self._known[self._version(path)] = sha256

    @staticmethod
    def _version(path: Path) -> tuple[int, ...]:
        """Which file this is, and as of when."""
        status = path.stat()
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def seal(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON, with format, version and the SHA-256 of its own canonical form."""
    manifest = json.loads(json.dumps({"format": FORMAT, "adasim": __version__, **manifest}))
    return json.dumps({**manifest, "sha256": checksum(manifest)}, indent=1).encode()


def unseal(path: Path) -> dict[str, Any]:
    """What `seal` was given.

    Raises:
        OtherFormat: it is whole, and of another version.
        InvalidCheckpoint: it is not whole.
    """
    with _reading(path, "regular file"):
        try:
            manifest = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            manifest = None
    if not isinstance(manifest, dict):
        raise InvalidCheckpoint("manifest.json is not a manifest of ours")
    if manifest.pop("sha256", None) != checksum(manifest):
        raise InvalidCheckpoint("manifest.json has changed (its SHA-256 differs)")
    if manifest.get("format") != FORMAT:
        raise OtherFormat(
            f"was written by adasim {manifest.get('adasim', '?')} (checkpoint format {manifest.get('format')}), and "
            f"this is adasim {__version__} (format {FORMAT}). Finish the run with that version, or start a new one "
            f"with another --out; the encoder in backbone.safetensors can be used as it is."
        )
    return manifest


def verify(path: Path, run: str | None, hashes: FileHashes) -> Checkpoint:
    """The checkpoint in the folder `path`, if it is one of `run` (None: of any) and every file in it is whole.

    A history file that is not whole makes it incomplete, and not invalid: see `Checkpoint.lost`.
    """
    with _reading(path, "folder"):
        manifest = unseal(path / "manifest.json")
    step, history = manifest["step"], {entry["name"]: entry for entry in manifest["history"]}
    if run not in (None, manifest["run"]):
        raise OtherRun(set(history))
    if step != order(path)[0]:
        raise InvalidCheckpoint(f"its manifest speaks of step {step}")
    groups = {f"{group}{SUFFIX}": entry for group, entry in manifest["groups"].items()}
    for name in (*groups, *history):
        if not _PLAIN.fullmatch(name):
            raise InvalidCheckpoint(f"its manifest names {name!r}, which is not a plain file name")
    for name, entry in groups.items():
        _check_file(path / name, entry, hashes)
    lost = {}
    for name, entry in history.items():
        try:
            _check_file(path.parent.parent / "history" / name, entry, hashes)
        except InvalidCheckpoint as problem:
            lost[name] = str(problem)
    return Checkpoint(path, step, manifest["info"], tuple(history), lost, manifest["run"])


def order(path: Path) -> tuple[int, int]:
    """(step, revision) of a checkpoint's folder."""
    match = STEP.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _check_file(path: Path, entry: dict[str, Any], hashes: FileHashes) -> None:
    """Raise unless the file is what the manifest's entry says, and safetensors can read its header."""
    with _reading(path, "regular file"):
        if (size := path.stat().st_size) != entry["size"]:
            raise InvalidCheckpoint(f"{path.name} has {size} bytes instead of {entry['size']}")
        if hashes.of(path) != entry["sha256"]:
            raise InvalidCheckpoint(f"the content of {path.name} has changed (its SHA-256 differs)")
        with safe_open(path, framework="pt"):
            pass


@contextmanager
def _reading(path: Path, kind: str) -> Iterator[None]:
    """What the disk or safetensors refuses makes a checkpoint invalid; links, pipes and devices are not opened."""
    try:
        is_kind = stat.S_ISDIR if kind == "folder" else stat.S_ISREG
        if not is_kind(path.lstat().st_mode):
            raise InvalidCheckpoint(f"{path.name} is not a {kind}")
        yield
    except FileNotFoundError as error:
        raise InvalidCheckpoint(f"{path.name} is missing") from error
    except OSError as error:
        raise InvalidCheckpoint(f"{path.name} could not be read ({error.strerror})") from error
    except SafetensorError as error:
        raise InvalidCheckpoint(f"{path.name} is not a safetensors file ({error})") from error
