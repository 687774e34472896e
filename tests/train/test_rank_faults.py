"""Faults that befall one process of several: all act together, nothing is lost, nothing hangs."""

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import photos_of_patterns
from pretrainings import (
    MANIFEST,
    STEP,
    WRITE,
    Ranks,
    Runs,
    Torchrun,
    Whole,
    at,
    digest,
    metrics,
    saved_steps,
    small,
)

from adasim.config import Config
from adasim.data import open_images
from adasim.util.files import TEMPORARY
from adasim.util.seeding import permutation

pytestmark = pytest.mark.slow

LOSS = "adasim.methods.dino:Dino.loss"
KILLED = -signal.SIGKILL
Check = Callable[..., Any]


@pytest.fixture
def assert_undisturbed(whole: Whole) -> Check:
    """The same state, bit for bit, and the same losses as a run that nothing happened to."""

    def check(out: Path, world: int = 2) -> None:
        reference = whole(world)[0]
        assert digest(out) == digest(reference)
        losses = [[(x["step"], x["loss"]) for x in metrics(run) if "loss" in x] for run in (out, reference)]
        assert losses[0] == losses[1]

    return check


@pytest.fixture
def resumed_undisturbed(runs: Runs, assert_undisturbed: Check) -> Check:
    """Resume a run, to an end that is the same as if nothing had happened; returns what its first rank said."""

    def run(out: Path, world: int = 2) -> str:
        ranks = runs.start_ranks(small(epochs=3), out, world, resume=True).ended()
        assert not list(out.rglob(f"*{TEMPORARY}"))
        assert_undisturbed(out, world)
        return ranks.said[0]

    return run


# Kills


@pytest.mark.parametrize(("world", "victims"), [(2, [1]), (4, [0])])
def test_killed_in_mid_epoch_a_run_ends_with_the_bits_of_one_that_was_not(
    runs: Runs, resumed_undisturbed: Check, tmp_path: Path, world: int, victims: list[int]
) -> None:
    """With a checkpoint after every step, so that it goes on in mid-epoch. The others notice and end."""
    often = small(epochs=3, save__every_minutes=0.0)
    hooks = [at(STEP, 5, "kill", rank=rank) for rank in victims]
    ranks = runs.start_ranks(often, tmp_path / "run", world, hooks=hooks)
    assert ranks.wait() == [KILLED if rank in victims else 2 for rank in range(world)]
    for rank, said in enumerate(ranks.said):
        assert ("lost touch with another" in said) == (rank not in victims)
        assert "Traceback" not in said
    assert saved_steps(tmp_path / "run") == [3, 4]
    resumed_undisturbed(tmp_path / "run", world)


@pytest.mark.parametrize(
    "kill",
    [
        at(WRITE, 4, "kill", rank=1),  # after history, memory and history, its share of the second checkpoint
        at(MANIFEST, 2, "kill", rank=0, when="before"),
    ],
    ids=["rank 1", "rank 0"],
)
def test_killed_between_the_files_of_the_ranks_and_their_manifest(
    runs: Runs, resumed_undisturbed: Check, tmp_path: Path, kill: dict[str, Any]
) -> None:
    ranks = runs.start_ranks(small(epochs=3), tmp_path / "run", 2, hooks=[kill])
    codes = ranks.wait()
    assert sorted(codes) == [KILLED, 2]
    assert codes[kill["rank"]] == KILLED
    assert saved_steps(tmp_path / "run") == [3]
    if kill["rank"] == 0:  # else it is there to tidy up
        [unfinished] = (tmp_path / "run" / "checkpoints").glob(f"*{TEMPORARY}")
        written = {path.stem for path in unfinished.iterdir()}
        assert written == {"method", "optimizer", "recent", "memory-00000", "memory-00001"}
    resumed_undisturbed(tmp_path / "run")


def program(config: Config, out: Path, hook: dict[str, Any]) -> list[str]:
    """What torchrun is to start."""
    run = {"config": config.to_dict(), "out": str(out), "resume": False, "threads": 1, "hooks": [hook]}
    description = out.with_suffix(".json")
    description.write_text(json.dumps({**run, "command": True}))
    return [str(Path(__file__).parent.parent / "driver.py"), str(description)]


def test_torchrun_restarts_a_run_of_which_one_rank_was_killed(
    runs: Runs, assert_undisturbed: Check, tmp_path: Path
) -> None:
    """Processes that start again find neither the old ones' addresses nor, in the folder, a foreign run."""
    config, hooks = small(epochs=3, save__every_minutes=0.0), [at(STEP, 5, "kill", rank=1)]
    said = runs.start(config, tmp_path / "run", hooks=hooks, launch=[2, 1], command=True).ended().said
    assert said.count("step 1/9") == 1
    assert said.count("step 5/9") == 2  # the first one after the restart: step 4 was saved
    assert_undisturbed(tmp_path / "run")


