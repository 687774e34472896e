"""A run killed anywhere and resumed ends with the very bits of one that was never stopped."""

import functools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrainings import MANIFEST, STEP, WRITE, Run, Runs, at, digest, metrics, small

import adasim
from adasim.config import Config
from adasim.options import NearestSettings
from adasim.runs.metrics import TIMES
from adasim.train.state import build_state
from adasim.util.files import TEMPORARY

pytestmark = pytest.mark.slow

END_EPOCH = "adasim.train.state:TrainState.end_epoch"
SAVE = "adasim.runs.checkpoint:CheckpointStore.save"
HISTORY = "adasim.runs.checkpoint:CheckpointStore.write_history"
RETAIN = "adasim.runs.checkpoint:CheckpointStore._retain"
EXPORT = "adasim.train.loop:save_backbone"
RENAME = "os:rename"

Kill = tuple[str, int, str]
"""SIGKILL before or after a function is called for the n-th time in its process."""


@dataclass
class Chain:
    """A run killed once by each of `kills`, resumed each time, with its i-th process on `workers[i]`."""

    changes: dict[str, Any]
    kills: list[Kill]
    often: bool = False
    workers: list[int] = field(default_factory=lambda: [0])

    def processes(self, runs: Runs, config: Config, out: Path) -> Iterator[tuple[Run, int]]:
        """Each process, and the exit code it must have."""
        if self.often:  # a checkpoint after every step, not only at the end of each epoch
            config.save.every_minutes = 0.0
        for i, kill in enumerate([*self.kills, None]):
            config.data.workers = self.workers[i % len(self.workers)]
            hooks = [] if kill is None else [at(kill[0], kill[1], "kill", when=kill[2])]
            run = runs.start(config, out, resume=i > 0, hooks=hooks)
            yield run, (0 if kill is None else -signal.SIGKILL)


class Trial:
    """Runs chains, and compares them with runs that nothing happened to."""

    def __init__(self, runs: Runs, folders: pytest.TempPathFactory) -> None:
        self.runs, self.folders = runs, folders
        self.digest = functools.cache(digest)
        self.undisturbed: dict[str, Path] = {}

    def uninterrupted(self, changes: dict[str, Any]) -> Path:
        """The folder of a run of `small(**changes)` that nothing happened to; each is made once."""
        name = repr(sorted(changes.items()))
        if name not in self.undisturbed:
            [self.undisturbed[name]] = self.run(Chain(changes, kills=[]))
        return self.undisturbed[name]

    def run(self, *chains: Chain) -> list[Path]:
        """Go through all chains to their ends, side by side; returns their folders."""
        outs = [self.folders.mktemp("chain") / "run" for _ in chains]
        active = [
            chain.processes(self.runs, small(**chain.changes), out)
            for chain, out in zip(chains, outs, strict=True)
        ]
        while active:
            started = [(chain, next(chain, None)) for chain in active]
            active = [chain for chain, process in started if process is not None]
            for _, process in started:
                if process is not None:
                    run, code = process
                    assert run.wait() == code, run.said
        return outs

    def survives(self, *chains: Chain) -> list[Path]:
        """They end as if nothing had happened to them."""
        outs = self.run(*chains)
        for chain, out in zip(chains, outs, strict=True):
            self.assert_same(out, chain.changes)
        return outs

    def assert_same(self, out: Path, changes: dict[str, Any]) -> None:
        """Same state, same metrics, same encoder, nothing left lying about."""
        reference = self.uninterrupted(changes)
        assert self.digest(out) == self.digest(reference)
        assert without_times(metrics(out)) == without_times(metrics(reference))
        ours, theirs = ((run / "backbone.safetensors").read_bytes() for run in (out, reference))
        assert ours == theirs
        assert snapshots(out) == snapshots(reference)
        assert not list(out.rglob(f"*{TEMPORARY}"))
        assert len(list((out / "history").iterdir())) <= 3  # of two checkpoints with a window of one or two


