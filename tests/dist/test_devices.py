"""Devices: whose is whose, in what precision a run goes on each, and runs on one that is not a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from accelerator import Accelerator
from helpers import free_port, in_one_line
from pretrainings import newest, small

import adasim
from adasim.api import pretrain
from adasim.config import ViewsConfig
from adasim.data.augment import BatchedViews
from adasim.dist.devices import (
    claim_device,
    deterministic,
    image_layout,
    pick_device,
    tf32_products,
    to_device,
    working_precision,
)
from adasim.dist.processes import Distributed
from adasim.neighbors import NeighborMemory
from adasim.neighbors.arithmetic import ieee_products
from adasim.runs.checkpoint import CheckpointStore
from adasim.train.state import build_state
from adasim.util.errors import UserError

pytestmark = pytest.mark.slow

CUDA = torch.device("cuda", 0)
SIMSIAM = {
    "method": "simsiam",
    "model__name": "resnet_tiny",
    "model__drop_path": 0.0,
    "neighbors__cache": "float32",
    "epochs": 2,
}


# ---- whose is whose ----


def test_devices_by_name() -> None:
    assert pick_device("cpu", 3) == torch.device("cpu")  # processes may share a CPU
    with pytest.raises(UserError, match="device=nonsense"):
        pick_device("nonsense")
    with pytest.raises(UserError, match="device=hpu cannot be used here"):
        pick_device("hpu")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_each_process_of_a_node_gets_its_own_device_and_touches_no_other(name: str) -> None:
    with Accelerator(devices=4) as node:
        assert pick_device(name, 3) == torch.device("cuda", 3)
        assert node.touched <= {3}
        with pytest.raises(UserError, match=r"device=cuda:1 .* --device auto"):
            pick_device("cuda:1", 3)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_process_that_is_shown_one_device_takes_it_whatever_its_number(name: str) -> None:
    with Accelerator(devices=1):
        assert pick_device(name, 3) == CUDA


def test_on_a_mac_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert pick_device("auto") == torch.device("cpu")
    assert pick_device("auto", 1) == torch.device("cpu")


def test_what_mps_gets_wrong_is_not_asked_of_it() -> None:
    for name, waits, layout in (
        ("mps", True, torch.contiguous_format),
        ("cuda", False, torch.channels_last),
        ("cpu", True, torch.channels_last),
    ):
        device, x = torch.device(name), Mock()
        to_device(x, device)
        x.to.assert_called_once_with(device, None, non_blocking=not waits)
        assert image_layout(device) == layout


def test_a_device_that_two_processes_have_is_refused() -> None:
    store = dist.HashStore()
    with Accelerator(devices=2):
        claim_device(store, torch.device("cuda", 0))
        claim_device(store, torch.device("cuda", 1))
        with pytest.raises(
            UserError, match=r"same device, 6f1d3b52-.*2: this process sees 2.*one process per device"
        ):
            claim_device(store, torch.device("cuda", 1))
    claim_device(store, torch.device("cpu"))
    claim_device(store, torch.device("cpu"))


def start_with_one_device_each(folder: Path, stage: int) -> str:
    """What `srun --gpus-per-task=1` shows: each process one device, of another serial number."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.get_default_backend_for_device = lambda device: "gloo"  # NCCL asks for a driver
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with Accelerator() as one:
        one.serial = f"6f1d3b52-8a47-4c1e-9f05-7ab34c0e000{rank + 1}"
        with Distributed.start("cuda") as ranks:
            return f"{ranks.device} {ranks.gather(rank)}"


def test_processes_meet_when_each_is_shown_one_device(run_ranks: Callable[..., list[list[Any]]]) -> None:
    found = run_ranks(__file__, "start_with_one_device_each", 2, MASTER_PORT=str(free_port()))
    assert found == [["cuda:0 [0, 1]"] * 2]


# ---- in what precision ----


def test_fp16_is_scaled_where_it_can_be_and_else_becomes_fp32() -> None:
    assert working_precision("fp16", torch.device("cpu")) == "fp32"
    with Accelerator():
        assert working_precision("fp16", CUDA) == "fp16"
        assert working_precision("bf16", CUDA) == "bf16"
    with Accelerator(fp64=False):  # where torch's scaler fails
        assert working_precision("fp16", CUDA) == "fp32"
        assert working_precision("bf16", CUDA) == "bf16"


