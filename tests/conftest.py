"""The order of tests, and how they share two processes; a pretend GPU, and work on several ranks.

torch is imported where tests run: the process that only hands them out has no use for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
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
    if not config.pluginmanager.hasplugin("xdist"):
        config.addinivalue_line("markers", "xdist_group: of pytest-xdist, which is not installed")


PROCESSES = {"run_ranks", "runs", "torchrun"}
"""Fixtures that start processes."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that start processes are slow. Where tests run side by side, those of a file stay together, since they
    share what is expensive to make: the quick ones, and the slow ones."""
    if isinstance(item, pytest.Function) and PROCESSES.intersection(item.fixturenames):
        item.add_marker("slow")
    group = f"{item.path.parent.name}/{item.path.stem}, {'slow' if _is_slow(item) else 'quick'}"
    if not _is_full_size(item):  # these share nothing
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests go first, and the full-size steps, of gigabytes, last."""
    items.sort(key=lambda item: (_is_slow(item), _is_full_size(item)))


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _is_full_size(item: pytest.Item) -> bool:
    return item.path.name == "test_full_size.py"


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
        assert work.wait(200) == 0, work.said
        return [
            [torch.load(folder / f"{stage}-{rank}.pt", weights_only=False) for rank in range(world)]
            for stage, world in enumerate(worlds)
        ]

    return run
