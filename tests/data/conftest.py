from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from .pictures import save_image, smooth


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tests make many small tensors: threads that wait for each other would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """folder(count, side): a folder of PNG files img000.png, ... whose sizes differ a little."""

    def make(count: int, side: int = 80) -> Path:
        root = tmp_path / "photos"
        for i in range(count):
            save_image(smooth(1, side + i % 3, side + 8, seed=i)[0], root / f"img{i:03d}.png")
        return root

    return make
