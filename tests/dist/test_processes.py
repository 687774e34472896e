"""Ranks: who a process is, how all meet, what they agree on, and a network that is the same on any number of them."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import free_port
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout as set_pg_timeout
from torch.nn.functional import relu

from adasim.config import Config, ModelConfig
from adasim.dist import processes
from adasim.dist.collectives import SyncedBatchNorm
from adasim.dist.processes import ALONE, Distributed, Place, Runner, meet
from adasim.methods import DinoSettings, Method, NnclrSettings, SimSiamSettings, build_method
from adasim.util.errors import UserError

pytestmark = pytest.mark.slow

BATCH = 8


class Normed(nn.Module):
    """Both kinds of batch norm, with and without affine part, and a mean over counted batches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, bias=False)
        self.plane = nn.BatchNorm2d(4)
        self.line = nn.BatchNorm1d(4, affine=False, momentum=None)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.line(relu(self.plane(self.stem(x))).mean((2, 3))))


SETTINGS = {
    "dino": DinoSettings(out_dim=24, hidden_dim=32, bottleneck_dim=16),
    "simsiam": SimSiamSettings(proj_dim=32, pred_dim=16),
    "nnclr": NnclrSettings(proj_dim=32, pred_dim=16, queue_size=40),
    "nnclr without a queue": NnclrSettings(proj_dim=32, pred_dim=16, queue_size=0),
}


def small_method(name: str) -> Method:
    model = "vit_mini" if name == "dino" else "resnet_tiny"
    config = Config(
        method=name.split()[0],
        model=ModelConfig(name=model, patch_size=8, drop_path=0.4),
        settings=SETTINGS[name],
    )
    return build_method(config, 16).train()


