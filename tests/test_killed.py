"""Commands that are killed while they write."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from helpers import forked

from adasim.cli.main import main
from adasim.util.files import TEMPORARY

pytestmark = pytest.mark.slow

WRITERS = {
    "eval": (["eval", "knn", "run", "--no-cache", "--results", "results.jsonl"], "results.jsonl"),
    "embed": (["embed", "run", "--data", "synthetic:48", "--out", "features.npz"], "features.npz"),
    "export": (["export", "run", "--to", "timm", "--out", "exported"], "exported"),
    "explore": (["explore", "run", "--out", "page.html"], "page.html"),
}


@pytest.mark.parametrize("command", WRITERS)
def test_killed_while_it_writes_a_command_leaves_nothing_half_written_and_can_be_said_again(
    command: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, "run")
    arguments, result = WRITERS[command]
    for number in (signal.SIGKILL, signal.SIGTERM):

        def work(number: int = number) -> None:
            os.fsync = lambda fd: os.kill(os.getpid(), number)
            main(arguments)

        code, said = forked(work)
        assert code == -number, said
        there = {path.name for path in tmp_path.iterdir() if not path.name.endswith(TEMPORARY)} - {"run"}
        if command == "eval":  # lines are added to a file: whole ones
            assert all(json.loads(line) for line in Path(result).read_text().splitlines())
        else:
            assert not there
    main(arguments)
    assert Path(result).exists()
