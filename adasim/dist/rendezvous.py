"""How the processes of a run find each other in a store that may remember earlier ones.

torchrun keeps its store when it restarts a run (`--max-restarts`), and with it the addresses of processes that are
gone: a process that looks them up waits for ever. Its count of restarts is no help, as nodes may count differently.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from adasim.util.errors import UserError


def meet(store: dist.Store, rank: int, world: int, timeout: timedelta) -> dist.Store:
    """A prefix of `store` that these processes share and no earlier ones have used.

    Rank 0 publishes a new random name, the others reply under it with random names of their own, and rank 0 lists
    the replies that it got. A rank that finds itself in the list has met this rank 0, not keys of an earlier one.
    """
    me = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    call = me
    if rank == 0:
        store.set("call", me)
        answers = [f"{me}/{other}" for other in range(1, world)]
        _wait(store, answers, deadline)
        store.set(f"{me}/heard", " ".join(store.get(answer).decode() for answer in answers))
    while rank > 0:
        _wait(store, ["call"], deadline)
        call = store.get("call").decode()
        store.set(f"{call}/{rank}", me)
        if store.check([f"{call}/heard"]) and me in store.get(f"{call}/heard").decode().split():
            break
        _pause(deadline)
    return dist.PrefixStore(call, store)


def _wait(store: dist.Store, keys: list[str], deadline: float) -> None:
    while not store.check(keys):
        _pause(deadline)


def _pause(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise UserError(
            "The processes of the run did not all come. Look for the first one that failed, and check that all were "
            "given the same address and number of processes."
        )
    time.sleep(0.02)
