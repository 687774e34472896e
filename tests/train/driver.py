"""Pretrainings in processes of their own, to be killed and signalled at chosen moments.

Importing torch takes seconds and a test needs many runs, so this process imports everything once and forks.
Each line of JSON on its standard input is a request, each line on its standard output the answer:

    {"start": RUN}                       -> the new process's id
    {"wait": PID, "seconds": SECONDS}    -> its exit code, minus the signal that ended it, or null: still running

RUN holds config, out, resume, threads, log (a file that takes what the run prints) and hooks. A hook
{"call": "module:Class.function", "number": 3, "when": "after", "do": "kill"} acts when that function is called
for the third time in that process. The product has no such hooks: they are put around its functions here.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard

import adasim.train.loop  # noqa: F401 - before the fork
from adasim.config import Config

ACTIONS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "terminate the group": lambda: os.killpg(os.getpgrp(), signal.SIGTERM),
    "interrupt the group": lambda: os.killpg(os.getpgrp(), signal.SIGINT),
    "kill a worker": lambda: os.kill(children()[0], signal.SIGKILL),
    "pause": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]


def hook(call: str, number: int, when: str, do: str) -> None:
    module, _, path = call.partition(":")
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
    original, count = getattr(owner, name), 0

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        mine = count == number
        if mine and when == "before":
            act(do)
        result = original(*args, **kwargs)
        if mine and when == "after":
            act(do)
        return result

    setattr(owner, name, hooked)


def act(do: str) -> None:
    verb, _, path = do.partition(" /")
    if verb == "remove":
        os.unlink(f"/{path}")
    elif verb == "fill":
        fill(Path(f"/{path}"))
    else:
        ACTIONS[do]()


def fill(path: Path) -> None:
    """Write a file until the disk has no room for another byte."""
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def start(run: dict[str, Any]) -> int | None:
    """Fork. The new process leaves with None and trains."""
    if pid := os.fork():
        return pid
    os.setsid()  # a group of its own, with its loader processes
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(run["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    return None


def train(run: dict[str, Any]) -> None:
    torch.set_num_threads(run["threads"])
    for one in run["hooks"]:
        hook(**one)
    from adasim.train.loop import pretrain

    pretrain(Config.from_dict(run["config"]), run["out"], resume=run["resume"])


def wait(pid: int, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def main() -> None:
    gc.freeze()  # what was imported is not looked through again in every process
    atexit.register(gc.unfreeze)
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pid = start(request["start"])
            if pid is None:
                return train(request["start"])  # and leave as any program does, exit handlers included
            print(json.dumps(pid), flush=True)
        else:
            print(json.dumps(wait(request["wait"], request["seconds"])), flush=True)


if __name__ == "__main__":
    main()
