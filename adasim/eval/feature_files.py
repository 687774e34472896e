"""Features on disk: whole passes over the images, and parts of one under way. What is damaged counts as absent."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from adasim.models.io import as_bytes
from adasim.util.files import atomic_write

KEEP_S = 30.0
"""Seconds of work that a killed pass may lose."""


def default_folder() -> Path:
    """Where features go that belong to no run: `adasim/features` in the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "adasim" / "features"


class Parts:
    """What a pass over the images has made so far, in a folder; an interrupted pass goes on from there.

    Args:
        folder: one for each pass; it is there as long as the pass is not complete.
        made: in words, how features are made. Their last bits depend on the device and on which images share a
            batch, so parts that were made in another way are not used: a pass in parts gives the bits of one in a
            piece.
    """

    def __init__(self, folder: Path, made: str) -> None:
        self.folder, self.made = folder, made
        self._kept = 0
        self._kept_at = time.monotonic()

    def load(self) -> tuple[Tensor, dict[int, str]]:
        """Features (n, D) of the first n images, and {id: where and why} of the unreadable ones among them."""
        found: list[Tensor] = []
        unreadable: dict[int, str] = {}
        while True:
            path = next(iter(sorted(self.folder.glob(f"{self._kept:012}-*.safetensors"))), None)
            part = None if path is None else read_features(path, self.made)
            if part is None or not len(part[0]) or (found and part[0].shape[1] != found[0].shape[1]):
                break
            found.append(part[0])
            unreadable |= part[1]
            self._kept += len(part[0])
        self._kept_at = time.monotonic()
        return (torch.cat(found) if found else torch.empty(0, 0)), unreadable

    def offer(self, features: Tensor, done: int, unreadable: dict[int, str]) -> None:
        """Keep the first `done` rows if the last time is long ago."""
        if time.monotonic() - self._kept_at >= KEEP_S:
            self.keep(features, done, unreadable)

    def keep(self, features: Tensor, done: int, unreadable: dict[int, str]) -> None:
        """Keep what is not kept yet of the first `done` rows of `features`."""
        first, self._kept_at = self._kept, time.monotonic()
        if done <= first or not features.numel():
            return
        some = {i: why for i, why in unreadable.items() if first <= i < done}
        path = self.folder / f"{first:012}-{done:012}.safetensors"
        if write_features(path, features[first:done], some, self.made):
            self._kept = done


def write_features(path: Path, values: Tensor, unreadable: dict[int, str], made: str = "") -> bool:
    """Write them, whole or not at all; a full or read-only disk costs the next evaluation a pass, nothing else."""
    header = {
        "sha256": hashlib.sha256(as_bytes(values)).hexdigest(),
        "unreadable": json.dumps(unreadable),
        "made": made,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, safetensors.torch.save({"features": values.contiguous()}, header))
    except OSError:
        return False
    return True


def read_features(path: Path, made: str | None = None) -> tuple[Tensor, dict[int, str]] | None:
    """What `write_features` wrote (if `made` says, only what was made so), or None if it is absent or not whole."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata()
            values = file.get_tensor("features")
        unreadable = {int(i): str(reason) for i, reason in json.loads(header["unreadable"]).items()}
        if hashlib.sha256(as_bytes(values)).hexdigest() != header["sha256"]:
            return None
        if made is not None and header["made"] != made:
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError):
        return None
    return values, unreadable
