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
from pretrainings import MANIFEST, STEP, WRITE, Metrics, Run, Runs, Small

import adasim
from adasim.config import Config
from adasim.runs.metrics import TIMES
from adasim.settings import NearestSettings
from adasim.util.files import TEMPORARY

pytestmark = pytest.mark.slow

END_EPOCH = "adasim.train.state:TrainState.end_epoch"
SAVE = "adasim.runs.checkpoint:CheckpointStore.save"
HISTORY = "adasim.runs.checkpoint:CheckpointStore.write_history"
RETAIN = "adasim.runs.checkpoint:CheckpointStore._retain"
EXPORT = "adasim.train.loop:save_backbone"
RENAME = "os:rename"


@dataclass(frozen=True)
class Kill:
    """SIGKILL when a function is called for the `number`-th time in its process."""

    call: str
    number: int = 1
    when: str = "after"

    def hooks(self) -> list[dict[str, Any]]:
        return [{"call": self.call, "number": self.number, "when": self.when, "do": "kill"}]


@dataclass
class Chain:
    """A run killed once by each of `kills`, resumed each time, with its i-th process on `workers[i]`."""

    config: Config
    out: Path
    kills: list[Kill]
    workers: list[int] = field(default_factory=lambda: [0])

    def processes(self, runs: Runs) -> Iterator[tuple[Run, int]]:
        """Each process, and the exit code it must have."""
        for i, kill in enumerate([*self.kills, None]):
            self.config.data.workers = self.workers[i % len(self.workers)]
            hooks = [] if kill is None else kill.hooks()
            run = runs.start(self.config, self.out, resume=i > 0, hooks=hooks)
            yield run, (0 if kill is None else -signal.SIGKILL)


def survive(runs: Runs, *chains: Chain) -> None:
    """Go through all chains to their ends, side by side."""
    active = [chain.processes(runs) for chain in chains]
    while active:
        started = [(chain, next(chain, None)) for chain in active]
        active = [chain for chain, process in started if process is not None]
        for _, process in started:
            if process is not None:
                run, code = process
                assert run.wait() == code, run.said


