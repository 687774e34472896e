"""Small whole runs, and a way to have them in processes that can be killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from helpers import free_port

from adasim.api import pretrain
from adasim.config import (
    Config,
    DataConfig,
    ModelConfig,
    NeighborsConfig,
    OptimConfig,
    SaveConfig,
    ViewsConfig,
)
from adasim.data import open_images
from adasim.methods import DinoSettings, NnclrSettings, SimSiam, SimSiamSettings
from adasim.recipes import get_recipe
from adasim.runs.checkpoint import Checkpoint, CheckpointStore
from adasim.runs.folder import flatten
from adasim.train.state import TrainState, build_state
from adasim.util.files import TEMPORARY

Small = Callable[..., Config]
Metrics = Callable[[Path], list[dict[str, Any]]]
Torchrun = Callable[..., list[tuple[int, str]]]

STEP = "adasim.train.state:TrainState.count"
WRITE = "adasim.runs.checkpoint:_write"
MANIFEST = "adasim.runs.checkpoint:atomic_write"

FIXED = {
    *(f"views.{name}" for name in ("interpolation", "jitter", "blur_p", "solarize_p", "local_size")),
    *("recipe", "model.drop_path", "optim.min_lr", "save.keep"),
}
"""What no option sets: `--method` or the recipe brings it."""
SHORT = {"data.source": "data", "data.exclude": "exclude", "data.verify": "verify_data", "save.log": "log"}
"""Options that are called otherwise than their field."""
ENOUGH_S = 240  # far more than any run here takes, also on a machine that others use; a test has 300


def small(**changes: Any) -> Config:
    """DINO with a ViT and stochastic depth on 48 images of 16 pixels: 4 epochs of 3 steps, window 1.

    `small(pairs="nearest", neighbors__k=5)` changes fields. Views are mild, so that an untrained encoder
    recognises many images and has partners to draw.
    """
    config = Config(
        method="dino",
        epochs=4,
        batch_size=16,
        seed=5,
        data=DataConfig(source="synthetic:48", workers=0),
        views=ViewsConfig(size=16, scale=(0.8, 1.0), color=0.0, blur=0.0, local_size=8),
        model=ModelConfig(name="vit_mini", patch_size=8, drop_path=0.1),
        settings=DinoSettings(out_dim=24, hidden_dim=32, bottleneck_dim=16, teacher_temp_warmup_epochs=2),
        neighbors=NeighborsConfig(window=1, k=3, tau=0.2),
        optim=OptimConfig(lr=0.02, min_lr=1e-4, warmup_epochs=1),
        save=SaveConfig(log_every=1, keep=2, every_epochs=1),
    )
    if changes.get("method") == "simsiam":
        config.settings = SimSiamSettings(proj_dim=32, pred_dim=16)
        config.views = replace(config.views, **SimSiam.VIEWS)
    if changes.get("method") == "nnclr":
        config.settings = NnclrSettings(proj_dim=32, pred_dim=16, queue_size=40)
    for name, value in changes.items():
        *parents, field = name.split("__")
        owner: Any = config
        for parent in parents:
            owner = getattr(owner, parent)
        if not hasattr(owner, field):
            raise AttributeError(name)
        setattr(owner, field, value)
    return config


def arguments(config: Config, out: Path) -> list[str]:
    """What to type after `adasim` for this configuration."""
    recipe = flatten(get_recipe("desk-vit").to_dict())
    words = ["pretrain", "desk-vit", "--out", str(out), "--no-curves", "--no-compare"]
    for name, value in flatten(config.to_dict()).items():
        if name in FIXED or value == recipe.get(name):
            continue
        *parents, field = SHORT.get(name, name).replace("_", "-").split(".")
        if isinstance(value, bool):
            words.append("--" + ".".join([*parents, field if value else f"no-{field}"]))
        else:
            values = value if isinstance(value, tuple) else (value,)
            words += ["--" + ".".join([*parents, field]), *map(str, values)]
    return words


def newest(out: Path, warn: Callable[[str], None] = print) -> Checkpoint:
    """A run's newest checkpoint that can be used."""
    checkpoint = CheckpointStore(out, keep=9, warn=warn).load_latest()
    assert checkpoint is not None
    return checkpoint


