"""--compile: torch.compile really runs the encoder, learns the same, and leaves names and files as they are."""

import shutil
from pathlib import Path

import pytest
import torch
from pretrainings import metrics, small
from torch._dynamo.utils import counters

import adasim
from adasim.api import pretrain
from adasim.train.state import build_state
from adasim.util.errors import UserError

pytestmark = pytest.mark.slow

SIMSIAM = {
    "method": "simsiam",
    "model__name": "resnet_tiny",
    "model__drop_path": 0.0,
}


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler here")
def test_a_compiled_run_has_the_losses_and_the_files_of_any_other(tmp_path: Path) -> None:
    counters.clear()
    for name, compile in (("as it is", False), ("compiled", True)):
        pretrain(small(**SIMSIAM, epochs=2, optim__lr=1e-3, compile=compile), tmp_path / name)
        assert bool(counters["stats"]["calls_captured"]) is compile
    losses = [
        [line["loss"] for line in metrics(tmp_path / name) if "loss" in line]
        for name in ("as it is", "compiled")
    ]
    assert len(losses[0]) == 6
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=1e-5)
    states = [adasim.load_backbone(tmp_path / name).state_dict() for name in ("as it is", "compiled")]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-2, atol=1e-3)


def test_a_machine_without_a_compiler_gets_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match="needs a C\\+\\+ compiler"):
        build_state(small(**SIMSIAM, compile=True), 48)
