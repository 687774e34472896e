"""--overwrite: delete a run to make room for a new one, and never anything else.

A folder is deleted from only if a run of ours is in it and nothing else is, link or file, on any level. The caller
holds the run's lock, so no process uses it. What says that this is a run goes last: a deletion cut short leaves a
run that can be overwritten again.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

from adasim.runs.lock import LOCK
from adasim.util.errors import UserError
from adasim.util.files import TEMPORARY, remove

LISTING = "listing.npz"
_PRODUCTS = (
    "metrics.jsonl",
    "backbone.safetensors",
    "results.jsonl",
    "neighbours.png",
    "curves.png",
    "curves.svg",
    "unreadable.csv",
    "explore.html",
    *(
        f"gallery-{pick}.{kind}"
        for pick in ("random", "intriguing", "other-class", "picked")
        for kind in ("png", "pdf", "csv", "tex")
    ),
)
# run.json after config.json: it tells a restart that this run is not its own.
_DESCRIPTION = (LISTING, "data.json", "config.json", "run.json", "versions.json")
_FILES = {*_PRODUCTS, *_DESCRIPTION, LOCK}
_FOLDERS = {
    "checkpoints": r"step-[0-9]{9,}(\.[0-9]+)?(/(manifest\.json|[A-Za-z0-9_-]+\.safetensors))?",
    "history": r"epoch-[0-9]{6,}-[0-9a-f]+\.safetensors",
    "tensorboard": r"events\.out\.tfevents\..+",
    "features": r"[0-9a-f]+(\.safetensors|\.parts(/[0-9]+-[0-9]+\.safetensors)?)",
    "explore-sheets": r"sheet-[0-9]{5}\.webp",
}
"""Folders of a run, and what their contents are called."""


def check_replaceable(out: Path) -> None:
    """Refuse to overwrite what is not a run, or a run that somebody keeps other things in."""
    try:
        versions = json.loads((out / "versions.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        versions = None
    if not isinstance(versions, dict) or not {"adasim", "torch"} <= versions.keys():
        raise UserError(
            f"{out} is not the folder of a run of adasim: its versions.json is not ours. --overwrite "
            f"deletes runs alone. Choose another --out."
        )
    strange = sorted(_strange(out))
    if strange:
        few = ", ".join(strange[:3]) + (", ..." if len(strange) > 3 else "")
        raise UserError(
            f"--overwrite deletes runs alone, and {out} also holds {few}. Move that elsewhere, or choose "
            f"another --out."
        )


def delete_run(out: Path) -> list[str]:
    """Delete the run in `out`, if there is one, but not the lock; returns a sentence about what is gone."""
    if not (out / "config.json").exists():
        return []
    check_replaceable(out)
    saved = (out / "checkpoints").glob("step-*")
    checkpoints = sum(not path.name.endswith(TEMPORARY) for path in saved)
    encoder = "an" if (out / "backbone.safetensors").exists() else "no"
    for name in (*_FOLDERS, *_PRODUCTS, *_DESCRIPTION):
        remove(out / name)
    return [f"Overwrote the run in {out} ({checkpoints} checkpoint(s), {encoder} encoder)."]


def _strange(out: Path) -> list[str]:
    """What lies in the folder and cannot be part of a run."""
    found: list[str] = []
    for entry in os.scandir(out):
        if entry.name.endswith(TEMPORARY):
            continue
        if entry.name in _FOLDERS and entry.is_dir(follow_symlinks=False):
            inside = _strange_within(out / entry.name, _FOLDERS[entry.name])
            found += [f"{entry.name}/{name}" for name in inside]
        elif entry.name not in _FILES or not entry.is_file(follow_symlinks=False):
            found.append(entry.name)
    return found


def _strange_within(folder: Path, pattern: str) -> list[str]:
    found: list[str] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        mode = path.lstat().st_mode
        if any(part.endswith(TEMPORARY) for part in Path(name).parts):
            continue
        if not re.fullmatch(pattern, name) or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            found.append(name)
    return found
