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
    lock                held while a process trains here, see `adasim.runs.access`
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from adasim.config import Config
from adasim.data.folder import Listing
from adasim.data.identity import read_listing
from adasim.registry import is_path
from adasim.runs.access import (
    FOLDERS,
    LISTING,
    LOCK,
    UNFINISHED,
    FolderLock,
    check_out,
    delete_run,
    launch,
    require_run,
)
from adasim.util.errors import UserError
from adasim.util.files import atomic_write, remove, remove_leftovers

_READ = ("config.json", "run.json", "data.json", "versions.json", "metrics.jsonl", "unreadable.csv", LISTING)
_PACKAGES = ("torch", "torchvision", "timm", "numpy", "safetensors", "adasim")
_MAY_CHANGE = ("recipe", "device", "deterministic", "compile", "data.", "save.", "eval.")


class RunFolder:
    """A run's folder, locked against a second process until `close` or the process's end, even by a kill.

    To begin: `RunFolder.create(out, config, {**record(images), "device": "cpu"}, listing=listing_file(images))`.
    To continue: `RunFolder.open(out)`, then `check_same(run.config, config)` and
    `check_same_data(run.facts, images, listing=run.listing())`. Before each save: `check_ours()`.
    """

    def __init__(
        self,
        path: Path,
        config: Config,
        facts: dict[str, Any],
        lock: FolderLock | None = None,
        identity: dict[str, Any] | None = None,
        notes: Iterable[str] = (),
        resumed: bool = False,
    ) -> None:
        self.path = path
        self.config = config
        self.facts = facts
        self.notes = list(notes)
        """Sentences for the person who started the run."""
        self.resumed = resumed
        """Whether the run was there before."""
        self._identity = identity or {}
        self._lock = lock
        if lock is not None and not lock.by_kernel:
            self.notes.append(
                f"The disk of {path} has no file locks: a second process on this run, from another machine, is "
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
        out = Path(out)
        with _writing_to(out), ExitStack() as undo:  # each step says how it is undone
            check_out(out, overwrite)
            if not out.exists():
                out.mkdir(parents=True, exist_ok=True)
                undo.callback(_remove_if_empty, out)
            lock = FolderLock.take(out, strict=overwrite)
            undo.callback(lock.release)
            check_out(out, overwrite)  # again: somebody may have been quicker
            notes = delete_run(out) if overwrite else []
            for name in ("config.json", *UNFINISHED):
                undo.callback(remove, out / name)
            remove_leftovers(out)
            for name in FOLDERS:
                (out / name).mkdir(exist_ok=True)
            device = facts.get("device", config.device)
            identity = {"id": secrets.token_hex(8), "saved": False, "launch": launch()}
            _write_json(out / "versions.json", {**versions(device), "started_in": os.getcwd()})
            if listing is not None:
                atomic_write(out / LISTING, listing)
            recorded = {k: v for k, v in facts.items() if k != "device"}
            _write_json(out / "data.json", {**recorded, "checksum": _checksum(recorded)})
            _write_json(out / "run.json", identity)
            _write_json(out / "config.json", config.to_dict())
            undo.pop_all()  # it is made
        return cls(out, config, facts, lock, identity, notes)

    @classmethod
    def open(cls, out: Path, lock: bool = True) -> RunFolder:
        """Open an existing run: locked and cleaned of temporary files to train on, or as it is to look at."""
        out = Path(out)
        require_run(out)
        for name in _READ:
            if (out / name).exists() and not (out / name).is_file():  # a pipe would be waited for without end
                raise UserError(
                    f"{out / name} is not a regular file. Restore it, or start again with another --out."
                )
        config, facts = _read_config(out), _read_json(out / "data.json")
        if facts.pop("checksum", None) not in (None, _checksum(facts)):
            raise UserError(
                f"{out / 'data.json'} is damaged; the images may be as they were. Restore it from a copy, "
                f"or start a new run with another --out."
            )
        if not lock:
            return cls(out, config, facts)
        identity = _read_json(out / "run.json") if (out / "run.json").exists() else {}
        with _writing_to(out), ExitStack() as undo:
            handle = FolderLock.take(out)
            undo.callback(handle.release)
            for folder in (out, *(out / name for name in ("checkpoints", "history", "encoders"))):
                remove_leftovers(folder)
            undo.pop_all()
        return cls(out, config, facts, handle, identity, resumed=True)

    @classmethod
    def join(cls, out: Path, owner: str) -> RunFolder:
        """Take part, from another process, in the run that `owner` (its `owner()`) holds the lock of."""
        if _content(Path(out) / LOCK) != owner:
            raise UserError(
                f"{out} is not the same folder on {socket.gethostname()} as for the first process of the run. "
                f"Name an --out on a disk that all machines of the run share."
            )
        return cls.open(out, lock=False)

    def owner(self) -> str:
        """Who holds the run's lock, as written in it."""
        return (self.path / LOCK).read_text()

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
            # The run may have been started in another folder than this process.
            source = os.path.abspath(source)
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
            mark, described = _content(self.path / LOCK), _content(self.path / "run.json")
            if mark == self._lock.mark:
                if described is None:
                    self.identify()
                return
            mine = described is not None and _id_in(described) == self.id
            if mine and mark is None:
                self._lock.release()
                self._lock = FolderLock.take(self.path)
                return
        except OSError:  # a disk that fails at the moment: the save will say so
            return
        if mine:
            who = mark.partition("\n")[0] if mark else "another process"
            raise UserError(
                f"{who} has opened the run in {self.path} since this process began, and goes on with it. "
                f"This process stops here and leaves the folder alone."
            )
        elsewhere = "is no longer this run's" if self.path.exists() else "is gone"
        happened = elsewhere if described is None else "holds another run now"
        raise UserError(
            f"{self.path} {happened}: this run's folder was deleted or moved while it was training. What was not "
            f"saved is lost. If you moved it, go on with: adasim pretrain --resume NEW-PLACE"
        )

    def listing(self) -> Listing | None:
        """What was in the folder of images that the run began with; None of other data, and if it is lost."""
        return read_listing(self.path / LISTING, self.facts)

    def version_changes(self) -> list[str]:
        """A sentence for each package that is not the one the run began with: rounding may then differ."""
        before = _read_json(self.path / "versions.json", vital=False)
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


def check_source(run: Path, source: str) -> None:
    """Say where the images of a run were, if they are not found there (or, named relative to the folder that it was
    started in, not from here)."""
    if not is_path(source) or os.path.exists(source):
        return
    elsewhere = "say where they are now with --data NEW-PLACE"
    folder = _read_json(run / "versions.json", vital=False).get("started_in")
    if os.path.isabs(source) or folder == os.getcwd():
        raise UserError(
            f"The images of {run} were at {source}, and there is nothing now. Put them back, or {elsewhere}."
        )
    where = f" from {folder}" if folder else " from another folder"
    raise UserError(
        f"{run} was started{where} with --data {source}, and here, in {os.getcwd()}, there is no {source}. "
        f"Go to that folder, or {elsewhere}."
    )


def versions(device: str) -> dict[str, Any]:
    """What the numbers of a run depend on beside its configuration."""
    packages: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from a checkout that was never installed
            packages[name] = None
    packages["torch"] = str(torch.__version__)  # with the build (+cu132), which the package's metadata lack
    system = {"python": platform.python_version(), "platform": platform.platform()}
    return {**system, **packages, "device": str(device), "threads": torch.get_num_threads()}


def check_same(before: Config, now: Config) -> None:
    """Refuse to continue a run with other settings, naming the first differences.

    Where the images lie, how they are read, the device, saving and evaluation may change, so may `micro_batch`, and
    the run may become longer; whatever else shapes the result may not. The images are compared by
    `adasim.data.check_same_data`.
    """
    changed = changed_settings(decisive(before.to_dict()), decisive(now.to_dict()))
    if changed:
        raise UserError(
            f"Cannot resume with other settings: {changed}. "
            f"Resume without these options, or start a new run with another --out."
        )


def decisive(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that shape the result, by their names on the command line."""
    flat = flatten(json.loads(json.dumps(config)))
    return {name: value for name, value in flat.items() if not name.startswith(_MAY_CHANGE)}


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


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`: the names of the command line."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return flat


@contextmanager
def _writing_to(out: Path) -> Iterator[None]:
    """Say in a sentence what the disk refuses."""
    try:
        yield
    except OSError as error:
        raise UserError(f"Cannot write to {out}: {error.strerror}. Choose another --out.") from error


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # not empty: somebody was quicker, and it is theirs
        folder.rmdir()


def _content(path: Path) -> str | None:
    """A small file's text; None if there is no such file."""
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def _id_in(described: str) -> Any:
    """The id in the text of a run.json; None if it is damaged."""
    try:
        return json.loads(described)["id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _checksum(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _write_json(path: Path, value: Any) -> None:
    atomic_write(path, json.dumps(value, indent=1).encode() + b"\n")


def _read_config(out: Path) -> Config:
    saved = _read_json(out / "config.json")
    try:
        return Config.from_dict(saved)
    except UserError as error:
        if "architecture" in saved or "model_type" in saved:
            raise UserError(
                f"{out} is an encoder for timm or transformers and not the folder of a run. Name the run that it "
                f"was exported from; adasim explore and gallery take an encoder as --backbone."
            ) from None
        raise UserError(f"{out / 'config.json'}: {error} Restore the file from a copy.") from None


def _read_json(path: Path, *, vital: bool = True) -> dict[str, Any]:
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
