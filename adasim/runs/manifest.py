"""The manifest of a checkpoint: JSON that vouches for itself, and for every file that it names.

Reading trusts nothing: a manifest is a regular file of a sensible size whose SHA-256 agrees, in the format that this
version writes. What it names is checked in the same spirit by `adasim.runs.checkpoint`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adasim import __version__

FORMAT = 3
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # no separators, no leading dot: cannot leave its folder
_MAX_SIZE = 64 << 20  # a manifest holds counters, a configuration and hashes; a larger one is not ours


class InvalidCheckpoint(Exception):  # noqa: N818
    """A checkpoint is not whole; the message says what is wrong with it."""


class OtherFormat(InvalidCheckpoint):
    """A manifest that is whole and was written by another version of adasim."""


def seal(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON, with format, version and the SHA-256 of its own canonical form."""
    manifest = json.loads(json.dumps({"format": FORMAT, "adasim": __version__, **manifest}))
    return json.dumps({**manifest, "sha256": _canonical_hash(manifest)}, indent=1).encode()


def unseal(path: Path) -> dict[str, Any]:
    """What `seal` was given.

    Raises:
        OtherFormat: it is whole, and of another version.
        InvalidCheckpoint: it is not whole.
    """
    if not os.path.lexists(path):
        raise InvalidCheckpoint("manifest.json is missing")
    if require_kind(path, stat.S_ISREG, "regular file").st_size > _MAX_SIZE:
        raise InvalidCheckpoint(f"manifest.json is larger than {_MAX_SIZE} bytes")
    try:
        manifest = json.loads(path.read_bytes())
        digest = manifest.pop("sha256")
        intact = digest == _canonical_hash(manifest)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise InvalidCheckpoint("manifest.json is not a manifest of ours") from error
    if not intact:
        raise InvalidCheckpoint("manifest.json has changed (its SHA-256 differs)")
    if manifest.get("format") != FORMAT:
        raise OtherFormat(_other_format(manifest))
    return manifest


def require_kind(path: Path, is_kind: Callable[[int], bool], kind: str) -> os.stat_result:
    """Links, pipes and devices are refused before they are opened."""
    status = os.lstat(path)
    if not is_kind(status.st_mode):
        raise InvalidCheckpoint(f"{path.name} is not a {kind}")
    return status


def _other_format(manifest: dict[str, Any]) -> str:
    found = manifest.get("format")
    older = isinstance(found, int) and found < 3  # versions that did not yet sign their checkpoints
    maker = (
        "adasim 0.1, which kept similarities as fp16" if older else f"adasim {manifest.get('adasim', '?')}"
    )
    return (
        f"was written by {maker} (checkpoint format {found}), and this is adasim {__version__} (format {FORMAT}). "
        f"Finish the run with that version, or start a new one with another --out; the encoder in "
        f"backbone.safetensors can be used as it is."
    )


def _canonical_hash(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
