"""The loop is Algorithm 1: compared with examples/algorithm_1.py, and watched while it works."""

import copy
import json
import math
import runpy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import timm
import torch
from pretrainings import loaded, metrics, newest, small
from safetensors.torch import load_file
from torch import Tensor

import adasim
from adasim.api import pretrain
from adasim.config import Config
from adasim.data import Batch, BatchedViews, PairLoader, open_images
from adasim.methods import Dino, EncodedView, Step
from adasim.neighbors import Oracle
from adasim.options import NearestSettings
from adasim.runs.checkpoint import CheckpointStore
from adasim.runs.folder import RunFolder
from adasim.train.loop import Training
from adasim.train.state import TrainState, build_policy, build_state

pytestmark = pytest.mark.slow


class Pairs(NamedTuple):
    """What one step was trained on."""

    epoch: int
    ids: Tensor
    partners: Tensor


class Recorder(list[Pairs]):
    """Every step's queries and partners, every epoch's lists: `pretrain(..., on_step=pairs.add)`."""

    def __init__(self) -> None:
        self.lists: dict[int, list[list[int]]] = {}

    def add(self, state: TrainState, batch: Batch, loss: float) -> None:
        self.append(Pairs(state.epoch, batch.ids, batch.partners))
        if state.memory is not None:
            self.lists[state.epoch] = state.memory.current_ids.tolist()


@pytest.fixture
def pairs() -> Recorder:
    return Recorder()


def start(config: Config, out: Path) -> Training:
    """The pieces that `pretrain` puts together, to look inside while they run."""
    images = open_images(config.data.source, size=config.views.size)
    state = build_state(config, len(images))
    loader = PairLoader(images, config.views, batch_size=config.batch_size, seed=config.seed)
    facts = {"fingerprint": images.fingerprint(), "listing": images.listing()}
    run, store = RunFolder.create(out, config, facts), CheckpointStore(out, config.save.keep)
    return Training(config, run, images, loader, state, store)


# Against the algorithm written out


@pytest.mark.parametrize("timing", ["previous", "current"])
def test_the_loop_is_algorithm_1(tmp_path: Path, pairs: Recorder, timing: str) -> None:
    config = small(epochs=5, neighbors__window=2, neighbors__timing=timing)
    written_out = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "algorithm_1.py"))
    losses, partners, reference, cache = written_out["algorithm_1"](config)
    pretrain(config, tmp_path / "run", on_step=pairs.add)
    assert [step.partners.tolist() for step in pairs] == partners
    different = sum(int((step.ids != step.partners).sum()) for step in pairs)
    assert different > 10  # or the equality above says little
    logged = [line["loss"] for line in metrics(tmp_path / "run") if "loss" in line]
    assert logged == pytest.approx(losses, rel=1e-5)
    result = newest(tmp_path / "run")
    weights = result.tensors("method")
    for part, network in (("student", reference.student), ("teacher", reference.teacher)):
        for name, value in network.state_dict().items():
            torch.testing.assert_close(weights[f"{part}.{name}"], value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.tensors("memory-00000")["cache"].double(), cache, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["dino", "simsiam"])
def test_tau_0_trains_bit_identically_to_standard_pairs(tmp_path: Path, pairs: Recorder, method: str) -> None:
    changes = {} if method == "dino" else {"method": "simsiam", "model__name": "resnet_tiny"}
    pretrain(small(pairs="standard", **changes), tmp_path / "standard", on_step=pairs.add)
    pretrain(small(neighbors__tau=0.0, **changes), tmp_path / "tau 0", on_step=pairs.add)
    assert all(torch.equal(step.ids, step.partners) for step in pairs)
    one, other = newest(tmp_path / "standard"), newest(tmp_path / "tau 0")
    assert "memory" in other.info
    assert "memory" not in one.info
    for group in ("method", "optimizer"):
        a, b = one.tensors(group), other.tensors(group)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


# Pairs


def test_nearest_pairs_take_the_best_other_image_of_the_epoch_before(tmp_path: Path, pairs: Recorder) -> None:
    pretrain(small(pairs="nearest"), tmp_path / "run", on_step=pairs.add)
    for epoch, ids, partners in pairs:
        for i, partner in zip(ids.tolist(), partners.tolist(), strict=True):
            expected = i if epoch == 0 else next(j for j in pairs.lists[epoch - 1][i] if j != i)
            assert partner == expected


