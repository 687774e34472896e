"""The machine: what the system lets a process have, and how its threads wait.

Nothing here imports torch, which reads the environment when it is loaded.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading

from adasim.util.errors import UserError
from adasim.util.units import scaled

SPINS = 10_000
"""Turns that a waiting thread of GNU's OpenMP makes before it sleeps; by itself it makes 300,000."""
SPIN_MILLISECONDS = 1
"""The same for LLVM's and Intel's, which spin for 200 ms."""
_USERS_CHOICE = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
_OPEN_FILES = 64
_THREADS = 8
_IMPORTS = (
    "import resource, sys; limit = int(sys.argv[1]) - 2**28; resource.setrlimit(resource.RLIMIT_AS, (limit, limit)); "
    "import torch, torchvision; torch.ones(64, 64) @ torch.ones(64, 64)"
)
_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|out of memory|bad_alloc|failed to map segment", re.I
)


def require_enough() -> None:
    """Refuse to begin under limits that would let some library hang or abort later, where nobody can catch it."""
    if sys.platform == "win32":
        return
    import resource  # not on Windows

    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < 1024:
        files = min(1024, most) if most >= 0 else 1024
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    if 0 <= files < _OPEN_FILES:
        raise UserError(
            f"This process may have {files} files open (ulimit -n) and needs {_OPEN_FILES}, with loader processes "
            f"more. Start it where `ulimit -n 1024` was said."
        )
    memory, _ = resource.getrlimit(resource.RLIMIT_AS)
    # Tried by another process, since C++ code aborts where memory ends; it takes seconds, but such limits are rare.
    trial = [sys.executable, "-c", _IMPORTS, str(memory)]
    if memory >= 0 and subprocess.run(trial, capture_output=True).returncode:
        raise UserError(
            f"This process may have {memory / 2**30:.3g} GB of address space (ulimit -v), too little for the "
            f"libraries alone. Start it where `ulimit -v unlimited` was said; systemd-run or a "
            f"container bounds what is really used."
        )
    # A few threads at once, so that it fails here and not within a library.
    go = threading.Event()
    threads = [threading.Thread(target=go.wait, daemon=True) for _ in range(_THREADS)]
    try:
        for thread in threads:
            thread.start()
    finally:
        go.set()


def refused_by_system(error: BaseException) -> str | None:
    """A sentence on an error that is the system's refusal (no more to give, no permission); None for any other."""
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)
    if isinstance(error, PermissionError) and error.filename is not None:
        return f"No permission for {os.fsdecode(error.filename)}. Let this user read it, or start as one who may."
    if number in (errno.EMFILE, errno.ENFILE):
        return (
            "More files would be open than the system allows (ulimit -n). Raise it with `ulimit -n 4096`, or use "
            "fewer loader processes."
        )
    if isinstance(error, MemoryError) or number == errno.ENOMEM or _MEMORY.search(text):
        asked = re.search(r"allocate (\d+) bytes|allocate ([\d.]+ [KMGT]i?B)", text)
        size = "" if asked is None else f" for {asked[2] or scaled(int(asked[1]), 'B')} at once"
        return (
            f"The memory is not enough{size}. Free some, or ask for less: smaller images or batches, fewer loader "
            f"processes. What was saved is whole; a run that has saved goes on with --resume."
        )
    if number == errno.EAGAIN or "can't start new thread" in text:
        return (
            "The system lets this user start no more processes or threads (ulimit -u, or the limit of a container). "
            "Raise it, or end some; fewer loader processes and OMP_NUM_THREADS=1 need fewer."
        )
    return None


def spin_briefly() -> None:
    """Let waiting threads sleep soon, unless the user has decided or torch is loaded already.

    Where other processes want the cores, a thread that spins takes its time from the very thread that it waits for:
    a run is many times slower. Processes that are started from here inherit the setting.
    """
    if "torch" in sys.modules or any(name in os.environ for name in _USERS_CHOICE):
        return
    os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    os.environ["KMP_BLOCKTIME"] = str(SPIN_MILLISECONDS)
