"""Checkpoints of one run: tensors in safetensors files, everything else in a hashed JSON manifest, no pickle.

    RUN/checkpoints/step-000000123/method.safetensors      one file per group of tensors
                                   memory-00003.safetensors   some groups are one rank's share, written by it
                                   manifest.json           last: size and SHA-256 of every file, and `info`
    RUN/history/epoch-000007-1f0c9a52d3e4b687.safetensors  immutable, one per epoch and rank, shared by checkpoints

A checkpoint is written into a temporary folder. When all its files are on the disk (`fsync`), one rename gives the
folder its name: a kill at any moment leaves the checkpoints before it whole. A second save at the same step (before
and after an epoch's end) gets the name `step-000000123.1`: a valid checkpoint is never replaced, only superseded.
Loading takes the newest that `verify` finds whole; where none is, because they share a history file that is damaged
or gone, it takes the newest without that file.

This module knows tensors and JSON, nothing of models. Only the process that holds the run's lock may write, and
the other ranks of its run, which call every method together with it and fail together with it.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from adasim import __version__
from adasim.dist.processes import ALONE, Distributed
from adasim.runs.folder import checksum
from adasim.util.errors import UserError
from adasim.util.files import atomic_write, remove, sha256_file, sync, temporary_name

T = TypeVar("T")
FORMAT = 3
_STEP = re.compile(r"step-([0-9]{9,})(?:\.([0-9]+))?")
_EPOCH = re.compile(r"epoch-([0-9]{6,})-([0-9a-f]{16})\.safetensors")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # no separators, no leading dot: cannot leave its folder
_SUFFIX = ".safetensors"
_TRIES = 20  # to read from a run that goes on; it would have to save that often meanwhile


class SaveFailed(UserError):  # noqa: N818 - it says what happened
    """A save did not succeed (disk full, quota, folder gone); the checkpoints before it are untouched."""


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
        return _read(self.path / f"{group}{_SUFFIX}")

    def history_tensors(self, name: str) -> dict[str, Tensor]:
        """One epoch's tensors, by its name in `history`."""
        return _read(self.path.parent.parent / "history" / name)