@pytest.mark.parametrize("timing", ["previous", "current"])
def test_latent_neighbours_are_cached_features_and_views_show_the_image(
    tmp_path: Path, pairs: Recorder, monkeypatch: pytest.MonkeyPatch, timing: str
) -> None:
    config = small(pairs="nearest", pair_settings=NearestSettings(space="latent"), neighbors__timing=timing)
    array = open_images(config.data.source, size=16).as_array()
    images = torch.empty(0) if array is None else array
    aimed_at: list[tuple[Tensor, Tensor]] = []
    aim_at = Dino.aim_at

    def watched(method: Dino, neighbours: Tensor, views: list[EncodedView]) -> None:
        memory = training.state.memory
        assert memory is not None
        aimed_at.append((neighbours, memory.cache.clone()))
        aim_at(method, neighbours, views)

    def look(state: TrainState, batch: Batch, loss: float) -> None:
        pairs.add(state, batch, loss)
        for number, shown in enumerate(batch.views, start=1):
            expected = views(images[batch.ids], number, config.seed, state.epoch, batch.ids)
            torch.testing.assert_close(shown, expected)

    views = BatchedViews(config.views)
    training = start(config, tmp_path / "run")
    training.on_step = look
    monkeypatch.setattr(Dino, "aim_at", watched)
    training.run()
    assert len(aimed_at) == len(pairs) - 3  # all but those of the first epoch
    for (epoch, ids, partners), (neighbours, cache) in zip(pairs[3:], aimed_at, strict=True):
        lists = pairs.lists[epoch - 1 if timing == "previous" else epoch]
        assert partners.tolist() == [next(j for j in lists[i] if j != i) for i in ids.tolist()]
        assert torch.equal(neighbours, cache[partners])


def test_oracle_pairs_share_the_class_and_follow_the_schedule(tmp_path: Path, pairs: Recorder) -> None:
    config = small(pairs="oracle", neighbors__oracle_p=0.0)
    pretrain(config, tmp_path / "run", on_step=pairs.add)
    labels = open_images(config.data.source, size=16).labels
    assert labels is not None
    policy = Oracle(labels, config.epochs, 0.0, config.seed)
    for epoch, ids, partners in pairs:
        assert torch.equal(labels[ids], labels[partners])
        assert torch.equal(partners, policy.partners(epoch)[ids])
        assert epoch > 0 or torch.equal(ids, partners)
    assert any(not torch.equal(ids, partners) for _, ids, partners in pairs)


