"""The machine's cores: how long threads spin while they wait, and how much other processes use them.

Nothing here imports torch, which reads the environment when it is loaded.
"""

from __future__ import annotations

import os
import sys
import time

SPINS = 10_000
"""Turns that a waiting thread of GNU's OpenMP makes before it sleeps; by itself it makes 300,000."""
SPIN_MILLISECONDS = 1
"""The same for LLVM's and Intel's, which spin for 200 ms."""
_USERS_CHOICE = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
_SHORTEST = 0.5  # seconds: the system counts in hundredths


def spin_briefly() -> None:
    """Let waiting threads sleep soon, unless the user has decided or torch is loaded already.

    Where other processes want the cores, a thread that spins takes its time from the very thread that it waits for:
    a run is many times slower. Processes that are started from here inherit the setting.
    """
    if "torch" in sys.modules or any(name in os.environ for name in _USERS_CHOICE):
        return
    os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    os.environ["KMP_BLOCKTIME"] = str(SPIN_MILLISECONDS)


class OtherProcesses:
    """How many cores all other processes of the machine have used since this was made."""

    def __init__(self) -> None:
        self._began, self._own, self._all = time.monotonic(), time.process_time(), _used()

    def cores(self) -> float:
        """On average; 0 where the system does not say, or before there is enough to tell."""
        now, seconds = _used(), time.monotonic() - self._began
        if now is None or self._all is None or seconds < _SHORTEST:
            return 0.0
        return max(0.0, now - self._all - (time.process_time() - self._own)) / seconds


def _used() -> float | None:
    """Seconds for which some core was busy, since the machine was started; None where there is no /proc/stat."""
    try:
        with open("/proc/stat") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]  # behind these, parts of them again
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _waiting_for_disks, *interrupts_and_other_machines = ticks
    return (user + nice + system + sum(interrupts_and_other_machines)) / os.sysconf("SC_CLK_TCK")