class CheckpointStore:
    """Checkpoints and history files of the run in `folder`; `warn` is told of those that are not whole.

    `run` is the run's id: checkpoints of another are neither used nor touched. None takes those of any.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        warn: Callable[[str], None] = print,
        ranks: Distributed = ALONE,
        run: str | None = None,
    ) -> None:
        self.checkpoints, self.history = Path(folder) / "checkpoints", Path(folder) / "history"
        self.keep, self.warn, self.ranks, self.run = keep, warn, ranks, run
        self._hashes = FileHashes()

    def save(
        self, step: int, tensors: dict[str, dict[str, Tensor]], info: dict[str, Any], history: list[str]
    ) -> Path:
        """Write a checkpoint, then delete what retention no longer needs.

        Args:
            step: optimiser steps done.
            tensors: group -> name -> tensor; each group becomes one file, written by the rank that names it.
            info: whatever else the run needs, as JSON.
            history: names that `write_history` returned, on any rank, and that this checkpoint needs.

        Raises:
            SaveFailed: nothing was kept of this checkpoint and nothing before it was touched.
        """
        what, folder, final = f"the checkpoint of step {step}", Path(), Path()
        with self.saving(what):
            if self.ranks.is_main:
                revisions = [revision for s, revision in map(_order, self.newest_first()) if s == step]
                final = self.checkpoints / f"step-{step:09d}{f'.{max(revisions) + 1}' if revisions else ''}"
                folder = temporary_name(final)
                folder.mkdir()
        folder, final = self.ranks.share((folder, final))
        try:
            entries = {}
            with self.saving(what):  # every rank writes its own files ...
                for group, values in tensors.items():
                    _write(folder / f"{group}{_SUFFIX}", values)
                    entries[group] = self._hashes.entry(folder / f"{group}{_SUFFIX}")
            shares = self.ranks.gather(entries)
            with self.saving(what):  # ... and the first one the manifest, when all are there
                if self.ranks.is_main:
                    groups = {group: entry for share in shares for group, entry in share.items()}
                    for group, entry in groups.items():  # the rank that wrote it has just hashed it
                        self._hashes.know(folder / f"{group}{_SUFFIX}", entry["sha256"])
                    lists = [{"name": name, **self._hashes.entry(self.history / name)} for name in history]
                    manifest = {"step": step, "run": self.run, "info": info, "groups": groups}
                    atomic_write(folder / "manifest.json", seal({**manifest, "history": lists}))
                    os.rename(folder, final)
                    sync(self.checkpoints)
        finally:
            if self.ranks.is_main:
                remove(folder)
        if self.ranks.is_main:
            self._retain()
        return final

    def write_history(self, epoch: int, tensors: dict[str, Tensor]) -> str:
        """Write this rank's share of an epoch once and for all; returns its file's name.

        The name holds the content's hash. Writing the same epoch again (after a kill between this and the
        next checkpoint) gives the same name and no second file; `save` prunes files that no checkpoint names.
        """
        with self.saving(f"the history of epoch {epoch}"):
            # A folder, since safetensors has temporary files, too.
            folder = temporary_name(self.history / f"epoch-{epoch:06d}")
            folder.mkdir()
            try:
                _write(folder / "new", tensors)
                digest = sha256_file(folder / "new")
                final = self.history / f"epoch-{epoch:06d}-{digest[:16]}{_SUFFIX}"
                if not final.is_file() or sha256_file(final) != digest:
                    os.replace(folder / "new", final)
            finally:
                remove(folder)
            sync(self.history)
        return final.name

    def damaged(self, names: Iterable[str]) -> set[str]:
        """Those of the history files that are no longer what `write_history` wrote; the same answer on all ranks."""

        def is_damaged(name: str) -> bool:
            match = _EPOCH.fullmatch(name)
            try:
                return match is None or not self._hashes.of(self.history / name).startswith(match[2])
            except OSError:
                return True

        return self.ranks.share(set(filter(is_damaged, names if self.ranks.is_main else ())))

    def load_latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, saying which newer ones are not; None if there is none at all.

        Without a whole one, the newest that lacks nothing but history files (its `lost`): an absent list is that
        of an image that was not visited. Rank 0 looks through them, however long that takes, and tells the others.

        Raises:
            UserError: there are checkpoints and none is usable, or they are another version's. Starting anew
                would hide the damage.
        """
        look = self._newest_valid if self.ranks.is_main else None
        return self.ranks.share(self.ranks.run_with_heartbeat(look))

    def _newest_valid(self) -> Checkpoint | None:
        self._hashes = FileHashes()  # what is about to be trusted is read again
        problems: list[str] = []
        incomplete: list[Checkpoint] = []
        for path in self.newest_first():
            try:
                checkpoint = verify(path, self.run, self._hashes)
                if not checkpoint.lost:
                    for sentence in problems:
                        self.warn(f"{sentence} Going back to {path.name}.")
                    return checkpoint
                incomplete.append(checkpoint)
                problem: object = _first(checkpoint.lost)
            except OtherFormat as other:
                raise UserError(f"{path} {other}") from None
            except InvalidCheckpoint as invalid:
                problem = invalid
            problems.append(f"Checkpoint {path.name} is not usable: {problem}.")
        if incomplete:
            self.warn(_loss(incomplete[0]))
            return incomplete[0]
        if problems:
            raise UserError(
                f"No usable checkpoint in {self.checkpoints}. {problems[0]} Restore it from a copy, "
                f"or start again with another --out."
            )
        return None

    def _retain(self) -> None:
        """Keep the `keep` newest valid checkpoints and their history; with no valid one, everything.

        Those that lack history files go when there are enough others; those of other runs and versions stay.
        """
        valid: list[Checkpoint] = []
        incomplete: list[Checkpoint] = []
        doomed: list[Path] = []
        needed: set[str] = set()
        for path in self.newest_first():
            try:
                checkpoint = verify(path, self.run, self._hashes)
                (incomplete if checkpoint.lost else valid).append(checkpoint)
            except OtherRun as other:
                needed |= other.history
            except OtherFormat:
                continue
            except InvalidCheckpoint:
                doomed.append(path)
        if not valid:
            return
        kept = valid[: self.keep] if len(valid) >= self.keep else [*valid, *incomplete]
        doomed += [checkpoint.path for checkpoint in (*valid, *incomplete) if checkpoint not in kept]
        needed |= {name for checkpoint in kept for name in checkpoint.history}
        with suppress(OSError):  # a file that cannot be deleted is no reason to stop
            for path in doomed:
                temporary = temporary_name(path)
                os.rename(path, temporary)  # a deletion cut short must not look like a checkpoint
                remove(temporary)
            for path in self.history.glob(f"*{_SUFFIX}"):
                if path.name not in needed:
                    path.unlink()

    def newest_first(self) -> list[Path]:
        """The folders that are called as checkpoints are, whole or not."""
        paths = self.checkpoints.iterdir() if self.checkpoints.is_dir() else iter(())
        return sorted((path for path in paths if _STEP.fullmatch(path.name)), key=_order, reverse=True)

    @contextmanager
    def saving(self, what: str) -> Iterator[None]:
        """Turn whatever the file system refuses on any rank into one sentence on all."""
        with self.ranks.raise_on_all():
            try:
                self.checkpoints.mkdir(exist_ok=True)  # but not a run folder that somebody has deleted
                self.history.mkdir(exist_ok=True)
                yield
            except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
                reason = getattr(error, "strerror", None) or error
                raise SaveFailed(
                    f"Could not write {what} to {self.checkpoints.parent}: {reason}. "
                    f"The checkpoints before it are untouched; make room on the disk before the next save."
                ) from error