def test_ranks_whose_torchrun_was_killed_stop_with_a_checkpoint(torchrun: Torchrun, tmp_path: Path) -> None:
    """They would train on to the end, and nobody could stop them."""
    out = tmp_path / "run"
    words = program(small(epochs=100, save__every_epochs=0), out, at(STEP, 4, "kill the parent", rank=1))
    [(code, said)] = torchrun(["--standalone", "--nproc-per-node=2", *words])
    assert code == KILLED
    assert said.count("torchrun, which started this run, is gone.") == 1
    [step] = saved_steps(out)
    assert 4 <= step < 300
    assert f"Stopped after step {step}. Continue with: adasim pretrain --resume {out}" in said


def test_a_signal_does_not_hide_that_another_rank_is_gone(runs: Runs, tmp_path: Path) -> None:
    """torchrun sends one to the others, which may just be leaving for this very reason."""
    hooks = [at(STEP, 5, "kill", rank=1), at("adasim.data:PairLoader.close", 1, "terminate", rank=0)]
    ranks = runs.start_ranks(small(epochs=3), tmp_path / "run", 2, hooks=hooks).ended(2, KILLED)
    assert "lost touch with another" in ranks.said[0]
    assert "Traceback" not in ranks.said[0]


def test_a_killed_loader_process_is_told_by_its_own_rank(runs: Runs, tmp_path: Path) -> None:
    config = small(epochs=3, views__in_memory=False, data__workers=1)
    hooks = [at(STEP, 4, "kill a worker", rank=1)]
    ranks = runs.start_ranks(config, tmp_path / "run", 2, hooks=hooks).ended(2, 1)
    assert re.fullmatch(r"adasim: A loader process ended .*SIGKILL.*\n", ranks.said[1])
    assert "lost touch with another" in ranks.said[0]
    assert not any("Traceback" in said for said in ranks.said)


def test_ranks_that_were_restarted_go_on_even_if_one_node_has_not_counted_it(
    runs: Runs, assert_undisturbed: Check, tmp_path: Path
) -> None:
    """torchrun counts a restart on the node where a rank died, and on others only if they noticed first."""
    out, config = tmp_path / "run", small(epochs=3)
    runs.start_ranks(config, out, 2, hooks=[at(STEP, 4, "kill", rank=1)]).ended(2, KILLED)
    refused(runs.start_ranks(config, out, 2, restarts=[0, 0]), "already holds another run")
    assert runs.start_ranks(config, out, 2, restarts=[0, 1]).wait() == [0, 0]
    assert_undisturbed(out)


# Signals


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_within_a_step(
    runs: Runs, resumed_undisturbed: Check, tmp_path: Path, rank: int
) -> None:
    hooks = [at(STEP, 4, "terminate", rank=rank)]
    ranks = runs.start_ranks(small(epochs=3), tmp_path / "run", 2, hooks=hooks).ended(143, 143)
    assert saved_steps(tmp_path / "run") == [3, 5]
    assert "Stopped after step 5. Continue with: adasim pretrain --resume" in ranks.said[0]
    assert ranks.said[1] == ""
    resumed_undisturbed(tmp_path / "run")


def test_a_signal_to_all_ranks_and_their_loader_processes_saves_within_a_step(
    runs: Runs, tmp_path: Path
) -> None:
    """As a terminal or a cluster's manager sends it."""
    config = small(epochs=2, views__in_memory=False, data__workers=1)
    hooks = [at(STEP, 4, "terminate the group", rank=rank) for rank in (0, 1)]
    stopped = runs.start_ranks(config, tmp_path / "run", 2, hooks=hooks)
    assert set(stopped.wait()) <= {0, 128 + signal.SIGTERM}, stopped.said
    assert saved_steps(tmp_path / "run") in ([3, 4], [3, 5])
    for out, resume in ((tmp_path / "run", True), (tmp_path / "whole", False)):
        runs.start_ranks(config, out, 2, resume=resume).ended()
    assert digest(tmp_path / "run") == digest(tmp_path / "whole")


# Before the first step


def refused(ranks: Ranks, sentence: str) -> None:
    """All leave with code 2, and the first says why, once."""
    assert set(ranks.wait()) == {2}, ranks.said
    assert re.search(sentence, ranks.said[0]), ranks.said[0]
    assert ranks.said[0].count("adasim: ") == 1
    assert not any(ranks.said[1:])


