"""Micro-batches against whole batches, alone and over ranks; the sizes that `auto` chooses; out of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrainings import digest, metrics, newest, small
from torch import Tensor

from adasim.api import load_run, pretrain
from adasim.config import Config
from adasim.data import Batch
from adasim.dist.processes import ALONE, Distributed
from adasim.recipes import get_recipe
from adasim.runs.checkpoint import CheckpointStore
from adasim.train.budget import Footprint, choose_micro_batches, free_bytes, out_of_memory_in_words
from adasim.train.loop import forward
from adasim.train.pretrain import check_micro_batch
from adasim.train.state import TrainState, build_state
from adasim.util.errors import UserError


def one_step(
    config: Config, micro_batches: int, *, local: int = 0, latent: bool = False, ranks: Distributed = ALONE
) -> dict[str, Tensor]:
    """Loss, features, diagnostics, gradients and centre of a step on random views, as one rank has them."""
    torch.manual_seed(0)
    state = build_state(config, 100, ranks, micro_batches)
    run = ranks.wrap(state.method)
    torch.manual_seed(1)
    sizes = [config.views.size] * 2 + [config.views.local_side] * local
    share = slice(
        ranks.rank * config.batch_size // ranks.world, (ranks.rank + 1) * config.batch_size // ranks.world
    )
    views = [torch.randn(config.batch_size, 3, size, size)[share] for size in sizes]
    cached = torch.nn.functional.normalize(
        torch.randn(config.batch_size, state.method.feature_dim)[share], dim=1
    )
    torch.manual_seed(2)  # the step's
    step = forward(state, run, views, cached if latent else None)
    step.loss.backward()
    state.method.after_step(0, 100)
    found = {
        "loss": step.loss.detach(),
        "feature": step.feature,
        "second": step.observed("second"),
        "center": state.method.get_buffer("center"),
        **step.diagnostics,
    }
    return found | {name: p.grad for name, p in state.method.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("micro_batches", "local"), [(2, 2), (8, 0), (16, 0)])
def test_micro_batches_of_a_vit_give_the_batchs_loss_and_gradients(micro_batches: int, local: int) -> None:
    config = small(model__drop_path=0.3, views__local_crops=local)
    whole, parts = (one_step(config, n, local=local, latent=micro_batches == 8) for n in (1, micro_batches))
    assert whole.keys() == parts.keys()
    assert len(whole) > 20
    for name, expected in whole.items():
        assert (parts[name] - expected).abs().max() <= 3e-6 * max(1.0, float(expected.abs().max())), name


def work(folder: Path, stage: int) -> dict[str, Tensor]:
    with Distributed.start("cpu") as ranks:
        return one_step(small(model__drop_path=0.3), 2, ranks=ranks)


def test_ranks_may_have_micro_batches_too(run_ranks: Callable[..., list[list[Any]]]) -> None:
    """Two processes with two micro-batches each: four parts in all."""
    whole = one_step(small(model__drop_path=0.3), 1)
    [found] = run_ranks(__file__, "work", 2)
    for name in ("feature", "second"):
        assert torch.allclose(torch.cat([one[name] for one in found]), whole[name], atol=3e-6), name
    means = torch.stack([one["loss"] for one in found])
    assert means.mean() == pytest.approx(float(whole["loss"]), rel=1e-5)
    for name in whole.keys() - {"loss", "feature", "second", "feature_spread", "kl", "teacher_entropy"}:
        for one in found:
            assert torch.allclose(one[name], whole[name], atol=3e-6), name


COLLECTIVE = ("dino", "nnclr")
"""Methods whose losses look at what other ranks have."""


def count(folder: Path, stage: int) -> list[Footprint]:
    with Distributed.start("cpu"):
        return [Footprint.count(config) for config in map(_of_method, COLLECTIVE)]


def _of_method(method: str) -> Config:
    return small(method=method, model__name="resnet_tiny", model__drop_path=0.0, optim__lr=1e-3)


def test_a_step_is_counted_alike_by_one_process_and_by_two(run_ranks: Callable[..., list[list[Any]]]) -> None:
    """The tensors that are counted have no storage, and nothing of them can travel."""
    [found] = run_ranks(__file__, "count", 2)
    alone = [Footprint.count(config) for config in map(_of_method, COLLECTIVE)]
    assert found == [alone, alone]


def test_stochastic_depth_makes_a_difference_here() -> None:
    """Else the test above would not show that micro-batches share one draw of it."""
    with_it, without = (one_step(small(model__drop_path=p), 2)["loss"] for p in (0.3, 0.0))
    assert (with_it - without).abs() > 1e-3


def test_runs_in_micro_batches_find_the_same_neighbours(tmp_path: Path) -> None:
    """The features agree up to rounding, so the lists do, except where two scores are nearly equal."""
    memories, losses = [], []
    for name, size in (("whole", "auto"), ("parts", 4)):
        pretrain(small(epochs=3, micro_batch=size), tmp_path / name)
        memory = load_run(tmp_path / name).memory
        assert memory is not None
        memories.append(memory)
        losses.append([line["loss"] for line in metrics(tmp_path / name) if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] != losses[1]  # summed in another order
    same = memories[0].history_ids == memories[1].history_ids
    assert same.float().mean() > 0.98


def test_a_split_that_memory_asked_for_is_kept_by_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` looks at free memory, which is another amount next time."""

    def run(name: str, free: float, **rest: Any) -> None:
        monkeypatch.setattr("adasim.train.pretrain.free_bytes", lambda device: free)
        pretrain(config, tmp_path / name, **rest)

    config = small(epochs=2)
    little = 1.2 * Footprint.count(config).training_bytes(4) + 1
    run("straight", little)
    with pytest.raises(KeyboardInterrupt):
        run("stopped", little, on_step=interrupt)
    run("stopped", 1e12, resume=True)
    assert digest(tmp_path / "stopped") == digest(tmp_path / "straight")
    run("whole", 1e12)
    assert digest(tmp_path / "whole") != digest(tmp_path / "straight")