def read_newest(folder: Path, read: Callable[[Checkpoint | None], T], warn: Callable[[str], None]) -> T:
    """What `read` makes of the newest whole checkpoint (None: there is none) of a run whose lock is not held.

    The run may be going on and delete a checkpoint while it is looked at. So nothing counts as damage as long as the
    list of checkpoints changes: the newer ones are read then.
    """
    for _ in range(_TRIES):
        said: list[str] = []
        store = CheckpointStore(folder, keep=1, warn=said.append)
        listed = store.newest_first()
        try:
            checkpoint = store.load_latest()
            if (checkpoint is not None and not said) or store.newest_first() == listed:
                value = read(checkpoint)
                for sentence in said:
                    warn(sentence)
                return value
        # RuntimeError is torch's, for a file that is gone.
        except (UserError, OSError, SafetensorError, RuntimeError):
            if store.newest_first() == listed:
                raise
    raise UserError(
        f"{folder} saves, and deletes what it saved before, faster than it can be read. Try again."
    )


def _first(lost: dict[str, str]) -> str:
    """The first reason, and how many more there are."""
    more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    return next(iter(lost.values())) + more


def _loss(checkpoint: Checkpoint) -> str:
    """What it means that history files are lost."""
    epochs = sorted({int(match[1]) + 1 for match in map(_EPOCH.fullmatch, checkpoint.lost) if match})
    return (
        f"No checkpoint has all its neighbour lists: {_first(checkpoint.lost)}. Going on from {checkpoint.path.name} "
        f"without the lists of epoch {', '.join(map(str, epochs))}: images whose lists are lost count as not visited "
        f"then, so partners are drawn from the rest of the window. An undisturbed run would end differently."
    )


# manifest.json vouches for itself and, by size and SHA-256, for every file that it names. `verify` is the one door:
# names are plain, files are regular, sizes and hashes agree, headers parse.


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
    if step != _order(path)[0]:
        raise InvalidCheckpoint(f"its manifest speaks of step {step}")
    groups = {f"{group}{_SUFFIX}": entry for group, entry in manifest["groups"].items()}
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


def _order(path: Path) -> tuple[int, int]:
    """(step, revision) of a checkpoint's folder."""
    match = _STEP.fullmatch(path.name)
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


# Tensors


def _read(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """One safetensors file, from the tensors' own memory. safetensors refuses strided and shared tensors."""
    seen: set[int] = set()
    dense: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        if tensor.numel() and tensor.data_ptr() in seen:  # tied weights
            tensor = tensor.clone()
        seen.add(tensor.data_ptr())
        dense[name] = tensor
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dense, path)
    path.chmod(mode)  # safetensors makes files that their owner alone can read, whatever the umask
    sync(path)


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """An optimiser's moments and step counts, as `state.NUMBER OF THE PARAMETER.NAME`. Rates and decay are no state:
    schedules set them before every step."""
    state = optimizer.state_dict()["state"]
    return {
        f"state.{index}.{name}": value.detach()
        for index, values in state.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def load_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put `optimizer_tensors` into an optimiser over the same parameters: same values, types, memory layout."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        _, index, name = key.split(".", 2)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in state.items():
        parameter = parameters[number]
        for name, saved in values.items():
            # load_state_dict casts moments to the parameter's type and adopts the file's pages, and files do
            # not keep channels-last, without which the fused kernels lose their fast path.
            device = optimizer.state[parameter][name].device
            like = parameter if saved.shape == parameter.shape else saved
            copy = torch.empty_like(like, dtype=saved.dtype, device=device).copy_(saved)
            optimizer.state[parameter][name] = copy