def loaded(out: Path) -> TrainState:
    """A run's newest checkpoint, loaded into a fresh state."""
    config = Config.from_dict(json.loads((out / "config.json").read_text()))
    images = open_images(config.data.source, size=config.views.size)
    state = build_state(config, len(images))
    state.load(newest(out))
    return state


def digest(out: Path) -> str:
    return loaded(out).digest()


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def at(call: str, number: int, do: str, *, when: str = "after", rank: int | None = None) -> dict[str, Any]:
    """A hook for driver.py: do it at the `number`-th call, on all ranks or on one."""
    return {"call": call, "number": number, "when": when, "do": do, "rank": rank}


def kill_at(step: int) -> list[dict[str, Any]]:
    return [at(STEP, step, "kill")]


def saved_steps(out: Path) -> list[int]:
    """Steps of the checkpoints, the newest last."""
    paths = (out / "checkpoints").iterdir()
    return sorted(int(path.name[5:14]) for path in paths if not path.name.endswith(TEMPORARY))


@dataclass
class Run:
    """A pretraining in another process."""

    pid: int
    out: Path
    log: Path
    ask: Callable[[dict[str, Any]], Any]

    def wait(self, seconds: float = ENOUGH_S) -> int:
        """Its exit code, or minus the signal that ended it."""
        code = self.ask({"wait": self.pid, "seconds": seconds})
        if code is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.ask({"wait": self.pid, "seconds": ENOUGH_S})
            pytest.fail(f"still running after {seconds} s, having said:\n{self.said}")
        return int(code)

    def ended(self, code: int = 0) -> Run:
        """It has ended with this code."""
        assert self.wait() == code, self.said
        return self

    @property
    def said(self) -> str:
        return self.log.read_text()


@dataclass
class Ranks:
    """A pretraining in several processes."""

    runs: list[Run]
    records: list[Path]

    def wait(self, seconds: float = ENOUGH_S) -> list[int]:
        """The exit code of each, or minus the signal that ended it."""
        return [run.wait(seconds) for run in self.runs]

    def ended(self, *codes: int) -> Ranks:
        """They have ended with these codes, by default all with 0."""
        assert self.wait() == (list(codes) or [0] * len(self.runs)), self.said
        return self

    @property
    def said(self) -> list[str]:
        return [run.said for run in self.runs]

    @property
    def recorded(self) -> list[list[dict[str, Any]]]:
        """What each did, line by line; see `driver.Recorder`."""
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in self.records]


Whole = Callable[[int], tuple[Path, Ranks]]


