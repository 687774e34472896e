"""Every option of every command with values that make no sense: each ends at once, in a sentence and exit code 2."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import tyro
from helpers import refusal

from adasim.cli.main import COMMANDS
from adasim.cli.options import option_types
from adasim.registry import EVALUATIONS, METHODS

VALUES: list[list[str]] = [
    *([], [""], ["x"], ["-1"], ["0"], ["1.5"], ["nan"], ["inf"], ["1e-320"], ["2147483648"], ["None"]),
    *(["9" * 30], ["x" * 5000], ["a\nb"], ["1", "2", "3", "4", "5"], ["/dev/zero"], ["fifo"]),
    ["\udcff"],  # a byte that is not UTF-8
]
PRETRAIN = [
    f"pretrain demo --method {method} --pairs {pairs} OPTION --data gone"
    for method, pairs in zip(METHODS.names(), ("adasim", "nearest", "standard"), strict=False)
]
TYPED = [
    *PRETRAIN,
    "pretrain photos OPTION --data gone",
    "plan OPTION --batch 0",
    "demo OPTION --out run",
    "apply gone --data gone --out new OPTION",
    "embed pixels --out x.npz OPTION --data gone",
    "similar pixels fifo OPTION --in gone",
    "export no/where --to timm OPTION",
    "explore --backbone pixels OPTION --data gone",
    "gallery --backbone pixels OPTION --data gone",
    "plot gone OPTION",
    "eval table gone OPTION",
    *(f"eval {name} pixels OPTION --data gone" for name in EVALUATIONS.names()),
]
"""Whatever is typed for OPTION, in the end something is not there: nothing is started."""


@pytest.mark.slow
@pytest.mark.parametrize("command", TYPED)
def test_no_option_takes_a_wrong_value_silently_or_with_a_traceback(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("run").mkdir()
    Path("run/config.json").write_text("{}")

    def options_of(command: str) -> dict[str, Any]:
        """By the class that tyro is to fill in."""
        kinds: list[Any] = []
        real = tyro.cli

        def noted(kind: Any, **more: Any) -> Any:
            kinds.append(kind)
            return real(kind, **more)

        with monkeypatch.context() as patch:
            patch.setattr(tyro, "cli", noted)
            refusal(command.replace("OPTION", ""), capsys)
        return option_types(kinds[0])

    draw = random.Random(command)
    takes = options_of(command)
    # The settings of a run are many, and slow to read: all with one method, and what others have of their own.
    first = command == PRETRAIN[0]
    known = options_of(PRETRAIN[0]) if command.startswith("pretrain") and not first else {}
    turns: dict[str, Iterator[list[str]]] = {}  # options of one type share the values among them
    for option in sorted(takes.keys() - known.keys()):
        values = turns.setdefault(str(takes[option]), cycle(draw.sample(VALUES, len(VALUES))))
        for given in islice(values, 1 if first else 3):
            before, _, after = command.partition("OPTION")
            began = time.monotonic()
            refusal([*before.split(), option, *given, *after.split()], capsys)
            assert time.monotonic() - began < 20, (option, given)
    assert sorted(os.listdir()) == ["fifo", "run"]


def test_every_command_is_tried() -> None:
    assert {command.split()[0] for command in TYPED} == set(COMMANDS)
