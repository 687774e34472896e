"""The order of tests, and how they share two processes; a pretend GPU, and work on several ranks.

torch is imported where tests run: the process that only hands them out has no use for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from accelerator import Accelerator
    from pretrainings import Runs

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Small tensors run fastest, and most repeatably, on one thread, also in the processes that tests start."""


def pytest_configure(config: pytest.Config) -> None:
    hands_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not hands_out:
        import torch

        torch.set_num_threads(1)
        config.pluginmanager.import_plugin("pretrainings")


PROCESSES = {"run_ranks", "runs", "torchrun"}
"""Fixtures that start processes."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes are slow. Quick ones go first, and the full-size steps, of gigabytes, last."""
    for item in items:
        if isinstance(item, pytest.Function) and PROCESSES.intersection(item.fixturenames):
            item.add_marker("slow")

    def place(item: pytest.Item) -> tuple[bool, bool]:
        return item.get_closest_marker("slow") is not None, item.path.name == "test_full_size.py"

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """How pytest-xdist (`-n 2`) hands tests out: in the order above, and the quick tests of a file together, as well
    as the slow ones, since they share what is expensive to make."""
    from xdist.scheduler import LoadScopeScheduling

    class InBlocks(LoadScopeScheduling):
        blocks: dict[str, str] | None = None

        def _split_scope(self, nodeid: str) -> str:
            if self.blocks is None:
                self.blocks, groups = {}, groupby(self.collection or (), key=lambda one: one.split("::")[0])
                for number, (file, tests) in enumerate(groups):
                    self.blocks |= dict.fromkeys(tests, f"{number} {file}")
            return self.blocks[nodeid]

    config.option.loadscopereorder = False
    return InBlocks(config, log)


@pytest.fixture
def gpu() -> Iterator[Accelerator]:
    """A pretend GPU, see accelerator.py."""
    from accelerator import Accelerator

    with Accelerator() as gpu:
        yield gpu


@pytest.fixture(scope="session")
def run_ranks(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[Any]]]:
    """`run_ranks(__file__, "work", 1, 2, 4)`: what work(folder, stage) returned, by stage and rank.

    See gloo_ranks.py.
    """
    import torch

    def run(file: str, function: str, *worlds: int, **env: str) -> list[list[Any]]:
        folder = tmp_path_factory.mktemp(function)
        work = runs.start_work([file, function, str(folder), *map(str, worlds)], folder / "run", env)
        assert work.wait() == 0, work.said
        return [
            [torch.load(folder / f"{stage}-{rank}.pt", weights_only=False) for rank in range(world)]
            for stage, world in enumerate(worlds)
        ]

    return run
