"""Run a function of a test file in real gloo processes, for one number of processes after another.

FUNCTION(folder, stage) is called on every rank of every stage; stage i has the i-th number of processes, and what
it returns is saved as FOLDER/STAGE-RANK.pt. Importing torch takes seconds, so ranks are forked from driver.py.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@functools.cache
def load(file: str, function: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("ranks_work", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["ranks_work"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)


def be_rank(work: Callable[[Path, int], Any], folder: Path, stage: int, rank: int, world: int) -> int:
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/{stage}.store",
            rank=rank,
            world_size=world,
            timeout=timedelta(minutes=4),
        )
        dist.barrier()  # whoever ended the group earlier would hang up on those that still connect to it
        torch.save(work(folder, stage), folder / f"{stage}-{rank}.pt")
        if dist.is_initialized():  # the work may have ended it
            dist.destroy_process_group()
        return 0
    except BaseException:
        traceback.print_exc()
        return 1


def main(file: str, function: str, folder: str, *worlds: str) -> None:
    torch.set_num_threads(1)
    work = load(file, function)
    for stage, world in enumerate(map(int, worlds)):
        ranks = []
        for rank in range(world):
            if pid := os.fork():
                ranks.append(pid)
            else:
                code = be_rank(work, Path(folder), stage, rank, world)
                sys.stderr.flush()
                os._exit(code)
        if any([os.waitpid(pid, 0)[1] for pid in ranks]):
            print(f"a rank of stage {stage} ({world} processes) failed", file=sys.stderr)
            sys.exit(1)
