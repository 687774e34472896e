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
    lock                held while a process trains here, see `adasim.runs.lock`
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from adasim.config import Config
from adasim.data.sources.listing import Listing
from adasim.data.sources.record import read_listing
from adasim.registry import is_path
from adasim.runs.checks import FOLDERS, UNFINISHED, check_out, require_run
from adasim.runs.launch import launch
from adasim.runs.lock import LOCK, FolderLock
from adasim.runs.overwrite import LISTING, delete_run
from adasim.runs.settings import PACKAGES, versions
from adasim.util.errors import UserError
from adasim.util.files import atomic_write, remove, remove_leftovers

_READ = ("config.json", "run.json", "data.json", "versions.json", "metrics.jsonl", "unreadable.csv", LISTING)


class RunFolder:
    """A run's folder, locked against a second process until `close` or the process's end, even by a kill.

    To begin: `RunFolder.create(out, config, {**record(images), "device": "cpu"}, listing=listing_file(images))`.
    To continue: `RunFolder.open(out)`, then `check_same(run.description(), {"config": ...})` and
    `check_same_data(run.facts, images, listing=run.listing())`. Before each save: `check_ours()`.
    """

    def __init__(
        self,
        path: Path,
        config: Config,
        facts: dict[str, Any],
        lock: FolderLock | None,
        identity: dict[str, Any],
        notes: Iterable[str] = (),
    ) -> None:
        self.path = path
        self.config = config
        self.facts = facts
        self.notes = list(notes)
        """Sentences for the person who started the run."""
        self.resumed = False
        """Whether the run was there before."""
        self._identity = identity
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
        notes: list[str] = []
        try:
            check_out(out, overwrite)
            made = not out.exists()
            out.mkdir(parents=True, exist_ok=True)
            try:
                lock = FolderLock.take(out, surely=overwrite)
            except BaseException:
                if made:
                    with suppress(OSError):  # not empty: somebody was quicker, and it is theirs
                        out.rmdir()
                raise
            try:
                check_out(out, overwrite)  # again: somebody may have been quicker
                if overwrite:
                    notes += delete_run(out)
            except BaseException:
                lock.release()
                raise
            try:
                remove_leftovers(out)
                for name in FOLDERS:
                    (out / name).mkdir(exist_ok=True)
                device = facts.get("device", config.device)
                identity = {"id": secrets.token_hex(8), "saved": False, "launch": launch()}
                _write_json(out / "versions.json", {**versions(device), "started_in": os.getcwd()})
                if listing is not None:
                    atomic_write(out / LISTING, listing)
                _write_json(out / "data.json", {k: v for k, v in facts.items() if k != "device"})
                _write_json(out / "run.json", identity)
                _write_json(out / "config.json", config.to_dict())
            except BaseException:
                for name in ("config.json", *UNFINISHED):
                    remove(out / name)
                if made:
                    with suppress(OSError):
                        out.rmdir()
                lock.release()
                raise
        except OSError as error:
            raise _unwritable(out, error) from error
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
        saved = _read_json(out / "config.json")
        try:
            config = Config.from_dict(saved)
        except UserError as error:
            if "architecture" in saved or "model_type" in saved:
                raise UserError(
                    f"{out} is an encoder for timm or transformers and not the folder of a run. Name the run that it "
                    f"was exported from; adasim explore and gallery take an encoder as --backbone."
                ) from None
            raise UserError(f"{out / 'config.json'}: {error} Restore the file from a copy.") from None
        facts = _read_json(out / "data.json")
        if not lock:
            return cls(out, config, facts, None, {})
        identity = _read_json(out / "run.json") if (out / "run.json").exists() else {}
        try:
            handle = FolderLock.take(out)
            try:
                for folder in (out, out / "checkpoints", out / "history"):
                    remove_leftovers(folder)
            except BaseException:
                handle.release()
                raise
        except OSError as error:
            raise _unwritable(out, error) from error
        run = cls(out, config, facts, handle, identity, _older_version(saved))
        run.resumed = True
        return run

    @classmethod
    def join(cls, out: Path, owner: str) -> RunFolder:
        """Take part, from another process, in the run that `owner` (its `owner()`) holds the lock of."""
        try:
            found = (Path(out) / LOCK).read_text()
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
            source = os.path.abspath(
                source
            )  # the run may have been started in another folder than this process
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

    def description(self) -> dict[str, Any]:
        """What `check_same` compares."""
        return {"config": self.config.to_dict(), **self.facts}

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
            for name in ("python", *PACKAGES, "threads")
            if name in before and before[name] != now.get(name)
        ]

    def check_source(self) -> None:
        """Say where the run's images were, if they are not found there."""
        check_source(self.path, self.config.data.source)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _older_version(saved: dict[str, Any]) -> list[str]:
    """A sentence for the person who goes on with a run of version 0.2 or before, whose settings tell."""
    if "engine" not in saved.get("views", {}):
        return []
    return [
        "This run began with a version that rounded colours after each step of a view. From here on its views differ "
        "from that version's by about one level in 255; JPEGs are still decoded at their full size."
    ]


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


def _unwritable(out: Path, error: OSError) -> UserError:
    return UserError(f"Cannot write to {out}: {error.strerror}. Choose another --out.")


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


def _write_json(path: Path, value: Any) -> None:
    atomic_write(path, json.dumps(value, indent=1).encode() + b"\n")


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
