"""Restarts by Slurm or torchrun: a process that is started again goes on with the run that its own launch began."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path

_LAUNCHERS = {"SLURM_RESTART_COUNT": "SLURM_JOB_ID", "TORCHELASTIC_RESTART_COUNT": "TORCHELASTIC_RUN_ID"}
"""Where a launcher counts its restarts, and where it names what it starts again: the same name each time."""


def launch() -> dict[str, str | None]:
    """What the launchers call this start of the program, for RUN/run.json."""
    return {name: os.environ.get(name) for name in _LAUNCHERS.values()}


def restarted() -> set[str]:
    """The names, as in `launch`, of the launchers that have started this process again: requeue, `--max-restarts`.

    Not every node of torchrun counts every restart.
    """
    counts = {name: os.environ.get(count, "") for count, name in _LAUNCHERS.items()}
    return {name for name, count in counts.items() if count.isdecimal() and int(count) > 0}


def began_here(out: Path, by: Collection[str]) -> bool:
    """Whether the run in `out`, if there is one, was begun by a launch that has been `restarted` since.

    So it is said, too, where nobody can tell: of a run that has not kept its launch, and of two launches by torchrun
    without a name of their own ("none").
    """
    if not by or not (out / "config.json").is_file():
        return False
    if not (out / "run.json").is_file():  # lost
        return True
    now = launch()
    try:
        began = json.loads((out / "run.json").read_bytes()).get("launch", now)
        return any(began.get(name) == now[name] for name in by)
    # Damaged, which is said when the run is opened.
    except (OSError, ValueError, AttributeError, RecursionError):
        return True
