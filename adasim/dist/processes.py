"""The one place that knows about ranks: who this process is, how it reaches the others, what they agree on.

    with Distributed.start("auto") as ranks:         # alone, under torchrun, or under srun
        ranks.check_batch(config.batch_size)
        run = ranks.wrap(ranks.synchronize(method, ranks.part(config.batch_size)))
        step = run(lambda: method(views, epoch))     # gradients of step.loss are averaged over ranks

Everything works alone, without torch.distributed, and then costs nothing.
"""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adasim.dist.collectives import Exchange, Part, share_drop_path, synchronize
from adasim.dist.devices import claim_device, pick_device
from adasim.util import terminal
from adasim.util.errors import UserError

T = TypeVar("T")
_TIMEOUT = timedelta(minutes=10)  # long enough for a slow save, short enough not to hang for hours
_ASK_SECONDS = 20.0
_FIRST_SECONDS = 5.0  # for the first process to fail by the same error


class LostContactError(UserError):
    """Another process of the run is gone."""


@dataclass(frozen=True)
class Place:
    """Where a launcher put this process. `address` is where rank 0 waits; None: the launcher has told torch."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    address: str | None = None

    @classmethod
    def find(cls, env: Mapping[str, str]) -> Place:
        """From torchrun's variables or, in a step started by srun, from Slurm's."""
        if "RANK" in env and "WORLD_SIZE" in env:
            place = cls(_number(env, "RANK"), _number(env, "WORLD_SIZE"), _number(env, "LOCAL_RANK"))
            if place.rank >= place.world:
                raise UserError(
                    f"RANK={place.rank} must be below WORLD_SIZE={place.world}. Start with torchrun, or unset both."
                )
            return place
        # A batch script has SLURM_NTASKS too, but is one process: only srun sets the step's id.
        if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
            return cls()
        tasks = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
        world = _number(env, tasks, "1")
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "localhost")
        host = env.get("MASTER_ADDR") or first_host(nodes)
        # Steps of one job may run side by side on one node.
        number = _number(env, "SLURM_JOB_ID") + 7919 * _number(env, "SLURM_STEP_ID")
        port = env.get("MASTER_PORT") or str(20000 + number % 20000)
        rank, local_rank = _number(env, "SLURM_PROCID"), _number(env, "SLURM_LOCALID")
        return cls(rank, world, local_rank, f"tcp://{host}:{port}" if world > 1 else None)


@dataclass(frozen=True)
class Distributed:
    """This process among the others of the run. Use it as a context: leaving it closes the process group."""

    rank: int
    world: int
    device: torch.device
    store: dist.Store | None = None
    """Where `start` met the others; None if it did not make the process group, and must not end it."""

    @classmethod
    def start(cls, device: str = "auto", timeout: timedelta = _TIMEOUT) -> Distributed:
        """Meet the other processes, if there are any: gloo between CPUs, NCCL between GPUs."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), pick_device(device))
        place = Place.find(os.environ)
        where = pick_device(device, None if place.world == 1 else place.local_rank)
        if where.type != "cpu" and where.index is not None:
            torch.accelerator.set_device_index(where.index)
        if place.world == 1:
            return cls(0, 1, where)
        rank, world = place.rank, place.world
        try:
            store, *_ = next(dist.rendezvous(place.address or "env://", rank, world, timeout=timeout))
        except (dist.DistError, RuntimeError, OSError, ValueError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)[:150]
            problem = UserError(
                f"Process {rank} of {world} cannot meet the others ({reason}). Start with torchrun; or check "
                f"MASTER_ADDR, and set MASTER_PORT to a port that is free."
            )
            if rank:  # the first one's is printed anyway
                terminal.complain(problem)
            raise problem from error
        store = meet(store, rank, world, timeout)
        with ExitStack() as stack:  # which lets it tell of errors
            ranks = stack.enter_context(cls(rank, world, where, store))
            claim_device(store, where)
            backend = dist.get_default_backend_for_device(where)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
            stack.pop_all()
        return ranks

    def __enter__(self) -> Distributed:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or self.world == 1 or getattr(error, "shared", False):
            if self.store is not None and dist.is_initialized():
                dist.destroy_process_group()
            return
        # This process alone failed: the first cannot report it, and closing the group would wait for the others.
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            lost = LostContactError(
                f"Process {self.rank} of {self.world} lost touch with another one, which was probably killed; "
                f"that one's last words, if any, say why. Give the command again; a pretraining resumes from its "
                f"newest checkpoint, which is good."
            )
            if not self.is_main:  # whose errors the command line shows
                terminal.complain(lost)
            raise lost from error
        if isinstance(error, UserError) and not self._first_says(str(error)) and not self.is_main:
            terminal.complain(error)

    def _first_says(self, error: str) -> bool:
        """Whether the first process has met the same error, and says so: what all look at is wrong for all."""
        deadline = time.monotonic() + _FIRST_SECONDS
        with suppress(dist.DistError, RuntimeError):  # it is gone
            while (
                self.store is not None and time.monotonic() < deadline
            ):  # `Store.wait` would warn in the end
                if self.is_main:
                    self.store.set("error of 0", error)
                if self.store.check(["error of 0"]):
                    return self.store.get("error of 0").decode() == error
                time.sleep(0.05)
        return False

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.rank == 0

    # ---- the network ----

    def check_batch(self, batch_size: int) -> None:
        """Refuse a batch that the processes cannot share evenly, naming sizes that they can."""
        if batch_size % self.world == 0:
            return
        below = batch_size - batch_size % self.world
        sizes = f"{below} or {below + self.world}" if below else str(self.world)
        raise UserError(
            f"batch_size={batch_size} cannot be divided by {self.world} processes. Use --batch-size {sizes}, "
            f"or start another number of processes."
        )

    def part(self, batch_size: int, micro_batches: int = 1) -> Part:
        """The first of the micro-batches that this process makes of its share of a batch."""
        count = self.world * micro_batches
        return Part(self.rank * micro_batches, count, batch_size // count)

    def synchronize(self, network: nn.Module, part: Part) -> nn.Module:
        """The network with stochastic depth (and, over ranks, batch norm) as of the whole batch; same parameters."""
        if self.world > 1:
            network = synchronize(network, self.device)
        return share_drop_path(network, part)

    def wrap(self, network: nn.Module) -> Runner:
        """`run(forward)` calls `forward()`; the backward pass of what it computes averages over ranks.

        The averages of gradients travel while the backward pass is still under way (DDP).
        """
        if self.world == 1:
            return _Call(network)
        run = DistributedDataParallel(_Call(network))
        # After its first backward pass DDP packs gradients anew, in the order in which they were ready, and how a
        # sum over four ranks rounds depends on a number's place in its pack. So that the first step after a resume
        # rounds like any other, that first pass takes place here, over a sum that reaches all from last to first.
        run(lambda: torch.stack([p.sum() for p in run.parameters()]).sum()).backward()
        network.zero_grad(set_to_none=True)
        return run

    # ---- agreement ----

    def barrier(self) -> None:
        """Wait for all."""
        self.all_any(False)

    def all_any(self, flag: bool) -> bool:
        """Whether it is so on any rank; the same answer on all."""
        return self.all_mean(float(flag))[0] > 0

    def all_mean(self, *values: float) -> list[float]:
        """The mean of each value over ranks, the same on all; not finite if one rank's is not."""
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return (tensor / self.world).tolist()

    def gather(self, thing: T) -> list[T]:
        """Small Python objects, one from each rank, on all of them."""
        if self.world == 1:
            return [thing]
        things: list[Any] = [None] * self.world
        dist.all_gather_object(things, thing)
        return things

    def gather_rows(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        """(n_r, ...) from each rank r -> (sum of n_r, ...) on all of them, in the order of ranks, where `part` is.

        `counts` are the n_r, which all ranks know; the rest of the shape is the same on all.
        """
        if self.world == 1:
            return part
        padded = part.new_zeros((max(counts), *part.shape[1:]))
        padded[: len(part)] = part
        rows = Exchange().gather(padded).to(part.device).split(len(padded))
        return torch.cat([some[:count] for some, count in zip(rows, counts, strict=True)])

    def share(self, thing: T) -> T:
        """The first rank's thing, on all of them; it may be large."""
        if self.world == 1:
            return thing
        things: list[Any] = [thing]
        dist.broadcast_object_list(things, src=0)
        return things[0]

    def run_with_heartbeat(self, work: Callable[[], T] | None) -> T | None:
        """Do this rank's work, if it has any, and wait for the others, however long they take.

        Whoever waits in a collective gives up after minutes, and to list or hash a large data set may take hours. So
        it is done in a thread, while all ask each other again and again who is still at it. An error of one rank is
        raised on all, as by `raise_on_all`. No collectives inside.
        """
        if self.world == 1:
            return None if work is None else work()
        done: Future[T | None] = Future()

        def run() -> None:
            try:
                done.set_result(None if work is None else work())
            except BaseException as error:
                done.set_exception(error)

        thread = threading.Thread(
            target=run, name="adasim-work", daemon=True
        )  # an interrupt leaves it behind
        thread.start()
        thread.join(_ASK_SECONDS)
        while self.all_any(thread.is_alive()):
            thread.join(_ASK_SECONDS)
        with self.raise_on_all():
            return done.result()

    def require_same(self, facts: Mapping[str, object]) -> None:
        """Refuse to go on, on all ranks, where one of the named values is not the same on all."""
        everyones = self.gather(dict(facts))
        with self.raise_on_all():
            for rank, theirs in enumerate(everyones):
                for name, value in everyones[0].items():
                    if theirs[name] != value:
                        raise UserError(
                            f"{name} is {value} in process 0 and {theirs[name]} in process {rank}. Start all "
                            f"{self.world} processes with the same command, on the same files."
                        )

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """If the block raises a `UserError` on one rank, it is raised on all. No collectives inside."""
        error = None
        try:
            yield
        except UserError as mine:
            error = mine
        for one in self.gather(error):
            if one is not None:
                one.shared = True
                raise one


def _number(env: Mapping[str, str], name: str, default: str = "0") -> int:
    value = env.get(name, default)
    if value.isdecimal():
        return int(value)
    raise UserError(f"The environment has {name}={value}, which is not a whole number. Correct or unset it.")


ALONE = Distributed(0, 1, torch.device("cpu"))
"""One process, on its CPU."""


class _Call(nn.Module):
    """Calls a forward pass and returns its result: DDP prepares for the backward pass there, and ours has several.

    It holds what learns and nothing else: teacher and running statistics are the same on all ranks anyway.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.learned = nn.ParameterList(p for p in network.parameters() if p.requires_grad)

    def forward(self, forward: Callable[[], T]) -> T:
        return forward()

    def no_sync(self) -> AbstractContextManager[None]:
        """In the block, gradients add up on this process and are not averaged yet; alone they never are."""
        return nullcontext()


Runner = _Call | DistributedDataParallel
"""What `wrap` gives: called with a forward pass, it returns what that computes."""


def first_host(nodes: str) -> str:
    """The first name of Slurm's list of nodes.

    >>> first_host("gpu[003-007,12],login1"), first_host("a1,a2"), first_host("rack[2-3]n[08,11]")
    ('gpu003', 'a1', 'rack2n08')
    """
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def meet(store: dist.Store, rank: int, world: int, timeout: timedelta) -> dist.Store:
    """A prefix of `store` that these processes share and no earlier ones have used.

    torchrun keeps its store when it restarts a run (`--max-restarts`), and with it the addresses of processes that
    are gone: a process that looks them up waits for ever. Its count of restarts is no help, as nodes may count
    differently.

    Rank 0 publishes a new random name, the others reply under it with random names of their own, and rank 0 lists
    the replies that it got. A rank that finds itself in the list has met this rank 0, not keys of an earlier one.
    """
    me = call = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()

    def wait(ready: Callable[[], bool]) -> None:
        while not ready():
            if time.monotonic() > deadline:
                raise UserError(
                    "The processes of the run did not all come. Look for the first one that failed, and check that "
                    "all were given the same address and number of processes."
                )
            time.sleep(0.02)

    def heard() -> bool:
        nonlocal call
        if not store.check(["call"]):
            return False
        call = store.get("call").decode()
        store.set(f"{call}/{rank}", me)
        return store.check([f"{call}/heard"]) and me in store.get(f"{call}/heard").decode().split()

    if rank == 0:
        store.set("call", me)
        answers = [f"{me}/{other}" for other in range(1, world)]
        wait(lambda: store.check(answers))
        store.set(f"{me}/heard", " ".join(store.get(answer).decode() for answer in answers))
    else:
        wait(heard)
    return dist.PrefixStore(call, store)
