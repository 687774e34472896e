"""Pretrainings in processes of their own, to be killed and signalled at chosen moments.

Importing torch takes seconds and a test needs many runs, so this process imports everything once and forks.
Each line of JSON on its standard input is a request, each line on its standard output the answer:

    {"start": RUN}                       -> the new process's id
    {"call": [FILE, FUNCTION, ARGUMENT, ..], "folder": .., "env": .., "log": ..}   -> the same, of this function
    {"wait": PID, "seconds": SECONDS}    -> its exit code, minus the signal that ended it, or null: still running

RUN holds config, out, resume, threads, log (a file that takes what the run prints) and hooks. A hook
{"call": "module:Class.function", "number": 3, "when": "after", "do": "kill"} acts when that function is called
for the third time in that process; with {"rank": 1} in that rank's process alone, and only before torchrun has
restarted it. The product has no such hooks: they are put around its functions here. Optional parts of RUN:

    command      true: be the command `adasim pretrain`, which speaks and exits, instead of calling pretrain
    env          environment variables, such as torchrun's
    record       a file for what the run did, see `Recorder`
    digests      true: record the state's digest, too, after every step and where a loss is refused
    accelerator  {"kind": "pretend", ...}: on a pretend device, see accelerator.py
    tidies_up    true: leave as any program does, exit handlers included, which takes twice as long as the training
    launch       [2, 1]: be torchrun instead, which starts two ranks, forked ones, and starts them again once
    features     true: the memory is shown features that depend on (epoch, id) alone, not on the encoder

    python driver.py RUN.json            one run, in this process: what torchrun starts
"""

from __future__ import annotations

import atexit
import errno
import functools
import gc
import hashlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.utils.tensorboard
from gloo_ranks import load
from helpers import fill
from torch import Tensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import adasim.__main__
import adasim.cli.pretrain
from adasim.api import pretrain
from adasim.config import Config
from adasim.neighbors import NeighborMemory
from adasim.train.loop import NonFiniteLossError, Training
from adasim.train.state import TrainState
from adasim.util.seeding import uniform

ACTIONS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "terminate the group": lambda: os.killpg(os.getpgrp(), signal.SIGTERM),
    "interrupt the group": lambda: os.killpg(os.getpgrp(), signal.SIGINT),
    "kill the parent": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "kill a worker": lambda: os.kill(children()[0], signal.SIGKILL),
    "signal USR1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "lose the reader": lambda: lose_the_reader(),
    "be busy": lambda: be_busy(),
    "write to a full disk": lambda: write_to_a_full_disk(),
    "pause": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "find the disk full": lambda: raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
}


def raising(error: Exception) -> None:
    raise error


def lose_the_reader() -> None:
    """Let standard output be a pipe that nobody reads, as after `| head -n 1`."""
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)


def write_to_a_full_disk() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def be_busy() -> None:
    """A long call into C, during which no handler written in Python can run."""
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)


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
        if mine and do == "make the loss NaN":
            result.loss = result.loss * torch.nan
        elif mine and when == "after":
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


