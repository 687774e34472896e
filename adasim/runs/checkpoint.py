"""Checkpoints of one run: tensors in safetensors files, everything else in a hashed JSON manifest, no pickle.

    RUN/checkpoints/step-000000123/method.safetensors      one file per group of tensors
                                   memory-00003.safetensors   some groups are one rank's share, written by it
                                   manifest.json           last: size and SHA-256 of every file, and `info`
    RUN/history/epoch-000007-1f0c9a52d3e4b687.safetensors  immutable, one per epoch and rank, shared by checkpoints

A checkpoint is written into a temporary folder. When all its files are on the disk (`fsync`), one rename gives the
folder its name: a kill at any moment leaves the checkpoints before it whole. A second save at the same step (before
and after an epoch's end) gets the name `step-000000123.1`: a valid checkpoint is never replaced, only superseded.
Loading takes the newest that `adasim.runs.manifest` finds whole; where none is, because they share a history file
that is damaged or gone, it takes the newest without that file.

This module knows tensors and JSON, nothing of models. Only the process that holds the run's lock may write, and
the other ranks of its run, which call every method together with it and fail together with it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from adasim.dist.processes import ALONE, Distributed
from adasim.runs.manifest import (
    EPOCH,
    STEP,
    SUFFIX,
    Checkpoint,
    FileHashes,
    InvalidCheckpoint,
    OtherFormat,
    OtherRun,
    order,
    seal,
    verify,
)
from adasim.util.errors import UserError
from adasim.util.files import atomic_write, remove, remove_leftovers, sha256_file, sync, temporary_name

T = TypeVar("T")
_TRIES = 20  # to read from a run that goes on; it would have to save that often meanwhile


class SaveFailed(UserError):  # noqa: N818 - it says what happened
    """A save did not succeed (disk full, quota, folder gone); the checkpoints before it are untouched."""


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
        self.checkpoints = Path(folder) / "checkpoints"
        self.history = Path(folder) / "history"
        self.keep = keep
        self.warn = warn
        self.ranks = ranks
        self.run = run
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
        what = f"the checkpoint of step {step}"
        with self._unfinished(step, what) as (folder, final):
            entries = {}
            with self.saving(what):  # every rank writes its own files ...
                for group, values in tensors.items():
                    _write(folder / f"{group}{SUFFIX}", values)
                    entries[group] = self._hashes.entry(folder / f"{group}{SUFFIX}")
            shares = self.ranks.gather(entries)
            with self.saving(what):  # ... and the first one the manifest, when all are there
                if self.ranks.is_main:
                    groups = {group: entry for share in shares for group, entry in share.items()}
                    for group, entry in groups.items():  # the rank that wrote it has just hashed it
                        self._hashes.know(folder / f"{group}{SUFFIX}", entry["sha256"])
                    lists = [{"name": name, **self._hashes.entry(self.history / name)} for name in history]
                    manifest = {
                        "step": step, "run": self.run, "info": info, "groups": groups, "history": lists
                    }  # fmt: skip
                    atomic_write(folder / "manifest.json", seal(manifest))
                    os.rename(folder, final)
                    sync(self.checkpoints)
        if self.ranks.is_main:
            self._retain()
        return final

    def load_latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, saying which newer ones are not; None if there never was one.

        Without a whole one, the newest that lacks nothing but history files (its `lost`): an absent list is that
        of an image that was not visited. Rank 0 looks through them, however long that takes, and tells the others.

        Raises:
            UserError: there are checkpoints and none is usable, or they are another version's. Starting anew
                would hide the damage.
        """
        newest = self.ranks.run_with_heartbeat(self._newest_valid if self.ranks.is_main else None)
        return self.ranks.gather(newest)[0]

    def _newest_valid(self) -> Checkpoint | None:
        self._hashes = FileHashes()  # what is about to be trusted is read again
        problems: list[str] = []
        incomplete: list[Checkpoint] = []
        for path in self.newest_first():
            try:
                checkpoint = verify(path, self.run, self._hashes)
            except OtherFormat as other:
                raise UserError(f"{path} {other}") from None
            except InvalidCheckpoint as problem:
                problems.append(f"Checkpoint {path.name} is not usable: {problem}.")
                continue
            if checkpoint.lost:
                problems.append(f"Checkpoint {path.name} is not usable: {_first(checkpoint.lost)}.")
                incomplete.append(checkpoint)
                continue
            for sentence in problems:
                self.warn(f"{sentence} Going back to {path.name}.")
            return checkpoint
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
            for path in self.history.glob(f"*{SUFFIX}"):
                if path.name not in needed:
                    path.unlink()

    def write_history(self, epoch: int, tensors: dict[str, Tensor]) -> str:
        """Write this rank's share of an epoch once and for all; returns its file's name.

        The name holds the content's hash. Writing the same epoch again (after a kill between this and the
        next checkpoint) gives the same name and no second file; `save` prunes files that no checkpoint names.
        """
        what = f"the history of epoch {epoch}"
        with self.saving(what):
            if self.ranks.is_main:
                remove_leftovers(self.history)
        with self.saving(what):
            folder = temporary_name(self.history / f"epoch-{epoch:06d}")
            folder.mkdir()
            try:
                _write(folder / "new", tensors)
                digest = sha256_file(folder / "new")
                final = self.history / f"epoch-{epoch:06d}-{digest[:16]}{SUFFIX}"
                if not final.is_file() or sha256_file(final) != digest:
                    os.replace(folder / "new", final)
            finally:
                remove(folder)
            sync(self.history)
        return final.name

    def damaged(self, names: Iterable[str]) -> set[str]:
        """Those of the history files that are no longer what `write_history` wrote; the same answer on all ranks."""
        damaged = {name for name in names if not self._is_intact(name)} if self.ranks.is_main else set()
        return self.ranks.gather(damaged)[0]

    def _is_intact(self, name: str) -> bool:
        match = EPOCH.fullmatch(name)
        try:
            return match is not None and self._hashes.of(self.history / name).startswith(match[2])
        except OSError:
            return False

    def newest_first(self) -> list[Path]:
        """The folders that are called as checkpoints are, whole or not."""
        paths = self.checkpoints.iterdir() if self.checkpoints.is_dir() else iter(())
        return sorted((path for path in paths if STEP.fullmatch(path.name)), key=order, reverse=True)

    @contextmanager
    def _unfinished(self, step: int, what: str) -> Iterator[tuple[Path, Path]]:
        """The folder that all ranks write into, and the name it is to take; gone afterwards unless it has."""
        names: Any = None
        with self.saving(what):
            if self.ranks.is_main:
                remove_leftovers(self.checkpoints)
                revisions = [revision for s, revision in map(order, self.newest_first()) if s == step]
                final = self.checkpoints / f"step-{step:09d}{f'.{max(revisions) + 1}' if revisions else ''}"
                names = temporary_name(final), final
                names[0].mkdir()
        folder, final = self.ranks.gather(names)[0]
        try:
            yield folder, final
        finally:
            if self.ranks.is_main:
                remove(folder)

    @contextmanager
    def saving(self, what: str) -> Iterator[None]:
        """Turn whatever the file system refuses on any rank into one sentence on all."""
        with self.ranks.raise_on_all(SaveFailed):
            try:
                self.checkpoints.mkdir(exist_ok=True)  # but not a run folder that somebody has deleted
                self.history.mkdir(exist_ok=True)
                yield
            except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
                reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
                raise SaveFailed(
                    f"Could not write {what} to {self.checkpoints.parent}: {reason}. "
                    f"The checkpoints before it are untouched; make room on the disk before the next save."
                ) from error