def test_view_1_shows_the_query_and_view_2_its_partner(
    tmp_path: Path, pairs: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each image is one flat grey whose level is its id: what the network was shown can be read off."""
    levels = np.arange(48, dtype=np.uint8)[:, None, None, None] * 5
    np.savez(tmp_path / "grey.npz", images=np.broadcast_to(levels, (48, 16, 16, 3)))
    config = small(
        pairs="nearest",
        data__source=str(tmp_path / "grey.npz"),
        views__solarize=0.0,
        views__local_crops=2,
        views__mean=(0.0,),
        views__std=(1.0,),
    )
    shown: list[list[Tensor]] = []
    forward = Dino.forward

    def recorded(self: Dino, views: list[Tensor], epoch: int) -> Step:
        shown.append([(view.mean((1, 2, 3)) * 255 / 5).round().long() for view in views])
        assert [view.shape[-1] for view in views] == [16, 16, 8, 8]
        return forward(self, views, epoch)

    monkeypatch.setattr(Dino, "forward", recorded)
    pretrain(config, tmp_path / "run", on_step=pairs.add)
    assert len(shown) == len(pairs) == 12
    for (first, second, *local), (_, ids, partners) in zip(shown, pairs, strict=True):
        assert torch.equal(first, ids)
        assert torch.equal(second, partners)
        assert all(torch.equal(crop, ids) for crop in local)
    assert any(not torch.equal(step.ids, step.partners) for step in pairs)


def test_both_timings_learn_the_same_from_crops_of_standard_pairs(tmp_path: Path) -> None:
    losses = []
    for timing in ("previous", "current"):
        config = small(epochs=2, views__local_crops=2, neighbors__tau=0.0, neighbors__timing=timing)
        config.model.drop_path = 0.0
        pretrain(config, tmp_path / timing)
        losses.append([line["loss"] for line in metrics(tmp_path / timing) if "loss" in line])
    assert losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize(
    ("precision", "dtype", "pieces"),
    [
        *(("bf16", torch.bfloat16, 1), ("bf16", torch.bfloat16, 4)),
        *(("fp16", torch.float16, 1), ("fp32", None, 4), ("tf32", None, 1)),
    ],
)
def test_the_forward_pass_has_the_precision_of_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int, precision: str, dtype: Any
) -> None:
    training = start(small(epochs=1), tmp_path / "run")
    training.state.precision = precision
    training.state.part.cut(pieces)
    seen, forward = set(), Dino.forward

    def recorded(self: Dino, views: list[Tensor], epoch: int) -> Step:
        seen.add(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        with torch.autocast("cpu", enabled=False):
            return forward(self, views, epoch)

    monkeypatch.setattr(Dino, "forward", recorded)
    training.run()
    assert seen == {dtype}


# Memory


def test_a_runs_memory_and_policy_have_the_runs_settings() -> None:
    memory = build_state(small(neighbors__support="union", neighbors__cache="float16"), 48).memory
    assert memory is not None
    assert (memory.support, memory.cache.dtype) == ("union", torch.float16)
    policy: Any = build_policy(small(seed=9, neighbors__tau=0.1), 48, memory, None)
    assert (policy.memory, policy.tau, policy.seed) == (memory, 0.1, 9)


@pytest.mark.parametrize(
    ("timing", "view"),
    [("previous", "first"), ("current", "first"), ("previous", "second"), ("previous", "mean")],
)
def test_the_memory_gets_the_teachers_features_from_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timing: str, view: str
) -> None:
    changes = {"neighbors__timing": timing, "neighbors__view": view, "pairs": "nearest"}
    config = small(epochs=3, settings__teacher_momentum=0.5, **changes)  # a teacher that moves
    training = start(config, tmp_path / "run")
    method, memory = training.state.method, training.state.memory
    assert isinstance(method, Dino)
    assert memory is not None
    images = open_images(config.data.source, size=16).as_array()
    assert images is not None
    views, observe_async = BatchedViews(config.views), memory.observe_async
    before = {name: value.clone() for name, value in method.teacher.state_dict().items()}
    teacher = copy.deepcopy(method.teacher)
    checked = 0

    def checked_observe(ids: Tensor, features: Tensor) -> Any:
        nonlocal checked
        teacher.load_state_dict(before)
        epoch = training.state.epoch
        if timing == "previous":
            partners = training.policy.partners(epoch)[ids]
            assert epoch == 0 or not torch.equal(partners, ids)
        else:
            partners = ids
        pair = (
            views(images[ids], 1, config.seed, epoch, ids),
            views(images[partners], 2, config.seed, epoch, ids),
        )
        with torch.no_grad():
            first, second = (teacher.backbone(pixels) for pixels in pair)
        both = first / first.norm(dim=1, keepdim=True) + second / second.norm(dim=1, keepdim=True)
        expected = {"first": first, "second": second, "mean": both}[view]
        torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
        checked += 1
        return observe_async(ids, features)

    monkeypatch.setattr(memory, "observe_async", checked_observe)
    training.on_step = lambda *_: before.update(copy.deepcopy(method.teacher.state_dict()))
    training.run()
    assert checked == 9


# What a person sees


def test_metrics_hold_each_step_once_and_each_epoch_in_words(
    tmp_path: Path, pairs: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrain(small(save__log_every=2), tmp_path / "run", on_step=pairs.add)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6, 8, 10, 12]
    epochs = [line for line in lines if "epoch_loss" in line]
    assert [(line["step"], line["epoch"]) for line in epochs] == [(3, 0), (6, 1), (9, 2), (12, 3)]
    for line in epochs:
        different = [s.ids != s.partners for s in pairs if s.epoch == line["epoch"]]
        assert line["bootstrap_ratio"] == pytest.approx(float(torch.cat(different).float().mean()))
        assert {"epoch_rankme", "epoch_feature_spread", "nn_self_top1", "nn_accuracy_top2"} <= line.keys()
    assert epochs[-1]["bootstrap_ratio"] > 0
    for line in lines:
        # The schedules, with every epoch too, as they were in the step that was just made: of 12, counted from 0.
        half = (1 + math.cos(math.pi * (line["step"] - 1) / 12)) / 2
        assert line["weight_decay"] == pytest.approx(0.4 - 0.36 * half)
        assert line["teacher_momentum"] == pytest.approx(1 - 0.004 * half)
        assert line["teacher_temp"] == pytest.approx([0.04, 0.07, 0.07, 0.07][line["epoch"]])
    of_step = {line["step"]: line["feature_spread"] for line in lines if "loss" in line}
    for line in epochs[1::2]:  # on one scale: features of the epoch's last step are among the epoch's
        assert 0.5 < of_step[line["step"]] / line["epoch_feature_spread"] < 2
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("epoch 4/4, step 12/12 (100%), loss ")
    assert f"bootstrapped {epochs[-1]['bootstrap_ratio']:.0%}" in last


def test_a_forced_collapse_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small(settings__teacher_temp_start=50.0, settings__teacher_temp=50.0, settings__out_dim=24)
    pretrain(config, tmp_path / "run")
    assert capsys.readouterr().out.count("The teacher's output is uniform") == 1


# What is left behind


@pytest.mark.parametrize("model", ["vit_mini", "resnet_tiny"])
def test_a_run_describes_itself_and_its_backbone_loads_into_timm(tmp_path: Path, model: str) -> None:
    config = small(epochs=2, model__name=model)
    out = pretrain(config, tmp_path / "run")
    assert out == tmp_path / "run"
    assert Config.from_dict(json.loads((out / "config.json").read_text())) == config
    assert json.loads((out / "versions.json").read_text())["torch"] == torch.__version__
    assert list((out / "tensorboard").iterdir())

    method = loaded(out).method
    assert isinstance(method, Dino)
    teacher = method.teacher.backbone.eval()
    images = torch.rand(4, 3, 16, 16)
    with torch.no_grad():
        expected = teacher(images)
        ours = adasim.load_backbone(out)
        torch.testing.assert_close(ours(images), expected)
        kwargs = dict(ours.spec["kwargs"])
        stem = kwargs.pop("stem", None)
        plain = timm.create_model(ours.spec["timm"], **kwargs)
        if stem == "no_pool":
            plain.maxpool = torch.nn.Identity()
        plain.load_state_dict(load_file(out / "backbone.safetensors"))
        torch.testing.assert_close(plain.eval()(images), expected)
    assert ours.transform.size == config.views.size
    assert set(ours.transform.mean) == set(config.views.mean)
