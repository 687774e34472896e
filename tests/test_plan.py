"""The plan against the tensors that a memory allocates, the bytes that it sends and the operations it does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from helpers import command, refusal
from pretrainings import Metrics, Small
from torch import Tensor

from adasim.api import pretrain
from adasim.data import open_images
from adasim.models import build_backbone
from adasim.neighbors import NeighborMemory, ShardedMemory
from adasim.neighbors.sharded import shard
from adasim.recipes import get_recipe
from adasim.tools import plan as planning
from adasim.tools.plan import Plan, PlanArguments, make_plan

N, DIM, WINDOW, K, BATCH = 101, 7, 3, 5, 24


@pytest.mark.parametrize("cache", ["float16", "float32"])
@pytest.mark.parametrize("size", [(1003, 9, 4, 2, 3), (87_000, 384, 1, 1, 2), (87_000, 384, 1, 1, 1)])
def test_memory_and_checkpoint_are_the_tensors_bytes(
    cache: Any, size: tuple[int, int, int, int, int]
) -> None:
    """The largest share of each size; the second and third are below and above the size of an int8 copy."""
    images, dim, window, k, ranks = size
    plan = Plan(images, dim, ranks, window, k, batch=12, cache=cache)
    share = max((shard(images, rank, ranks) for rank in range(ranks)), key=len)
    memory = NeighborMemory(images, dim, window, k, dtype=getattr(torch, cache), rows=share)
    memory.observe([0], torch.ones(1, dim))
    memory.end_epoch()
    state = memory.state_dict()
    assert plan.cache_bytes == memory.cache.nbytes
    assert plan.history_bytes == memory.history_ids.nbytes + memory.history_similarities.nbytes
    assert plan.epoch_bytes == memory.current_ids.nbytes + memory.current_similarities.nbytes
    copy = memory._quantized
    assert (copy is not None) == (size[-1] == 1)
    held = 0 if copy is None else copy.codes.nbytes + copy.error.nbytes + copy.reach.nbytes
    assert plan.int8_bytes == held
    saved = sum(tensor.nbytes for name, tensor in state.items() if not name.startswith("history"))
    assert plan.checkpoint_bytes == saved
    assert plan.epoch_bytes == sum(t.nbytes for t in memory.epoch_lists(0).values())


def work(folder: Path, stage: int) -> dict[str, Any]:
    """Bytes that reach this rank in one observation, counted at torch's own functions."""
    rank, world = dist.get_rank(), dist.get_world_size()
    received: list[int] = []
    gather, swap = dist.all_gather_into_tensor, dist.all_to_all_single

    def counted_gather(output: Tensor, part: Tensor, **rest: Any) -> Any:
        received.append(output.nbytes - part.nbytes)
        return gather(output, part, **rest)

    def counted_swap(output: Tensor, parts: Tensor, **rest: Any) -> Any:
        received.append(output.nbytes - output.nbytes // world)
        return swap(output, parts, **rest)

    setattr(dist, "all_gather_into_tensor", counted_gather)  # noqa: B010 - mypy allows no assignment
    setattr(dist, "all_to_all_single", counted_swap)  # noqa: B010
    memory = ShardedMemory(N, DIM, WINDOW, K)
    ids = torch.arange(BATCH).tensor_split(world)[rank]
    memory.observe(ids, torch.randn(len(ids), DIM))
    return {"step": sum(received), "counter": memory.exchange.received}


def test_traffic_is_what_the_ranks_receive(run_ranks: Callable[..., list[list[Any]]]) -> None:
    worlds = (1, 2, 4)
    for world, ranks in zip(worlds, run_ranks(__file__, "work", *worlds), strict=True):
        plan = Plan(N, DIM, world, WINDOW, K, BATCH)
        for found in ranks:
            assert found["step"] == found["counter"] == plan.step_wire_bytes


def test_the_search_grows_with_images_and_is_shared_by_ranks() -> None:
    plan = make_plan(PlanArguments(images=1_281_167, dim=384, ranks=1))
    assert plan.search_flops == 2 * 1024 * 1_281_167 * 384
    assert plan.search_share == pytest.approx(0.0132, abs=0.0005)
    shared = make_plan(PlanArguments(images=1_281_167, dim=384, ranks=8))
    assert shared.search_flops == pytest.approx(plan.search_flops / 8, rel=1e-5)
    assert shared.search_share == pytest.approx(plan.search_share, rel=1e-5)


def test_advice_turns_with_the_size() -> None:
    assert "affordable" in make_plan(PlanArguments()).advice()
    assert "no approximate" in make_plan(PlanArguments(images=10**9, cache="float32")).advice()
    tiny = make_plan(PlanArguments(images=10**6, backbone="resnet_tiny", size=32)).advice()
    assert re.search(r"20% is reached at \d{3},\d{3} images", tiny)


def test_width_and_encoder_are_found_from_each_other() -> None:
    assert make_plan(PlanArguments()).dim == 384
    assert make_plan(PlanArguments(backbone="resnet50")).dim == 2048
    assert make_plan(PlanArguments(dim=768)).backbone == "vit_base"
    odd = make_plan(PlanArguments(dim=100))
    assert (odd.backbone, odd.search_share) == (None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--batch 1001", "1000 or 1008"),
        ("--images 2147483648", "2^31"),
        ("--images 5 --k 6", "k=6"),
        ("--window 0", "window"),
        ("--size 33", "16 does not divide size=33"),
        ("--dim 100 --backbone vit_small", "dim=100 is not the width of vit_small, 384"),
    ],
)
def test_impossible_plans_are_refused(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(f"plan {options}", capsys)


def test_the_command_prints_sizes_and_advice(capsys: pytest.CaptureFixture[str]) -> None:
    command("plan --images 1281167 --dim 384 --ranks 4 --window 50 --k 10 --batch 1024 --cache float32")
    text = capsys.readouterr().out
    for words in ("492 MB", "1.28 GB", "received per step", "Exact search is affordable"):
        assert words in text


def test_a_recipe_is_planned_on_its_images_and_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command("plan desk-resnet --data synthetic:64 --batch-size 16 --epochs 20 --device cpu")
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "64 images",
        "about 32 x 32 pixels",
        "16 at once",
        "measured",
        "w = 5, K = 5",
        "2 checkpoints",
    ):
        assert words in shown
    assert not list(tmp_path.iterdir())  # nothing is written


