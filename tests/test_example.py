"""The example in the README runs as it stands, and bootstraps once its window is full."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_loop.py"


def test_own_loop_is_short_and_bootstraps(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    ratios = [int(line.split()[-1].rstrip("%")) for line in capsys.readouterr().out.splitlines()]
    assert ratios[:2] == [0, 0]
    assert ratios[-1] > 0
