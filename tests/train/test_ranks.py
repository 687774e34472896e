"""Pretraining in several processes is the pretraining of one: same batches, lists and partners, same losses.

Most runs here are ranks forked by driver.py with torchrun's variables; a few are torchrun's own.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import free_port
from pretrainings import STEP, Ranks, Runs, Torchrun, Whole, arguments, digest, loaded, metrics, small

from adasim.config import Config
from adasim.neighbors import NeighborMemory
from adasim.util.seeding import permutation

pytestmark = pytest.mark.slow


class Story:
    """What ranks did together: per global step its ids, partners and loss, per epoch its lists and p_win."""

    def __init__(self, *stretches: Ranks) -> None:
        self.ids: dict[int, list[int]] = {}
        self.partners: dict[int, list[int]] = {}
        self.losses: dict[int, float] = {}
        self.lists: dict[int, list[Any]] = {}
        self.p_win: dict[int, dict[int, Any]] = {}
        for ranks in stretches:
            lines = ranks.recorded
            for parts in zip(*([x for x in rank if "step" in x] for rank in lines), strict=True):
                step = parts[0]["step"]
                assert {(part["step"], part["loss"]) for part in parts} == {(step, parts[0]["loss"])}
                self.ids[step] = [i for part in parts for i in part["ids"]]
                self.partners[step] = [i for part in parts for i in part["partners"]]
                self.losses[step] = parts[0]["loss"]
            for parts in zip(*([x for x in rank if "epoch" in x] for rank in lines), strict=True):
                rows = [
                    row for part in parts for row in zip(part["lists"], part["similarities"], strict=True)
                ]
                self.lists[parts[0]["epoch"]] = rows
            for line in (x for rank in lines for x in rank if "p_win" in x):
                found = zip(line["of"], line["ids"], line["p"], strict=True)
                self.p_win.setdefault(line["p_win"], {}).update({i: (ids, p) for i, ids, p in found})

    def bootstrapped(self) -> int:
        return sum(i != j for s in self.ids for i, j in zip(self.ids[s], self.partners[s], strict=True))


def trained(ranks: Ranks, code: int = 0) -> Ranks:
    assert set(ranks.wait()) == {code}, ranks.said
    return ranks


def memory(out: Path) -> NeighborMemory:
    """That of a run's newest checkpoint, in one process."""
    found = loaded(out).memory
    assert found is not None
    return found


# The same training on any number of ranks


@pytest.mark.parametrize(
    ("pairs", "timing", "worlds"),
    [
        ("adasim", "previous", (2, 4)),
        ("adasim", "current", (2, 4)),
        ("nearest", "current", (2,)),
    ],
)
def test_lists_distributions_and_partners_are_the_same_bits_on_any_number_of_ranks(
    runs: Runs, tmp_path: Path, pairs: str, timing: str, worlds: tuple[int, ...]
) -> None:
    """Given the same features. Losses, which are the encoder's own, agree up to rounding."""
    config = small(pairs=pairs, neighbors__timing=timing, neighbors__window=2, data__source="synthetic:36")
    told = {
        world: Story(trained(runs.start_ranks(config, tmp_path / f"{world}", world, features=True)))
        for world in (1, *worlds)
    }
    alone = told[1]
    assert alone.bootstrapped() > 10
    assert sorted(alone.ids) == list(range(8))  # 4 images are left over at the end of an epoch
    for step, ids in alone.ids.items():
        order = permutation(config.seed, "order", step // 2, 36)
        assert ids == order[step % 2 * 16 :][:16].tolist()
    kept = memory(tmp_path / "1").state_dict()
    for world in worlds:
        assert told[world].ids == alone.ids
        assert told[world].partners == alone.partners
        assert told[world].lists == alone.lists
        assert told[world].p_win == alone.p_win
        assert told[world].losses == pytest.approx(alone.losses, rel=1e-5)
        for name, tensor in memory(tmp_path / f"{world}").state_dict().items():
            assert torch.equal(tensor, kept[name]), name


def test_an_encoder_without_batch_norm_has_the_losses_of_one_process(whole: Whole) -> None:
    """And draws the same partners, though its features differ in their last bits."""
    out, alone = whole(1)[0], Story(whole(1)[1])
    assert alone.bootstrapped() > 0
    logged = [line for line in metrics(out) if "epoch_loss" in line]
    for world in (2, 4):
        other, told = whole(world)[0], Story(whole(world)[1])
        assert told.ids == alone.ids
        assert told.partners == alone.partners
        assert told.losses == pytest.approx(alone.losses, rel=1e-5)
        for mine, theirs in zip((x for x in metrics(other) if "epoch_loss" in x), logged, strict=True):
            names = ("epoch_loss", "bootstrap_ratio", "nn_self_top1", "nn_accuracy_top2", "partner_accuracy")
            assert mine["second_neighbour_accuracy"] == theirs["second_neighbour_accuracy"]
            for name in names:
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5), name


