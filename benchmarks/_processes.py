"""Processes that a soak starts, kills and looks after: Linux, standard library."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LOOK_S = 0.004  # how often it is looked whether something has happened


def adopt_orphans() -> None:
    """Become the parent of whatever loses its own, so that `tree` of this process misses nothing."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    gc.freeze()  # what was imported is not looked through again in every forked process


def start(work: Callable[[], object], log: Path) -> int:
    """Fork a process that leads a group of its own, says what it says into `log`, does the work and exits."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:  # never further: the caller's files and disks are not this process's to tidy up
        with suppress(Exception):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def ended(pid: int) -> int | None:
    """The exit code of a child, or minus the signal that ended it; None as long as it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def wait(pid: int, seconds: float) -> int | None:
    """The same, having waited for it."""
    end = time.monotonic() + seconds
    while (code := ended(pid)) is None and time.monotonic() < end:
        time.sleep(LOOK_S)
    return code


def is_running(pid: int) -> bool:
    """Whether a child of ours does; it is not waited for, so that its exit code can still be read."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def until(true: Callable[[], bool], pid: int) -> bool:
    """Wait for it, as long as the process runs."""
    while not true():
        if not is_running(pid):
            return False
        time.sleep(LOOK_S)
    return True


def children(pid: int) -> list[int]:
    """The living children of a process."""
    found = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    return [child for child in map(int, found) if _is_alive(child)]


def tree(pid: int) -> list[int]:
    """All that descend from a process, the nearest first."""
    found = children(pid)
    for child in found:
        found += children(child)
    return found


def _is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def orphans(seconds: float) -> list[str]:
    """What still lives of all that this process began, having waited for its end, and having ended it."""
    end = time.monotonic() + seconds
    while (left := tree(os.getpid())) and time.monotonic() < end:
        time.sleep(0.05)
    named = []
    for pid in left:
        with suppress(OSError):
            named.append(f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_text()[:80]}".replace("\0", " "))
    kill(*left)
    with suppress(ChildProcessError):  # nobody is left to wait for
        while os.waitpid(-1, os.WNOHANG if not left else 0)[0]:
            pass
    return named


def private_disk(folder: Path, size: str) -> bool:
    """Mount a small disk, and a /dev/shm of our own, that only this process and its children see; False: not allowed.

    They go when the last of these processes does, however it ends.
    """
    if os.geteuid() or ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS
        return False
    mounts = (
        ["--make-rprivate", "/"],
        ["-t", "tmpfs", "-o", f"size={size}", "none", str(folder)],
        ["-t", "tmpfs", "none", "/dev/shm"],
    )
    return not any(subprocess.run(["mount", *mount], capture_output=True).returncode for mount in mounts)


def limit_files(pids: list[int], size: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
