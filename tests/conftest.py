"""Small tensors run fastest, and most repeatably, on one thread."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import Accelerator

torch.set_num_threads(1)

pytest_plugins = ["pretrainings"]


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


@pytest.fixture
def gpu() -> Iterator[Accelerator]:
    """A pretend GPU, see accelerator.py."""
    with Accelerator() as gpu:
        yield gpu


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[Any]]]:
    """`run_ranks(__file__, "work", 1, 2, 4)`: what work(folder, stage) returned, by stage and rank.

    See gloo_ranks.py.
    """

    def run(file: str, function: str, *worlds: int) -> list[list[Any]]:
        folder = tmp_path_factory.mktemp(function)
        script = Path(__file__).parent / "gloo_ranks.py"
        command = [sys.executable, str(script), file, function, str(folder), *map(str, worlds)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return [
            [torch.load(folder / f"{stage}-{rank}.pt", weights_only=False) for rank in range(world)]
            for stage, world in enumerate(worlds)
        ]

    return run