class Runs:
    """Starts pretrainings; see driver.py."""

    def __init__(self, driver: subprocess.Popen[str]) -> None:
        self._driver = driver
        self._logs = 0

    def start(
        self,
        config: Config,
        out: Path,
        *,
        resume: bool = False,
        hooks: Sequence[dict[str, Any]] = (),
        threads: int = 1,
        **more: Any,
    ) -> Run:
        self._logs += 1
        log = out.with_name(f"{out.name}-{self._logs}.log")
        log.touch()
        where = {"out": str(out), "resume": resume, "log": str(log)}
        run = {"config": config.to_dict(), **where, "hooks": list(hooks), "threads": threads, **more}
        return Run(self._ask({"start": run}), out, log, self._ask)

    def start_ranks(
        self,
        config: Config | Sequence[Config],
        out: Path,
        world: int,
        *,
        resume: bool = False,
        hooks: Sequence[dict[str, Any]] = (),
        restarts: Sequence[int] = (),
        **more: Any,
    ) -> Ranks:
        """The command `adasim pretrain` in `world` processes, with torchrun's variables, and perhaps each with
        a configuration of its own."""
        configs = [config] * world if isinstance(config, Config) else config
        extra = more.pop("env", {})
        port, runs, records = free_port(), [], []
        for rank, one in enumerate(configs):
            numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_PORT": port}
            env = {
                "MASTER_ADDR": "127.0.0.1",
                **{name: str(value) for name, value in numbers.items()},
                **extra,
            }
            if restarts:
                env["TORCHELASTIC_RESTART_COUNT"] = str(restarts[rank])
            records.append(out.with_name(f"{out.name}-{self._logs}.jsonl"))
            more |= {"env": env, "record": str(records[-1]), "command": True}
            runs.append(self.start(one, out, resume=resume, hooks=hooks, **more))
        return Ranks(runs, records)

    def start_work(self, arguments: list[str], out: Path, env: dict[str, str]) -> Run:
        """What gloo_ranks.py does with these arguments, forked from a process that has imported everything."""
        log = out.with_name(f"{out.name}.log")
        log.touch()
        return self._call(
            [str(Path(__file__).with_name("gloo_ranks.py")), "main", *arguments], Path(), log, env
        )

    def call(self, file: str, function: str, argument: str, folder: Path) -> tuple[int, str]:
        """Exit code and output of a process that calls FUNCTION(argument) of this file in this folder.

        It has never heard of the tests before: torch's backward passes, for one, fail in a process that was forked
        after some other backward pass had started threads.
        """
        with tempfile.NamedTemporaryFile() as log:
            run = self._call([file, function, argument], folder, Path(log.name), {})
            return run.wait(), run.said

    def _call(self, words: list[str], folder: Path, log: Path, env: dict[str, str]) -> Run:
        request = {"call": words, "folder": str(folder), "env": env, "log": str(log)}
        return Run(self._ask(request), folder, log, self._ask)

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.write(json.dumps(request) + "\n")
        self._driver.stdin.flush()
        return json.loads(self._driver.stdout.readline())


@pytest.fixture(scope="session")
def runs() -> Iterator[Runs]:
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("driver.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as driver:
        yield Runs(driver)
        assert driver.stdin is not None
        driver.stdin.close()


@pytest.fixture(scope="session")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, Ranks]]:
    """The folder of a run of small(epochs=3) on that many ranks that nothing happens to; each is made once."""
    made: dict[int, tuple[Path, Ranks]] = {}

    def run(world: int) -> tuple[Path, Ranks]:
        if world not in made:
            out = tmp_path_factory.mktemp("whole") / f"{world}"
            made[world] = out, runs.start_ranks(small(epochs=3), out, world).ended()
        return made[world]

    return run


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest at the end of a run of small() that nothing happened to."""
    return digest(pretrain(small(), tmp_path_factory.mktemp("undisturbed") / "run"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of small(epochs=3), to be copied or left as it is."""
    return pretrain(small(epochs=3), tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of `finished`, to be changed."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., list[tuple[int, str]]]:
    """`torchrun([argument, ...], ...)`: exit code and output of commands that run side by side."""

    def run(*commands: list[str]) -> list[tuple[int, str]]:
        launcher = [sys.executable, "-m", "torch.distributed.run"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}  # torchrun sets it, but not for one process per node
        launched = [
            subprocess.Popen(
                [*launcher, *command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
            )
            for command in commands
        ]
        try:
            outputs = [one.communicate(timeout=ENOUGH_S)[0] for one in launched]
        finally:
            for one in launched:
                one.terminate()  # it ends its processes
                one.wait()
        return [(one.returncode, output) for one, output in zip(launched, outputs, strict=True)]

    return run


@pytest.fixture(name="small", scope="session")
def small_fixture() -> Small:
    """For those who do not import it; so is `metrics`."""
    return small


@pytest.fixture(name="metrics", scope="session")
def metrics_fixture() -> Metrics:
    return metrics