def normed_pass(ranks: Distributed) -> dict[str, Tensor]:
    """Two steps of batch norm in fp64 on this rank's part of a batch."""
    torch.manual_seed(0)
    images = torch.randn(2, BATCH, 3, 6, 6, dtype=torch.float64) * 3 + 5
    weight = torch.randn(BATCH, 2, dtype=torch.float64)
    network = ranks.synchronize(Normed().double(), ranks.part(BATCH))
    run = ranks.wrap(network)
    part = slice(ranks.rank * BATCH // ranks.world, (ranks.rank + 1) * BATCH // ranks.world)
    for step in range(2):
        x = images[step, part].requires_grad_()
        network.zero_grad()
        y = run(lambda x=x: network(x))
        (y * weight[part]).pow(2).mean().backward()
    assert x.grad is not None
    found = {"output": y.detach(), "input gradient": x.grad / ranks.world}
    found |= {f"{n} gradient": p.grad for n, p in network.named_parameters() if p.grad is not None}
    network.eval()
    return found | network.state_dict() | {"evaluated": network(images[0])}


def method_pass(ranks: Distributed, name: str, halves: bool) -> dict[str, Tensor]:
    """One step of a method: the loss, averaged over ranks, and all gradients."""
    method = small_method(name)
    ranks.synchronize(method, ranks.part(BATCH))
    run: Runner = ranks.wrap(method)
    torch.manual_seed(1)
    views = list(torch.randn(2, BATCH, 3, 16, 16))
    part = slice(ranks.rank * BATCH // ranks.world, (ranks.rank + 1) * BATCH // ranks.world)
    views = [view[part] for view in views]

    def in_halves() -> Any:
        seen = [method.encode(view) for view in views]
        for one in seen:
            method.predict(one)
        return method.loss(seen, 0)

    torch.manual_seed(2)  # the step's seed: the same on all ranks
    step = run(in_halves if halves else lambda: method(views, 0))
    step.loss.backward()
    found = {n: p.grad for n, p in method.named_parameters() if p.grad is not None}
    loss = torch.tensor(ranks.all_mean(float(step.loss.detach()))[0], dtype=torch.float64)
    return found | {"loss": loss, "feature": step.feature}


PASSES: dict[str, Callable[[Distributed], dict[str, Tensor]]] = {
    "batch norm": normed_pass,
    "dino": lambda ranks: method_pass(ranks, "dino", halves=False),
    "dino in halves": lambda ranks: method_pass(ranks, "dino", halves=True),
    "simsiam": lambda ranks: method_pass(ranks, "simsiam", halves=False),
    "nnclr": lambda ranks: method_pass(ranks, "nnclr", halves=False),
    "nnclr without a queue": lambda ranks: method_pass(ranks, "nnclr without a queue", halves=False),
}


def work(folder: Path, stage: int) -> dict[str, Any]:
    ranks = Distributed.start("cpu")
    found: dict[str, Any] = {name: one(ranks) for name, one in PASSES.items()}
    last = ranks.rank == ranks.world - 1
    found["any"] = [ranks.all_any(False), ranks.all_any(last), ranks.all_any(True)]
    found["mean"] = ranks.all_mean(ranks.rank, math.inf if last else 1.0, 3.0)
    found["gather"] = ranks.gather(f"rank {ranks.rank}")
    found["share"] = ranks.share(f"rank {ranks.rank}")
    found["patience"] = patience(ranks) if ranks.world == 2 else None
    try:
        with ranks.raise_on_all():
            if last:
                raise UserError("the last rank's disk is full.")
    except UserError as error:
        found["error"] = str(error)
    with ranks.raise_on_all():
        found["after"] = True
    ranks.barrier()
    with ranks:
        pass
    found["still up"] = dist.is_initialized()  # somebody else started it
    first_port, second_port = ranks.gather((free_port(), free_port()))[0]
    dist.destroy_process_group()
    found["torchrun"] = launched({"RANK": ranks.rank, "WORLD_SIZE": ranks.world, "LOCAL_RANK": 0}, first_port)
    slurm = {"SLURM_STEP_ID": 0, "SLURM_PROCID": ranks.rank, "SLURM_NTASKS": ranks.world}
    found["slurm"] = launched(slurm, second_port)
    return found


def patience(ranks: Distributed) -> list[Any]:
    """The last rank's work takes longer than any collective waits; then it fails."""
    set_pg_timeout(timedelta(seconds=5))
    processes._ASK_SECONDS = 0.5
    last = ranks.rank == ranks.world - 1

    def works() -> str:
        time.sleep(6)
        return "done"

    def fails() -> str:
        raise UserError("no such folder.")

    found: list[Any] = [ranks.run_with_heartbeat(works if last else None)]
    try:
        ranks.run_with_heartbeat(fails if last else lambda: "fine")
    except UserError as error:
        found.append(str(error))
    set_pg_timeout(timedelta(minutes=4))
    return found


def launched(variables: dict[str, int], port: int) -> tuple[int, list[float], bool]:
    """Start as under a launcher that set these variables."""
    settings = {name: str(value) for name, value in variables.items()}
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(settings)
    with Distributed.start("cpu") as ranks:
        sums = ranks.all_mean(ranks.rank)
    for name in settings:
        del os.environ[name]
    return ranks.rank, sums, dist.is_initialized()


@pytest.fixture(scope="module")
def stages(run_ranks: Callable[..., list[list[Any]]]) -> list[list[Any]]:
    return run_ranks(__file__, "work", 1, 2, 4)


@pytest.mark.parametrize("name", PASSES)
def test_a_batch_split_over_ranks_meets_the_network_of_one_process(
    stages: list[list[Any]], name: str
) -> None:
    """Batch statistics, stochastic depth and gradients are those of the joined batch, up to rounding."""
    alone = PASSES[name](Distributed(0, 1, torch.device("cpu")))
    for ranks in stages:
        for key, expected in alone.items():
            parts = [found[name][key] for found in ranks]
            joined = key in ("output", "input gradient", "feature")
            # fp64, fp32, and a stack of norms
            rounding = {"batch norm": 1e-12, "dino": 1e-5, "dino in halves": 1e-5}.get(name, 1e-4)
            for value in [torch.cat(parts)] if joined else parts:
                assert value.shape == expected.shape
                worst = (value - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
                assert worst <= rounding, key


def test_the_joined_batch_norm_is_torchs() -> None:
    """The pass in one process, which the test above compares with, has no synchronised layer in it."""
    network = ALONE.synchronize(Normed(), ALONE.part(BATCH))
    assert not any(isinstance(layer, SyncedBatchNorm) for layer in network.modules())


def test_ranks_agree(stages: list[list[Any]]) -> None:
    for ranks in stages:
        world = len(ranks)
        for found in ranks:
            assert found["any"] == [False, True, True]
            assert found["mean"][0] == (world - 1) / 2
            assert not math.isfinite(found["mean"][1])
            assert found["mean"][2] == 3.0
            assert found["gather"] == [f"rank {r}" for r in range(world)]
            assert found["share"] == "rank 0"
            assert found["error"] == "the last rank's disk is full."
            assert found["after"]
            assert found["still up"]


def test_long_work_of_one_rank_is_waited_for_and_its_error_is_everybodys(stages: list[list[Any]]) -> None:
    _, (first, last), _ = stages
    assert first["patience"] == [None, "no such folder."]
    assert last["patience"] == ["done", "no such folder."]


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_processes_meet_under_a_launcher_and_part_afterwards(stages: list[list[Any]], launcher: str) -> None:
    for ranks in stages:
        expected = [(rank, [(len(ranks) - 1) / 2], False) for rank in range(len(ranks))]
        assert [found[launcher] for found in ranks] == expected


def test_alone_nothing_is_needed() -> None:
    with Distributed.start("cpu") as ranks:
        assert (ranks.rank, ranks.world, ranks.is_main) == (0, 1, True)
        assert ranks.all_any(True)
        assert ranks.all_mean(2.0) == [2.0]
        assert ranks.gather("x") == ["x"]
        assert ranks.share("x") == "x"
        assert ranks.run_with_heartbeat(lambda: "x") == "x"
        assert ranks.run_with_heartbeat(None) is None
        with pytest.raises(UserError, match="full"), ranks.raise_on_all():
            raise UserError("full")
    assert not dist.is_initialized()


def test_places_by_torchrun_and_slurm() -> None:
    assert Place.find({}) == Place(0, 1, 0, None)
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    slurm = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "gpu[003-004]",
    }
    step = slurm | {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[004,006]"}
    assert Place.find(torchrun) == Place(5, 8, 1, None)
    assert Place.find(step | torchrun) == Place(5, 8, 1, None)  # torchrun inside a step
    assert Place.find(slurm) == Place()  # a batch script is one process, whatever it may start
    assert Place.find(step) == Place(3, 4, 1, "tcp://gpu004:34567")
    assert Place.find(step | {"SLURM_STEP_ID": "1"}).address == "tcp://gpu004:22486"  # beside the other
    assert Place.find(step | {"MASTER_ADDR": "here", "MASTER_PORT": "9"}).address == "tcp://here:9"
    assert Place.find(step | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == Place(0, 1, 1, None)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("a[1,3]b[02-04]", "a1b02"), ("rack-7-[10-12],login1", "rack-7-10")],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": nodes}
    assert Place.find(step).address == f"tcp://{first}:20000"


def test_a_batch_that_ranks_cannot_share_is_refused_with_sizes_that_work() -> None:
    four = Distributed(0, 4, torch.device("cpu"))
    four.check_batch(8)
    with pytest.raises(UserError, match=r"batch_size=10 .* 4 processes.*--batch-size 8 or 12"):
        four.check_batch(10)
    with pytest.raises(UserError, match="--batch-size 4,"):
        four.check_batch(3)


def test_a_port_that_is_taken_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (place | {"MASTER_PORT": str(busy.getsockname()[1])}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            UserError, match=r"Process 0 of 2 cannot meet the others .* MASTER_PORT to a port"
        ):
            Distributed.start("cpu", timedelta(seconds=5))


@pytest.fixture
def store(tmp_path: Path) -> Callable[[], dist.Store]:
    """Each process has its own handle of one store, in which three others have met before they died."""

    def connect() -> dist.Store:
        return dist.FileStore(str(tmp_path / "store"))

    words = {"old/1": "dead", "old/2": "gone", "old/heard": "dead gone", "old/address": "nowhere"}
    left = connect()
    for name, value in ({"call": "old"} | words).items():
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