def snapshots(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (out / "encoders").glob("*")}


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """No two runs take the same time."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


@pytest.fixture(scope="module")
def trial(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return Trial(runs, tmp_path_factory)


RESNET = {"model__name": "resnet_tiny"}
VARIANTS: dict[str, dict[str, Any]] = {
    "in memory": {"save__encoder_every": 1},
    "partners drawn in the current epoch": {"neighbors__timing": "current"},
    "latent neighbours": {"pairs": "nearest", "pair_settings": NearestSettings(space="latent")},
    "nnclr, resnet": {"method": "nnclr", **RESNET},
    "dino, resnet": RESNET,
    "simsiam, resnet, sgd": {"method": "simsiam", "optim__name": "sgd", **RESNET},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_at_the_first_step_in_mid_epoch_and_again_after_a_resume(trial: Trial, variant: str) -> None:
    """With a checkpoint after every step, and for both timings with checkpoints at the ends of epochs alone, too."""
    changes, kills = VARIANTS[variant], [(STEP, 5, "after"), (STEP, 2, "after")]
    if variant in ("in memory", "partners drawn in the current epoch"):
        kills = [(STEP, 1, "after"), *kills]
        trial.survives(Chain(changes, kills, often=True), Chain(changes, kills))
    else:
        trial.survives(Chain(changes, kills, often=True))


@pytest.mark.parametrize("timing", ["previous", "current"])
def test_any_number_of_workers_before_and_after_a_kill(trial: Trial, timing: str) -> None:
    changes = {"views__in_memory": False, "neighbors__timing": timing}
    kills = [(STEP, 2, "after"), (STEP, 3, "after"), (STEP, 1, "after")]
    trial.survives(Chain(changes, kills, often=True, workers=[0, 2, 1]))


def test_killed_around_the_end_of_an_epoch(trial: Trial) -> None:
    """Every epoch enters the history once, wherever between its last step and its checkpoint the kill falls."""
    kills = [
        (END_EPOCH, 1, "before"),  # the first epoch, which no checkpoint precedes
        (HISTORY, 1, "after"),
        (SAVE, 1, "after"),
        (END_EPOCH, 2, "after"),  # the second epoch is saved, the third is not
        (HISTORY, 1, "before"),
        (HISTORY, 1, "after"),
        (SAVE, 1, "before"),
        (EXPORT, 2, "after"),  # the last epoch
        (SAVE, 1, "before"),
        (SAVE, 1, "after"),
    ]
    previous, _ = trial.survives(
        Chain({"neighbors__window": 2, "save__encoder_every": 2}, kills),
        Chain({"neighbors__timing": "current"}, kills[::3]),
    )
    assert [*snapshots(previous)] == ["epoch-0002.safetensors", "epoch-0004.safetensors"]
    adasim.load_backbone(previous)


def test_killed_inside_a_save(trial: Trial) -> None:
    kills = [
        (WRITE, 1, "before"),
        (WRITE, 1, "after"),  # one file of several
        (WRITE, 6, "after"),
        (MANIFEST, 1, "before"),
        (MANIFEST, 1, "after"),
        (RENAME, 1, "before"),  # all is there but for its name
        (RENAME, 1, "after"),
        (RETAIN, 2, "before"),  # the old checkpoint is still there beside the new one
        (RENAME, 4, "after"),  # an old checkpoint is about to be deleted
        (EXPORT, 1, "before"),
    ]
    trial.survives(Chain({}, kills, often=True), Chain({}, kills[1:6:2]))


def test_killed_by_the_clock(trial: Trial, tmp_path: Path) -> None:
    """At moments nobody chose, with loader processes, until it gets through."""
    out, killed = tmp_path / "run", 0
    for workers in (2, 0, 1, 2):
        config = small(views__in_memory=False, data__workers=workers, save__every_minutes=0.0)
        run = trial.runs.start(config, out, resume=(out / "config.json").exists())
        time.sleep(random.SystemRandom().uniform(0.05, 1.0))
        os.kill(run.pid, signal.SIGKILL)
        killed += run.wait() == -signal.SIGKILL
    config = small(views__in_memory=False, data__workers=2)
    last = trial.runs.start(config, out, resume=(out / "config.json").exists(), tidies_up=True)
    assert last.wait() == 0, last.said
    assert killed
    trial.assert_same(out, {"views__in_memory": False, "neighbors__timing": "previous"})


def test_the_digest_sees_every_part_of_the_state() -> None:
    changes: list[Callable[[Any], Any]] = [
        lambda s: None,
        lambda s: s.method.student.backbone.net.cls_token.data.add_(1e-6),
        lambda s: s.method.teacher.head.last_layer.weight_v.data.add_(1e-6),
        lambda s: s.method.center.add_(1e-6),
        lambda s: s.memory.cache[7].add_(1e-6),
        lambda s: s.memory.history_ids[47, 0].fill_(3),
        lambda s: s.memory.current_similarities[0].fill_(0.5),
        lambda s: setattr(s.memory, "epochs", 1),
        lambda s: setattr(s, "step", 1),
        lambda s: setattr(s, "step_in_epoch", 1),
        lambda s: setattr(s, "partners_changed", 1),
        lambda s: s.optimizer.state[s.optimizer.param_groups[0]["params"][0]].update(exp_avg=torch.ones(1)),
    ]

    def digest(change: Callable[[Any], Any]) -> str:
        state = build_state(small(), 48)
        change(state)
        return state.digest()

    assert digest(changes[0]) == digest(changes[0])
    assert len(set(map(digest, changes))) == len(changes)
