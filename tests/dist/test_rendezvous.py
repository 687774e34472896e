"""Processes meet each other in a store, and nobody whom an earlier start has left behind there."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from adasim.util.errors import UserError
from adasim.dist.rendezvous import meet


@pytest.fixture
def store(tmp_path: Path) -> Callable[[], dist.Store]:
    """Each process has its own handle of one store, in which three others have met before they died."""

    def connect() -> dist.Store:
        return dist.FileStore(str(tmp_path / "store"))

    words = {
        "call": "old",
        "old/1": "dead",
        "old/2": "gone",
        "old/heard": "dead gone",
        "old/address": "nowhere",
    }
    left = connect()
    for name, value in words.items():
        left.set(name, value)
    return connect


def test_all_share_a_corner_that_nobody_has_used(store: Callable[[], dist.Store]) -> None:
    with ThreadPoolExecutor(3) as pool:
        met = list(pool.map(lambda rank: meet(store(), rank, 3, timedelta(minutes=2)), (2, 1, 0)))
    assert not any(corner.check(["address"]) for corner in met)
    met[2].set("address", "here")
    assert [corner.get("address") for corner in met] == [b"here"] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_waits_in_vain_says_so(store: Callable[[], dist.Store], rank: int) -> None:
    with pytest.raises(UserError, match="did not all come"):
        meet(store(), rank, 2, timedelta(seconds=0.1))
