"""Going on from trained weights: batch norms keep their statistics, heads learn first, the encoder learns slowly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pretrainings import digest, small

from adasim.api import pretrain
from adasim.config import ModelConfig
from adasim.data import Batch
from adasim.models import Backbone, EvalTransform, build_backbone, load_backbone, save_backbone
from adasim.recipes import for_epochs, from_weights, get_recipe
from adasim.train.budget import has_batch_norm
from adasim.train.loop import learn, set_schedules
from adasim.train.state import TrainState, build_state
from adasim.util.errors import UserError

RESNET = ModelConfig(name="resnet_tiny", drop_path=0.0)


def started_from(weights: Path, frozen: bool = True) -> ModelConfig:
    return replace(RESNET, init=str(weights), freeze_norm=frozen)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A small ResNet whose batch norms have seen images."""
    torch.manual_seed(3)
    encoder = build_backbone(RESNET, 16, 3, student=False)
    encoder.train()
    with torch.no_grad():
        for _ in range(20):
            encoder(torch.rand(32, 3, 16, 16))
    save_backbone(tmp_path / "trained.safetensors", encoder, EvalTransform.of_size(16))
    return tmp_path / "trained.safetensors"


def statistics(encoder: Backbone) -> dict[str, torch.Tensor]:
    return {name: value for name, value in encoder.net.state_dict().items() if "running" in name}


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("method", ["simsiam", "dino"])
def test_frozen_batch_norms_keep_the_statistics_of_the_weights(
    method: str, weights: Path, tmp_path: Path
) -> None:
    before = statistics(load_backbone(weights))
    for frozen in (True, False):
        config = small(method=method, epochs=2, model=started_from(weights, frozen))
        run = pretrain(config, tmp_path / f"run-{frozen}")
        moved = differing(before, statistics(load_backbone(run)))
        assert (moved == []) is frozen


def test_the_encoder_waits_until_the_heads_have_learnt(weights: Path, tmp_path: Path) -> None:
    def trained(epochs: int) -> dict[str, torch.Tensor]:
        config = small(method="simsiam", epochs=2, model=started_from(weights), optim__head_epochs=1)
        state = build_state(config, 48)
        state.method.eval_encoder.load_state_dict(load_backbone(weights).state_dict())
        torch.manual_seed(0)
        for step in range(3 * epochs):
            views = [torch.rand(16, 3, 16, 16) for _ in range(2)]
            learn(state, state.method(views, step // 3).loss, config, steps_per_epoch=3)
            state.count(0.0, 0)
        return {name: value.clone() for name, value in state.method.state_dict().items()}

    first, second = trained(1), trained(2)
    start = load_backbone(weights).state_dict()
    for name, value in start.items():
        assert torch.equal(first[f"encoder.{name}"], value), name
    fresh = build_state(small(method="simsiam", epochs=2, model=RESNET), 48).method.state_dict()
    heads = [name for name in fresh if name.startswith("predictor") and name.endswith("weight")]
    assert heads
    assert not any(torch.equal(first[name], fresh[name]) for name in heads)
    assert not torch.equal(second["encoder.net.conv1.0.weight"], start["net.conv1.0.weight"])


def test_the_encoders_rate_is_a_share_of_the_heads() -> None:
    config = small(method="simsiam", optim__encoder_lr=0.1, optim__head_epochs=1, optim__name="sgd")
    state = build_state(config, 48)
    encoder = {id(p) for p in state.method.eval_encoder.parameters()}

    def rates(step: int) -> tuple[set[float], set[float]]:
        set_schedules(state.optimizer, config, step, steps_per_epoch=3)
        found: tuple[set[float], set[float]] = (set(), set())
        for group in state.optimizer.param_groups:
            for parameter in group["params"]:
                if not group["fixed_lr"]:
                    found[id(parameter) in encoder].add(group["lr"])
        return found

    heads, waiting = rates(2)
    assert waiting == {0.0}
    heads, learning = rates(3)
    assert learning == {0.1 * next(iter(heads))}
    assert sum(len(group["params"]) for group in state.optimizer.param_groups) == len(
        [p for p in state.method.parameters() if p.requires_grad]
    )


def test_a_run_from_weights_resumes_to_the_same_bits(weights: Path, tmp_path: Path) -> None:
    slowly = {"optim__encoder_lr": 0.1, "optim__head_epochs": 1}
    config = small(method="simsiam", model=started_from(weights), **slowly)
    whole = pretrain(config, tmp_path / "whole")

    def interrupted(state: TrainState, batch: Batch, loss: float) -> None:
        if state.step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(config, tmp_path / "stopped", on_step=interrupted)
    pretrain(config, tmp_path / "stopped", resume=True)
    assert digest(tmp_path / "stopped") == digest(whole)


def test_a_network_whose_batch_norms_are_frozen_may_be_cut_into_micro_batches() -> None:
    frozen = replace(RESNET, freeze_norm=True)
    assert has_batch_norm(small(model=RESNET))
    assert not has_batch_norm(small(model=frozen))
    assert has_batch_norm(small(method="simsiam", model=frozen))  # in its heads


def test_weights_bring_their_architecture_size_and_normalisation(weights: Path) -> None:
    from adasim.models import read_weights

    config = from_weights(get_recipe("desk-vit"), str(weights), read_weights(str(weights)))
    assert (config.model.name, config.views.size, config.model.init) == ("resnet_tiny", 16, str(weights))
    assert config.views.mean == EvalTransform.of_size(16).mean
    assert config.model.freeze_norm
    assert config.optim.encoder_lr < 0.2
    assert for_epochs(config, 1).optim.head_epochs == 0
    assert for_epochs(config, 20).optim.head_epochs == 2


def test_heads_that_learn_alone_to_the_end_are_refused() -> None:
    with pytest.raises(UserError, match="head_epochs=4"):
        small(optim__head_epochs=4).check(48, has_labels=True)