class Recorder:
    """Lines of JSON about what a process did: steps (ids, partners, loss), epochs (lists, p_win), digests."""

    def __init__(self, path: str, digests: bool) -> None:
        self._path = path
        agree, count, end_epoch = Training.agree, TrainState.count, TrainState.end_epoch

        def recorded_agree(training: Training, loss: Any, batch: Any) -> Any:
            try:
                agreed = agree(training, loss, batch)
            except NonFiniteLossError:
                self._write(refused=training.state.step, digest=training.state.digest())
                raise
            ids, partners = batch.ids.tolist(), batch.partners.tolist()
            self._write(step=training.state.step, ids=ids, partners=partners, loss=agreed[0])
            return agreed

        def recorded_count(state: TrainState, *counted: Any) -> None:
            count(state, *counted)
            if digests:
                self._write(counted=state.step, digest=state.digest())

        def recorded_end_epoch(state: TrainState) -> None:
            memory = state.memory
            if memory is not None:
                lists, similarities = memory.current_ids.tolist(), memory.current_similarities.tolist()
                end_epoch(state)
                world = int(os.environ.get("WORLD_SIZE", "1"))
                asked = torch.arange(memory.num_images).chunk(world)[-1 - int(os.environ.get("RANK", "0"))]
                neighbours, p = memory.distribution(asked, tau=0.2)  # of other rows than it holds
                first = memory.rows.start
                self._write(epoch=state.epoch - 1, first=first, lists=lists, similarities=similarities)
                self._write(p_win=state.epoch - 1, of=asked.tolist(), ids=neighbours.tolist(), p=p.tolist())
            else:
                end_epoch(state)

        for owner, function in (
            (Training, recorded_agree),
            (TrainState, recorded_count),
            (TrainState, recorded_end_epoch),
        ):
            setattr(owner, function.__name__.removeprefix("recorded_"), function)

    def _write(self, **line: Any) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")


def show_chosen_features() -> None:
    """Features that keep near their image's own of the epoch before, with some pairs of equal images."""
    prepare = NeighborMemory._prepare

    def prepare_chosen(memory: NeighborMemory, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        image = uniform(0, "image", 0, torch.where(ids % 8 == 1, ids - 1, ids), memory.dim)
        noise = uniform(0, "noise", memory.epochs, ids, memory.dim) * (ids % 8 > 1)[:, None]
        return prepare(memory, ids, (image + noise / 2).float())

    setattr(NeighborMemory, "_prepare", prepare_chosen)  # noqa: B010 - mypy allows no assignment


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
    if "accelerator" in run:
        from accelerator import Accelerator

        with Accelerator(**run.pop("accelerator")):
            return train(run)
    torch.set_num_threads(run["threads"])
    os.environ.update(run.get("env", {}))
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    for one in run["hooks"]:
        rank = one.pop("rank", None)
        if rank is None or (str(rank) == os.environ["RANK"] and not restarted):
            hook(**one)
    if run.get("record"):
        Recorder(run["record"], run.get("digests", False))
    if run.get("features"):
        show_chosen_features()
    config, out, resume = Config.from_dict(run["config"]), Path(run["out"]), run["resume"]
    if run.get("command"):
        # Parsing takes a second, as does a figure, and both are tested elsewhere: as good as parsed.
        where: Any = {"resume" if resume else "out": out}
        adasim.cli.pretrain.read_arguments = lambda kind, *_, **__: kind(
            **where, config=config, curves=False, compare=False
        )
        sys.argv = ["adasim", "pretrain", *(["--resume", str(out)] if resume else ["desk-vit"])]
        adasim.__main__.main()
    else:
        pretrain(config, out, resume=resume)


def launch(run: dict[str, Any]) -> None:
    ranks, restarts = run["launch"]
    how = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        start_method="fork",
    )
    elastic_launch(how, train)(run)


def leave_at_once(work: Callable[..., None], *arguments: Any) -> NoReturn:
    """Work, and exit with the right code but without tidying up."""
    code = 1
    try:
        work(*arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which runs would inherit
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pid = start(request["start"])
            if pid is None and request["start"].get("tidies_up"):
                return train(request["start"])
            elif pid is None:
                leave_at_once(launch if "launch" in request["start"] else train, request["start"])
            print(json.dumps(pid), flush=True)
        elif "call" in request:
            file, function, *arguments = request["call"]
            work = load(file, function)  # before the fork: what it imports is imported once
            if (pid := start(request)) is None:
                os.chdir(request["folder"])
                os.environ.update(request["env"])
                leave_at_once(work, *arguments)
            print(json.dumps(pid), flush=True)
        else:
            print(json.dumps(wait(request["wait"], request["seconds"])), flush=True)
    os._exit(0)  # tidying up takes seconds


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(json.loads(Path(sys.argv[1]).read_text()))
    else:
        main()