@pytest.mark.parametrize("method", ["dino", "simsiam", "nnclr"])
def test_batch_norm_looks_at_the_images_of_all_ranks(runs: Runs, tmp_path: Path, method: str) -> None:
    config = small(method=method, model__name="resnet_tiny", model__drop_path=0.0, optim__lr=1e-3, epochs=2)
    stories, states = [], []
    for world in (1, 2):
        out = tmp_path / f"{world}"
        stories.append(Story(trained(runs.start_ranks(config, out, world))))
        states.append(loaded(out).method.state_dict())
    alone, two = stories
    assert two.ids == alone.ids
    assert two.partners == alone.partners
    assert two.losses == pytest.approx(alone.losses, rel=2e-4)  # SimSiam's are near 0
    statistics = [name for name in states[0] if "running" in name]
    assert len(statistics) > 4
    for name in statistics:
        torch.testing.assert_close(states[1][name], states[0][name], rtol=1e-4, atol=1e-5, msg=name)
        assert states[0][name].unique().numel() > 1  # it has moved


# Launchers


def test_two_nodes_on_loopback_train_together(runs: Runs, torchrun: Torchrun, tmp_path: Path) -> None:
    """To the bits of ranks that the tests start here. For torchrun on one node see test_rank_faults.py."""
    where = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    command = ["-m", "adasim", *arguments(small(epochs=3), tmp_path / "run")]
    nodes = torchrun(*([*where, f"--node-rank={node}", *command] for node in range(2)))
    assert [code for code, _ in nodes] == [0, 0], nodes
    for words in ("backbone.safetensors", "(100%)"):
        assert [said.count(words) for _, said in nodes] == [1, 0]  # one process speaks
    assert not any("Warning" in said for _, said in nodes)
    config = Config.from_dict(json.loads((tmp_path / "run" / "config.json").read_text()))
    trained(runs.start_ranks(config, tmp_path / "here", 2))
    assert digest(tmp_path / "run") == digest(tmp_path / "here")


# Resumed by another number of ranks


def test_a_run_goes_on_in_mid_epoch_with_other_numbers_of_ranks(runs: Runs, tmp_path: Path) -> None:
    """1, then 2, then 4, then 1 again. What finished epochs have left on the disk is not written again."""
    config = small(neighbors__window=3, epochs=5)
    alone = Story(trained(runs.start_ranks(config, tmp_path / "alone", 1)))
    out = tmp_path / "run"
    stretches: list[Ranks] = []
    found: dict[str, tuple[int, int]] = {}
    for world, steps in ((1, 4), (2, 2), (4, 2), (1, None)):
        last = {"call": STEP, "number": steps, "when": "after", "do": "terminate", "rank": world - 1}
        stop = [] if steps is None else [last]
        ranks = runs.start_ranks(config, out, world, resume=bool(stretches), hooks=stop)
        trained(ranks, 143 if stop else 0)
        stretches.append(ranks)
        for path in (out / "history").iterdir():
            status = path.stat()
            assert found.setdefault(path.name, (status.st_ino, status.st_mtime_ns)) == (
                status.st_ino,
                status.st_mtime_ns,
            )
    parted = Story(*stretches)
    reached = [max(line["step"] for line in ranks.recorded[0] if "step" in line) for ranks in stretches]
    assert reached == [4, 7, 10, 14]  # each in mid-epoch; the signal is seen in the step after it
    assert parted.ids == alone.ids
    assert parted.partners == alone.partners
    assert parted.bootstrapped() > 0
    assert parted.losses == pytest.approx(alone.losses, rel=1e-5)
    for name, tensor in memory(out).state_dict().items():
        torch.testing.assert_close(tensor, memory(tmp_path / "alone").state_dict()[name], msg=name)
    parts = sorted(name.split("-")[1] for name in found)
    # Epochs 0 to 4 were finished by 1, 2, 4, 1 and 1 ranks, and each rank wrote its own rows.
    assert parts == [f"{e:06d}" for e, ranks in enumerate((1, 2, 4, 1, 1)) for _ in range(ranks)]
