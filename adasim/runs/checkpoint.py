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

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from torch import Tensor

from adasim.dist.processes import ALONE, Distributed
from adasim.runs.manifest import (
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
from adasim.runs.tensors import write_tensors
from adasim.util.errors import UserError
from adasim.util.files import atomic_write, remove, sha256_file, sync, temporary_name

T = TypeVar("T")
_EPOCH = re.compile(r"epoch-([0-9]{6,})-([0-9a-f]{16})\.safetensors")
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
                revisions = [revision for s, revision in map(order, self.newest_first()) if s == step]
                final = self.checkpoints / f"step-{step:09d}{f'.{max(revisions) + 1}' if revisions else ''}"
                folder = temporary_name(final)
                folder.mkdir()
        folder, final = self.ranks.share((folder, final))
        try:
            entries = {}
            with self.saving(what):  # every rank writes its own files ...
                for group, values in tensors.items():
                    write_tensors(folder / f"{group}{SUFFIX}", values)
                    entries[group] = self._hashes.entry(folder / f"{group}{SUFFIX}")
            shares = self.ranks.gather(entries)
            with self.saving(what):  # ... and the first one the manifest, when all are there
                if self.ranks.is_main:
                    groups = {group: entry for share in shares for group, entry in share.items()}
                    for group, entry in groups.items():  # the rank that wrote it has just hashed it
                        self._hashes.know(folder / f"{group}{SUFFIX}", entry["sha256"])
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
                write_tensors(folder / "new", tensors)
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
            for path in self.history.glob(f"*{SUFFIX}"):
                if path.name not in needed:
                    path.unlink()

    def newest_first(self) -> list[Path]:
        """The folders that are called as checkpoints are, whole or not."""
        paths = self.checkpoints.iterdir() if self.checkpoints.is_dir() else iter(())
        return sorted((path for path in paths if STEP.fullmatch(path.name)), key=order, reverse=True)

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