def read_newest(
    folder: Path, read: Callable[[Checkpoint | None], T], warn: Callable[[str], None] = print
) -> T:
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
    epochs = sorted({int(match[1]) + 1 for match in map(EPOCH.fullmatch, checkpoint.lost) if match})
    named = ", ".join(map(str, epochs))
    return (
        f"No checkpoint has all its neighbour lists: {_first(checkpoint.lost)}. Going on from {checkpoint.path.name} "
        f"without the lists of epoch {named}: images whose lists are lost count as not visited then, so partners "
        f"are drawn from the rest of the window. The result will differ from that of an undisturbed run."
    )


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


# Nested Python state as tensors plus JSON, and back exactly: what pickle would do, without running anything.


def pack(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Split dicts (keys: str or int), lists, tuples, tensors and scalars into named tensors and JSON.

    JSON has no tuples, no integer keys and no tensors; those become `{"tuple": [...]}`,
    `{"dict": [[key, value], ...]}` and `{"tensor": name}`. Floats come back bit by bit
    (Python writes the shortest text that does so).
    """
    tensors: dict[str, Tensor] = {}

    def walk(node: Any, where: str) -> Any:
        if isinstance(node, Tensor):
            tensors[where] = node.detach()
            return {"tensor": where}
        if isinstance(node, dict):
            if not all(type(k) in (str, int) for k in node):
                raise TypeError(f"{where or 'the top'} has a key that is neither text nor an integer")
            return {"dict": [[k, walk(v, f"{where}.{k}".lstrip("."))] for k, v in node.items()]}
        if isinstance(node, list | tuple):
            values = [walk(v, f"{where}.{i}".lstrip(".")) for i, v in enumerate(node)]
            return {"tuple": values} if isinstance(node, tuple) else values
        if node is None or isinstance(node, bool | int | float | str):
            return node
        raise TypeError(f"{where} is a {type(node).__name__}, which cannot be saved without pickle")

    return tensors, walk(tree, "")


def unpack(tensors: dict[str, Tensor], info: Any) -> Any:
    """The inverse of `pack`, also after a trip through JSON."""
    if isinstance(info, dict):
        ((kind, value),) = info.items()
        if kind == "tensor":
            return tensors[value]
        if kind == "tuple":
            return tuple(unpack(tensors, v) for v in value)
        return {k: unpack(tensors, v) for k, v in value}
    return [unpack(tensors, v) for v in info] if isinstance(info, list) else info


def pack_optimizer(optimizer: Optimizer) -> tuple[dict[str, Tensor], Any]:
    """An optimiser's `state_dict` as tensors (moments, step counts) and JSON (each group's settings)."""
    return pack(optimizer.state_dict())


def unpack_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor], info: Any) -> None:
    """Put a packed state into an optimiser over the same parameters: same values, types, memory layout."""
    state = unpack(tensors, info)
    optimizer.load_state_dict(state)
    for group in optimizer.param_groups:  # which kernels work here is this process's choice, not the file's
        group |= {name: optimizer.defaults[name] for name in ("foreach", "fused")}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        for name, saved in state["state"].get(index, {}).items():
            if not isinstance(saved, Tensor):
                continue
            # load_state_dict casts moments to the parameter's type and adopts the file's pages, and files do
            # not keep channels-last, without which the fused kernels lose their fast path.
            device = optimizer.state[parameter][name].device
            like = parameter if saved.shape == parameter.shape else saved
            optimizer.state[parameter][name] = torch.empty_like(like, dtype=saved.dtype, device=device).copy_(
                saved
            )
