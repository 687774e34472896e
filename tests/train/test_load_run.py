"""A run folder, looked at from Python."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import flip, snapshot
from pretrainings import Whole, loaded, small

import adasim
from adasim.cli.main import main
from adasim.data import open_images
from adasim.neighbors import NeighborMemory
from adasim.runs import checkpoint as checkpoint_module
from adasim.runs.checkpoint import Checkpoint
from adasim.util.errors import UserError


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    return adasim.pretrain(small(epochs=3, neighbors__window=2), out)


def test_a_run_is_its_configuration_metrics_encoder_memory_and_images(out: Path) -> None:
    before = snapshot(out)
    run = adasim.load_run(out)
    assert run.path == out
    assert run.config == small(epochs=3, neighbors__window=2)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert run.metrics == lines
    assert run.curve("loss") == {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert len(run.curve("loss")) == 9
    assert run.results == []
    assert run.encoder(torch.zeros(2, 3, 16, 16)).shape == (2, run.encoder.dim)
    assert torch.equal(run.images().load(3), open_images("synthetic:48", size=16).load(3))
    assert len(run.images("test")) == 256
    assert repr(run) == f"Run({str(out)!r}: dino, vit_mini, pairs=adasim, 3 epochs of synthetic:48, seed 5)"
    assert run.memory is not None
    assert snapshot(out) == before


def test_the_memory_is_the_one_that_training_would_go_on_with(out: Path) -> None:
    run = adasim.load_run(str(out))
    state = loaded(out)
    assert run.memory is not None
    assert state.memory is not None
    assert type(run.memory) is NeighborMemory  # whole, also in a script that torchrun started
    mine, theirs = run.memory.state_dict(), state.memory.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    neighbours, p = run.memory.distribution([3], run.config.neighbors.tau)
    assert neighbours.shape == p.shape == (1, 3)
    assert float(p.sum()) == pytest.approx(1)
    partners = run.memory.draw_partners(3, 0.2, seed=5)
    assert torch.equal(partners, state.memory.draw_partners(3, 0.2, seed=5))


def test_the_memory_is_whole_though_two_ranks_saved_it(whole: Whole) -> None:
    """Not to the bit that of one process: its losses are rounded otherwise. Every image has its lists."""
    alone, two = (adasim.load_run(whole(world)[0]).memory for world in (1, 2))
    assert alone is not None
    assert two is not None
    assert alone.cache.shape == two.cache.shape == (48, alone.dim)
    torch.testing.assert_close(two.cache, alone.cache, rtol=0, atol=0.02)
    neighbours, p = two.distribution(list(range(48)), 0.2)
    assert (neighbours[:, 0] >= 0).all()
    torch.testing.assert_close(p.sum(1), torch.ones(48, dtype=torch.float64))


class Going:
    """A copy of a run that goes on with `--save.keep 1`: a newer checkpoint takes the place of the one before."""

    def __init__(self, out: Path, folder: Path) -> None:
        self.path = Path(shutil.copytree(out, folder))
        self.saves = 0
        *older, self.newest = sorted((self.path / "checkpoints").iterdir())
        for path in older:
            shutil.rmtree(path)

    def save(self) -> None:
        self.saves += 1
        newer = self.newest.with_name(f"{self.newest.name.partition('.')[0]}.{self.saves}")
        shutil.copytree(self.newest, newer)
        shutil.rmtree(self.newest)
        self.newest = newer


@pytest.fixture
def going(out: Path, tmp_path: Path) -> Going:
    return Going(out, tmp_path / "going")


@pytest.mark.parametrize("moment", ["found", "verified", "opened"])
def test_a_checkpoint_deleted_by_the_run_while_it_is_read_gives_way_to_the_newer_one(
    out: Path, going: Going, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, moment: str
) -> None:
    hooks: dict[str, tuple[Any, str, bool]] = {
        "found": (checkpoint_module, "verify", True),
        "verified": (checkpoint_module, "verify", False),
        "opened": (torch.UntypedStorage, "from_file", True),  # safetensors has read the header by then
    }
    owner, name, before = hooks[moment]
    call = getattr(owner, name)

    def meanwhile(*arguments: Any, **options: Any) -> Any:
        if before and not going.saves:
            going.save()
        found = call(*arguments, **options)
        if not before and not going.saves:
            going.save()
        return found

    monkeypatch.setattr(owner, name, meanwhile)
    memory = adasim.load_run(going.path).memory
    assert going.saves == 1
    monkeypatch.undo()
    expected = adasim.load_run(out).memory
    assert memory is not None
    assert expected is not None
    assert all(torch.equal(tensor, memory.state_dict()[n]) for n, tensor in expected.state_dict().items())
    assert not recwarn.list


def test_lists_that_the_run_deletes_while_they_are_read_are_not_lost(
    going: Going, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """An older checkpoint needs lists that a newer one does not."""
    verify = checkpoint_module.verify
    [needed, *_] = sorted((going.path / "history").iterdir())
    kept = needed.read_bytes()

    def meanwhile(*arguments: Any) -> Checkpoint:
        if going.saves:
            needed.write_bytes(kept)  # stands for those of the newer one
        else:
            needed.unlink()
        found = verify(*arguments)
        if not going.saves:
            going.save()
        return found

    monkeypatch.setattr(checkpoint_module, "verify", meanwhile)
    assert adasim.load_run(going.path).memory is not None
    assert not recwarn.list


def test_a_run_that_saves_faster_than_it_can_be_read_is_not_called_damaged(
    going: Going, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = checkpoint_module.verify

    def meanwhile(*arguments: Any) -> Checkpoint:
        going.save()
        return verify(*arguments)

    monkeypatch.setattr(checkpoint_module, "verify", meanwhile)
    with pytest.raises(UserError, match=r"faster than it can be read\. Try again\.$"):
        _ = adasim.load_run(going.path).memory


def test_a_run_without_a_memory_says_so(tmp_path: Path) -> None:
    out = adasim.pretrain(small(epochs=1, pairs="standard"), tmp_path / "run")
    with pytest.warns(
        UserWarning, match=r"no neighbour memory: its pairs are standard\. .*--neighbors.watch"
    ):
        assert adasim.load_run(out).memory is None
    for path in (out / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    with pytest.warns(UserWarning, match="no checkpoint yet, and so no neighbour memory"):
        assert adasim.load_run(out).memory is None


@pytest.mark.filterwarnings("error")
def test_explore_says_which_lists_are_lost_as_it_says_other_things(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (copied / "history").iterdir():
        flip(file)
    main(["explore", str(copied), "--out", str(tmp_path / "page.html")])
    assert "lists" in capsys.readouterr().out