def test_an_fp16_run_that_began_on_a_cpu_goes_on_on_a_device_and_back(tmp_path: Path) -> None:
    config = small(**SIMSIAM, precision="fp16")
    there = Distributed(0, 1, CUDA)
    began = build_state(config, 48)
    assert not began.scaler.is_enabled()
    store = CheckpointStore(tmp_path, 2)
    began.save(store)
    with Accelerator():
        state = build_state(config, 48, there)
        state.load(newest(tmp_path))
        assert state.scaler.is_enabled()
        assert state.precision == "fp16"
        assert state.digest() == began.digest()
        state.step = 1
        state.save(store)
    assert newest(tmp_path).info["scaler"]["scale"] > 1
    back = build_state(config, 48)
    back.load(newest(tmp_path))
    assert back.step == 1


# ---- how repeatably ----


def test_deterministic_algorithms_are_asked_for_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()  # attention would only warn
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()


def test_tf32_is_for_cudas_networks_and_not_for_the_search() -> None:
    assert working_precision("tf32", torch.device("cpu")) == "fp32"
    assert working_precision("tf32", torch.device("mps")) == "fp32"
    assert working_precision("tf32", torch.device("cuda")) == "tf32"
    before = torch.get_float32_matmul_precision()
    with tf32_products(True):
        assert torch.get_float32_matmul_precision() == "high"
        with ieee_products(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
    with tf32_products(False):
        assert torch.get_float32_matmul_precision() == before


def test_memory_and_views_have_deterministic_forms_on_a_device() -> None:
    with Accelerator(), deterministic(True):
        memory = NeighborMemory(40, 8, window=1, k=3, device="cuda")
        memory.observe(torch.arange(40).to("cuda"), torch.randn(40, 8).to("cuda"))
        images = torch.zeros(4, 3, 16, 16, dtype=torch.uint8).to("cuda")
        BatchedViews(ViewsConfig(size=8))(images, 1, 0, 0, torch.arange(4))


def test_an_operation_without_a_deterministic_form_becomes_a_sentence() -> None:
    with (
        Accelerator(),
        pytest.raises(UserError, match="--deterministic cannot be kept on this device: cumsum does not have"),
        deterministic(True),
    ):
        torch.ones(3, device="cuda").cumsum(0)
    with pytest.raises(RuntimeError, match="another matter"), deterministic(True):
        raise RuntimeError("another matter")
    assert not torch.are_deterministic_algorithms_enabled()


# ---- whole runs, in processes of their own ----


def bits(run: Path) -> dict[str, torch.Tensor]:
    return adasim.load_backbone(run).state_dict()


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cpu") / "run"
    pretrain(small(**SIMSIAM, device="cpu"), out)
    return out


@pytest.mark.parametrize("fp64", [True, False])
def test_a_run_on_a_device_ends_where_a_cpus_does(
    fp64: bool, runs: Any, on_cpu: Path, tmp_path: Path
) -> None:
    """Without fp64, as on Apple's mps, the memory stays on the CPU and the run goes on all the same.

    Up to rounding: optimisers step by other kernels on CPUs.
    """
    device = {"kind": "pretend", "fp64": fp64}
    runs.start(small(**SIMSIAM, deterministic=True), tmp_path / "run", accelerator=device).ended()
    expected = bits(on_cpu)
    for name, value in bits(tmp_path / "run").items():
        assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("fp64", [True, False])
def test_an_accelerator_other_than_cuda_scales_fp16_or_says_that_it_does_not(
    fp64: bool, runs: Any, tmp_path: Path
) -> None:
    device = {"kind": "pretend", "fp64": fp64}
    config = small(**SIMSIAM | {"epochs": 1}, precision="fp16")
    run = runs.start(config, tmp_path / "run", accelerator=device).ended()
    said = in_one_line(run.said)
    assert bool(newest(tmp_path / "run").info["scaler"]) is fp64
    assert ("cannot scale losses" in said and "this run uses fp32" in said) is not fp64
