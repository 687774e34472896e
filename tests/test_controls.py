"""The controls of benchmarks/paper join the images that AdaSim joins, with the partners that they promise."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adasim.config import NeighborsConfig
from adasim.neighbors import NeighborMemory, PairContext

COUNT, EPOCH = 120, 4


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    return lambda name: importlib.import_module(f"benchmarks.paper.{name}")


@pytest.fixture(scope="module")
def context() -> PairContext:
    torch.manual_seed(0)
    labels = torch.arange(COUNT) % 4
    memory = NeighborMemory(COUNT, 16, window=2, k=8)
    own = torch.randn(4, 16)[labels] + torch.randn(COUNT, 16)
    for _ in range(EPOCH):
        memory.observe(torch.arange(COUNT), own + 0.1 * torch.randn(COUNT, 16))
        memory.end_epoch()
    return PairContext(COUNT, 10, 0, NeighborsConfig(tau=0.5, window=2, k=8), memory, labels)


@pytest.mark.parametrize("rule", ["random", "right", "only-right", "only-wrong", "any-right", "two-steps"])
def test_partners_keep_to_their_rule(paper: Any, context: PairContext, rule: str) -> None:
    controls, labels, everyone = paper("controls"), context.labels, torch.arange(COUNT)
    assert labels is not None
    assert context.memory is not None
    drawn = context.memory.draw_partners(EPOCH, 0.5, 0)
    right = labels[drawn] == labels
    expected = {"only-right": right, "any-right": right, "only-wrong": ~right}.get(rule, right | ~right)
    expected = expected & (drawn != everyone)
    assert 0 < expected.sum() < COUNT
    policy = controls.Control.build(replace(context, settings=controls.ControlSettings(rule)))
    partners = policy.partners(EPOCH)
    assert torch.equal(partners != everyone, expected)
    same = labels[partners] == labels
    assert same.all() if "right" in rule else not same[expected].all()
    if rule in ("only-right", "only-wrong"):
        assert torch.equal(partners[expected], drawn[expected])
    if rule == "two-steps":
        for i in expected.nonzero()[:, 0].tolist():
            seen = context.memory.distribution([int(drawn[i])], 0.5)[0][0].tolist()
            assert partners[i] == next(j for j in seen if j not in (i, int(drawn[i])))
    assert torch.equal(policy.partners(EPOCH, everyone[5:9]), partners[5:9])


def test_the_nearest_part_of_a_class_is_nearer_than_the_farthest(paper: Any, context: PairContext) -> None:
    controls = paper("controls")
    assert context.memory is not None
    features = context.memory.features(torch.arange(COUNT))
    nearness = []
    for nearest, farthest in ((0.0, 0.1), (0.9, 1.0)):
        own = controls.ControlSettings("right", nearest, farthest, share=1.0)
        partners = controls.Control.build(replace(context, settings=own)).partners(EPOCH)
        nearness.append((features * features[partners]).sum(1))
    assert (nearness[0] > nearness[1]).all()


def test_letters_are_drawn_from_fonts_that_have_them(paper: Any) -> None:
    glyphs = paper("glyphs")
    fonts = Path(pytest.importorskip("matplotlib").get_data_path()) / "fonts" / "ttf"
    alphabets = dict(glyphs.distinct_alphabets(fonts))
    assert "DejaVuSans" in alphabets
    assert "STIXSizOneSymReg" not in alphabets  # has no letters
    assert all(letter.shape == (32, 32) for letter in alphabets["DejaVuSans"])