@pytest.fixture(scope="module")
def uninterrupted(runs: Runs, small: Small, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run of `small(**changes)` that nothing happened to; each is made once."""
    made: dict[str, Path] = {}

    def run(**changes: Any) -> Path:
        name = repr(sorted(changes.items()))
        if name not in made:
            made[name] = tmp_path_factory.mktemp("uninterrupted") / "run"
            survive(runs, Chain(small(**changes), made[name], kills=[]))
        return made[name]

    return run


@pytest.fixture
def assert_same(digest: Callable[[Path], str], metrics: Metrics) -> Callable[[Path, Path], None]:
    """Same state, same metrics, same encoder, nothing left lying about."""

    once = functools.cache(digest)

    def check(out: Path, reference: Path) -> None:
        assert digest(out) == once(reference)
        assert without_times(metrics(out)) == without_times(metrics(reference))
        ours, theirs = ((run / "backbone.safetensors").read_bytes() for run in (out, reference))
        assert ours == theirs
        assert snapshots(out) == snapshots(reference)
        assert not list(out.rglob(f"*{TEMPORARY}"))
        assert len(list((out / "history").iterdir())) <= 3  # of two checkpoints with a window of one or two

    return check


def snapshots(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (out / "encoders").glob("*")}


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """No two runs take the same time."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


VARIANTS: dict[str, dict[str, Any]] = {
    "in memory": {"save__encoder_every": 1},
    "partners drawn in the current epoch": {"neighbors__timing": "current"},
    "nearest pairs": {"pairs": "nearest"},
    "latent neighbours": {"pairs": "nearest", "pair_settings": NearestSettings(space="latent")},
    "nnclr, resnet, confident pairs": {
        "method": "nnclr",
        "model__name": "resnet_tiny",
        "pairs": "confident",
    },
    "standard pairs": {"pairs": "standard"},
    "dino, resnet": {"model__name": "resnet_tiny"},
    "simsiam, resnet, sgd": {
        "method": "simsiam",
        "model__name": "resnet_tiny",
        "optim__name": "sgd",
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_at_the_first_step_in_mid_epoch_and_again_after_a_resume(
    runs: Runs,
    small: Small,
    uninterrupted: Callable[..., Path],
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
    variant: str,
) -> None:
    """Once with a checkpoint after every step, once with checkpoints at the ends of epochs alone."""
    changes = VARIANTS[variant]
    kills = [Kill(STEP, 1), Kill(STEP, 5), Kill(STEP, 2)]
    often = Chain(small(**changes, save__every_minutes=0.0), tmp_path / "often", kills)
    seldom = Chain(small(**changes), tmp_path / "seldom", kills)
    reference = uninterrupted(**changes)
    survive(runs, often, seldom)
    assert_same(often.out, reference)
    assert_same(seldom.out, reference)


@pytest.mark.parametrize("timing", ["previous", "current"])
def test_any_number_of_workers_before_and_after_a_kill(
    runs: Runs,
    small: Small,
    uninterrupted: Callable[..., Path],
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
    timing: str,
) -> None:
    changes = {"views__in_memory": False, "neighbors__timing": timing}
    often = {**changes, "save__every_minutes": 0.0}
    kills = [Kill(STEP, 2), Kill(STEP, 3), Kill(STEP, 1)]
    reference = uninterrupted(**changes)
    chains = [
        Chain(small(**often), tmp_path / f"{workers}", kills, workers) for workers in ([0, 2, 1], [1], [2])
    ]
    survive(runs, *chains[:2])
    survive(runs, chains[2])
    for chain in chains:
        assert_same(chain.out, reference)


def test_killed_around_the_end_of_an_epoch(
    runs: Runs,
    small: Small,
    uninterrupted: Callable[..., Path],
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
) -> None:
    """Every epoch enters the history once, wherever between its last step and its checkpoint the kill falls."""
    kills = [
        Kill(END_EPOCH, 1, "before"),  # the first epoch, which no checkpoint precedes
        Kill(HISTORY, 1, "after"),
        Kill(SAVE, 1, "after"),
        Kill(END_EPOCH, 2, "after"),  # the second epoch is saved, the third is not
        Kill(HISTORY, 1, "before"),
        Kill(HISTORY, 1, "after"),
        Kill(SAVE, 1, "before"),
        Kill(EXPORT, 2, "after"),  # the last epoch
        Kill(SAVE, 1, "before"),
        Kill(SAVE, 1, "after"),
    ]
    reference = uninterrupted(neighbors__window=2, save__encoder_every=2)
    assert [*snapshots(reference)] == ["epoch-0002.safetensors", "epoch-0004.safetensors"]
    late = uninterrupted(neighbors__timing="current")
    chain = Chain(small(neighbors__window=2, save__encoder_every=2), tmp_path / "previous", kills)
    current = Chain(small(neighbors__timing="current"), tmp_path / "current", kills)
    survive(runs, chain, current)
    assert_same(chain.out, reference)
    assert_same(current.out, late)
    adasim.load_backbone(chain.out)


def test_killed_inside_a_save(
    runs: Runs,
    small: Small,
    uninterrupted: Callable[..., Path],
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
) -> None:
    kills = [
        Kill(WRITE, 1, "before"),
        Kill(WRITE, 1, "after"),  # one file of several
        Kill(WRITE, 6, "after"),
        Kill(MANIFEST, 1, "before"),
        Kill(MANIFEST, 1, "after"),
        Kill(RENAME, 1, "before"),  # all is there but for its name
        Kill(RENAME, 1, "after"),
        Kill(RETAIN, 2, "before"),  # the old checkpoint is still there beside the new one
        Kill(RENAME, 4, "after"),  # an old checkpoint is about to be deleted
        Kill(EXPORT, 1, "before"),
    ]
    reference = uninterrupted()
    often = Chain(small(save__every_minutes=0.0), tmp_path / "often", kills)
    seldom = Chain(small(), tmp_path / "seldom", kills[:7])
    survive(runs, often, seldom)
    assert_same(often.out, reference)
    assert_same(seldom.out, reference)


def test_killed_by_the_clock(
    runs: Runs,
    small: Small,
    uninterrupted: Callable[..., Path],
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
) -> None:
    """At moments nobody chose, with loader processes, until it gets through."""
    moments = random.Random()
    out, killed = tmp_path / "run", 0
    reference = uninterrupted(views__in_memory=False)
    for workers in (2, 0, 1, 2):
        config = small(views__in_memory=False, data__workers=workers, save__every_minutes=0.0)
        run = runs.start(config, out, resume=(out / "config.json").exists())
        time.sleep(moments.uniform(0.05, 1.0))
        os.kill(run.pid, signal.SIGKILL)
        killed += run.wait() == -signal.SIGKILL
    survive_last = runs.start(small(views__in_memory=False), out, resume=(out / "config.json").exists())
    assert survive_last.wait() == 0, survive_last.said
    assert killed
    assert_same(out, reference)


def test_the_digest_sees_every_part_of_the_state(small: Small) -> None:
    from adasim.train.state import build_state

    def build() -> Any:
        return build_state(small(), 48)

    fresh = build().digest()
    assert build().digest() == fresh
    changes: list[Callable[[Any], Any]] = [
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
    digests = {fresh}
    for change in changes:
        state = build()
        change(state)
        digests.add(state.digest())
    assert len(digests) == len(changes) + 1
