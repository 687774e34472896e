"""How many loader processes a training process should have when nobody says."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

MOST = 16
"""A process that trains on one device is hardly ever faster than so many can feed."""
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def worker_count(wanted: int | Literal["auto"], environment: Mapping[str, str] = os.environ) -> int:
    """`auto` is this process's share of the machine's cores less one for itself: at least 1, at most 16.

    torchrun's processes on a machine share its cores (LOCAL_WORLD_SIZE); Slurm's have cores of their own.
    """
    if wanted != "auto":
        return wanted
    ranks = environment.get("LOCAL_WORLD_SIZE", "")
    share = usable_cores() // (int(ranks) if ranks.isdecimal() and int(ranks) else 1)
    return max(1, min(MOST, share - 1))


def usable_cores() -> int:
    """The cores that this process may use: its affinity, or fewer where a container allows less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such file, or "max"
        allowed, period = (int(word) for word in _QUOTA.read_text().split())
        cores = min(cores, math.ceil(allowed / period))
    return max(1, cores)