def test_a_batch_that_ranks_cannot_share_is_refused_before_a_folder_is_made(
    runs: Runs, tmp_path: Path
) -> None:
    ranks = runs.start_ranks(small(batch_size=18), tmp_path / "run", 4)
    refused(ranks, r"batch_size=18 cannot be divided by 4 processes\. Use --batch-size 16 or 20")
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_data_or_other_settings_are_refused(runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "run"
    data = [small(), small(data__source="synthetic:64")]
    refused(runs.start_ranks(data, out, 2), "number of images is 48 in process 0 and 64 in process 1")
    settings = [small(), small(neighbors__k=4)]
    refused(runs.start_ranks(settings, out, 2), r"neighbors\.k is 3 in process 0 and 4 in process 1")
    assert not out.exists()


def test_one_rank_lists_the_folder_and_the_others_look_for_some_of_it(
    runs: Runs, photos: list[Path], tmp_path: Path
) -> None:
    """Each machine may have the images at a place of its own."""
    root, out = photos[0].parent, tmp_path / "run"
    shutil.copytree(root, tmp_path / "copy")
    configs = [small(data__source=str(place), epochs=2) for place in (root, tmp_path / "copy")]
    only_the_first = [at("adasim.data.image_folder:scan", 1, "kill", rank=1)]
    ranks = runs.start_ranks(configs, out, 2, hooks=only_the_first).ended()
    copies = sorted((tmp_path / "copy").iterdir())
    copies[7].write_bytes(copies[8].read_bytes())
    ranks = runs.start_ranks(configs, tmp_path / "other", 2)
    refused(ranks, "fingerprint of the images is .* in process 0 and .* in process 1")
    for path in copies[40:]:
        path.unlink()
    missing = rf"On \S+, for process 1 of 2: 8 of 48 images .* missing \({re.escape(str(copies[40]))}\)"
    refused(runs.start_ranks(configs, tmp_path / "other", 2), missing)
    shutil.rmtree(tmp_path / "copy")
    ranks = runs.start_ranks(configs, tmp_path / "other", 2)
    refused(ranks, r"On \S+, for process 1 of 2: No such folder: .*copy")
    assert not (tmp_path / "other").exists()


# Files


def test_without_the_share_of_one_rank_the_checkpoint_before_is_taken(
    whole: Whole, resumed_undisturbed: Check, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(whole(2)[0], tmp_path / "run"))
    newest = max((out / "checkpoints").iterdir())
    assert sorted(path.stem for path in newest.glob("memory-*")) == ["memory-00000", "memory-00001"]
    (newest / "memory-00001.safetensors").unlink()
    said = resumed_undisturbed(out)
    assert "Checkpoint step-000000009 is not usable: memory-00001.safetensors is missing." in said
    assert "Going back to step-000000006." in said
    assert "step 9/9" in said


def test_a_disk_that_is_full_for_one_rank_stops_no_training(
    runs: Runs, assert_undisturbed: Check, tmp_path: Path
) -> None:
    """In that rank's share of the second checkpoint; the next save holds all."""
    hooks = [at(WRITE, 4, "find the disk full", rank=1, when="before")]
    out = tmp_path / "run"
    ranks = runs.start_ranks(small(epochs=3), out, 2, hooks=hooks).ended()
    assert re.search(r"Step 6 is not saved yet: Could not write .*No space left", ranks.said[0], re.S)
    assert ranks.said[1] == ""
    assert saved_steps(out) == [3, 9]
    assert not list(out.rglob(f"*{TEMPORARY}"))
    assert_undisturbed(out)


# Images and losses


def test_a_loss_that_is_not_a_number_on_one_rank_stops_all_before_they_learn(
    runs: Runs, resumed_undisturbed: Check, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    hooks = [at(LOSS, 5, "make the loss NaN", rank=1)]
    ranks = runs.start_ranks(small(epochs=3), out, 2, hooks=hooks, digests=True)
    order = permutation(5, "order", 1, 48)[16:32]  # of the second step of the second epoch
    images = open_images("synthetic:48", size=16)
    names = ", ".join(images.where(int(i)) for i in order[8:13])  # rank 1 has the second half
    refused(ranks, rf"The loss is nan at step 4 \(epoch 2\).* Its batch begins with {re.escape(names)}\.")
    for lines in ranks.recorded:
        *_, before, after = [line for line in lines if "digest" in line]
        assert (before["counted"], after["refused"]) == (4, 4)
        assert after["digest"] == before["digest"]
    assert saved_steps(out) == [3]
    resumed_undisturbed(out)


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    """48 images as files, in the order of their ids."""
    return photos_of_patterns(tmp_path / "photos", "{i:02d}.png")


def test_images_that_cannot_be_read_are_counted_over_all_ranks(
    runs: Runs, photos: list[Path], tmp_path: Path
) -> None:
    """Each rank meets no more of them than are allowed, and both together do."""
    config = small(data__source=str(photos[0].parent), views__in_memory=False, data__max_unreadable=0.05)
    order = permutation(config.seed, "order", 0, 48)
    first, second = order[:8].tolist(), order[8:16].tolist()
    for i in [*first[:2], *second[:2]]:  # 2 of 48 are allowed
        photos[i].write_bytes(b"")
    ranks = runs.start_ranks(config, tmp_path / "sum", 2)
    refused(ranks, r"4 of 48 images cannot be read, more than data\.max_unreadable=0\.05 allows")
    assert saved_steps(tmp_path / "sum") == []