def interrupt(state: TrainState, batch: Batch, loss: float) -> None:
    if state.step == 4:  # of 6; the newest checkpoint is of step 3
        raise KeyboardInterrupt


class FirstOfTwo(Distributed):
    """The first of two processes; it hears nothing of the other."""

    def gather(self, thing: Any) -> list[Any]:
        return [thing]

    def share(self, thing: Any) -> Any:
        return thing


@pytest.mark.parametrize(("micro_batches", "expected"), [(1, (1, 16)), (2, (4, 4))])
def test_only_what_was_split_is_split_by_a_resume_with_fewer_ranks(
    tmp_path: Path, micro_batches: int, expected: tuple[int, int]
) -> None:
    """Else batch norm would see half of its images, and no one be told."""
    config = small(method="simsiam", model__name="resnet_tiny", model__drop_path=0.0, pairs="standard")
    ranks = FirstOfTwo(0, 2, torch.device("cpu"))
    saved = build_state(config, 48, ranks, micro_batches)
    saved.recent.append(torch.zeros(8, saved.method.feature_dim))  # of a step
    saved.save(CheckpointStore(tmp_path, keep=1, ranks=ranks))
    resumed = build_state(config, 48)
    resumed.load(newest(tmp_path))
    assert (resumed.part.count, resumed.part.images) == expected


@pytest.mark.parametrize(("model", "refused"), [("resnet_tiny", True), ("vit_mini", False)])
def test_batch_norm_of_micro_batches_keeps_to_its_number_of_ranks(
    tmp_path: Path, model: str, refused: bool
) -> None:
    """Over ranks its statistics come from one micro-batch of each."""
    config = small(
        method="simsiam" if refused else "dino", model__name=model, pairs="standard", micro_batch=4
    )
    saved = build_state(config, 48, micro_batches=4)
    saved.recent.append(torch.zeros(16, saved.method.feature_dim))  # of a step
    saved.save(CheckpointStore(tmp_path, keep=1))
    checkpoint = newest(tmp_path)
    build_state(config, 48, micro_batches=4).load(checkpoint)
    ranks = FirstOfTwo(0, 2, torch.device("cpu"))
    on_two = build_state(config, 48, ranks, micro_batches=2)
    if not refused:
        return on_two.load(checkpoint, world=2)
    with pytest.raises(
        UserError, match=r"with 2 processes.* from 8 images, and took them from 4. Use 1, as before"
    ):
        on_two.load(checkpoint, world=2)