def test_the_forecast_counts_the_cache_that_there_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 and a copy in int8 on a CPU, float16 alone on an accelerator."""
    monkeypatch.setattr("adasim.tools.plan.INT8_FROM", 1)
    monkeypatch.setattr("adasim.tools.plan.scaled", lambda count, unit: str(int(count)))
    images, config = open_images("synthetic:64"), get_recipe("desk-resnet")

    def held(device: str, cache: Literal["auto", "float16"] = "auto") -> int:
        changed = replace(config, neighbors=replace(config.neighbors, cache=cache))
        found = {what: why for what, _, why in planning.lines(changed, images, device, 1e9, 1.0, 16)}
        return int(found["neighbours"].split(";")[0])

    values = 64 * build_backbone(config.model, 32, student=False).dim
    history = held("cuda") - 2 * values
    assert history > 0
    assert held("cpu") == history + 4 * values + (values + 8 * 64)
    assert held("cpu", "float16") == history + 2 * values + (values + 8 * 64)


def test_a_plan_says_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "free_bytes", lambda device: 3e7)
    message = refusal("plan desk-resnet --data synthetic:64 --batch-size 64 --device cpu", capsys)
    assert "are free on cpu. Use --batch-size" in message


@pytest.mark.parametrize(("epochs", "words"), [(2, "too few epochs for partners"), (4, "from epoch 3 on")])
def test_the_plan_tells_the_epoch_from_which_a_run_draws_partners(
    small: Small, metrics: Metrics, tmp_path: Path, epochs: int, words: str
) -> None:
    config = small(epochs=epochs)
    images = open_images(config.data.source, size=16)
    told = {what: why for what, _, why in planning.lines(config, images, "cpu", 1e9, 100.0, 16)}
    assert words in told["neighbours"]
    pretrain(config, tmp_path / "run")
    shares = [line["bootstrap_ratio"] for line in metrics(tmp_path / "run") if "bootstrap_ratio" in line]
    assert [share > 0 for share in shares] == [False, False, True, True][:epochs]