def test_auto_takes_the_largest_part_that_fits() -> None:
    config = get_recipe("desk-vit")
    footprint = Footprint.count(config)
    assert choose_micro_batches(config, ALONE, 1e12) == (1, None)
    count, note = choose_micro_batches(config, ALONE, 1.2 * footprint.training_bytes(32) + 1)
    assert count == 4
    assert note is not None
    assert "4 micro-batches of 32" in note
    with pytest.raises(UserError, match="one image alone is too much"):
        choose_micro_batches(config, ALONE, 1e6)


def test_auto_does_not_split_what_has_batch_norm() -> None:
    config = get_recipe("desk-resnet")
    free = 1.2 * Footprint.count(config).training_bytes(32) + 1
    with pytest.raises(
        UserError, match=r"--batch-size 32; or --micro-batch 32, which changes what is learnt"
    ):
        choose_micro_batches(config, ALONE, free)
    assert choose_micro_batches(replace(config, micro_batch=32), ALONE, free) == (4, None)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux tells what is free")
def test_files_that_a_container_keeps_in_memory_count_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run that has read a large data set would seem to have no memory left."""
    monkeypatch.setattr("adasim.train.budget._CGROUP", tmp_path)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    stat = "active_file 500\ninactive_file 300\n"
    for name, text in (("max", "1000\n"), ("current", "990\n"), ("stat", stat)):
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_bytes(torch.device("cpu")) == 10 + 500 + 300


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(UserError, match=r"micro_batch=5 does not divide the 16 images .* --micro-batch 4"):
        choose_micro_batches(small(micro_batch=5), ALONE, 1e12)
    with pytest.raises(UserError, match=r"micro_batch=0 must be at least 1"):
        replace(small(), micro_batch=0)
    with pytest.raises(UserError, match=r"timing=current"):
        choose_micro_batches(small(micro_batch=4, neighbors__timing="current"), ALONE, 1e12)
    apart = replace(small(micro_batch=4, neighbors__timing="current"), pairs="standard")
    assert choose_micro_batches(apart, ALONE, 1e12)[0] == 4  # nothing is drawn
    with pytest.raises(UserError, match=r"batch norm nothing to compare"):
        choose_micro_batches(replace(get_recipe("desk-resnet"), micro_batch=1), ALONE, 1e12)


def test_out_of_memory_is_a_sentence_with_a_size() -> None:
    config = small()
    with (
        pytest.raises(UserError, match=r"step of 16 images at once .* Use --micro-batch 8\."),
        out_of_memory_in_words(config, build_state(config, 48)),
    ):
        torch.empty(1 << 50)
    current = small(neighbors__timing="current")  # which micro-batches cannot do
    with (
        pytest.raises(UserError, match=r"Use a smaller --batch-size, or --neighbors.timing previous"),
        out_of_memory_in_words(current, build_state(current, 48)),
    ):
        torch.empty(1 << 50)
    with pytest.raises(RuntimeError, match="shape"), out_of_memory_in_words(config, build_state(config, 48)):
        torch.empty(4).view(3)


def test_a_run_that_ran_out_of_memory_goes_on_with_smaller_micro_batches(tmp_path: Path) -> None:
    pretrain(small(epochs=2), tmp_path / "run")
    pretrain(small(epochs=3, micro_batch=4), tmp_path / "run", resume=True)
    assert load_run(tmp_path / "run").metrics[-1]["epoch"] == 2
    with pytest.raises(UserError, match=r"micro_batch was auto and is now 4, .* batch norms"):
        check_micro_batch("auto", replace(_of_method("dino"), micro_batch=4))
