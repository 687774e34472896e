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
from helpers import refusal

from adasim.cli.apply import ApplyArguments
from adasim.cli.demo import DemoArguments
from adasim.cli.embed import EmbedArguments
from adasim.cli.evaluate import Encoder, TableArguments
from adasim.cli.explore import ExploreArguments
from adasim.cli.export import ExportArguments
from adasim.cli.gallery import GalleryArguments
from adasim.cli.options import option_types
from adasim.cli.plot import PlotArguments
from adasim.cli.pretrain import PhotosArguments, PretrainArguments, with_settings
from adasim.cli.similar import SimilarArguments
from adasim.config import Config
from adasim.options import PlanArguments, with_options
from adasim.registry import EVALUATIONS, METHODS

VALUES: list[list[str]] = [
    *([], [""], ["x"], ["-1"], ["0"], ["1.5"], ["nan"], ["inf"], ["1e-320"], ["2147483648"], ["None"]),
    *(["9" * 30], ["x" * 5000], ["a\nb"], ["1", "2", "3", "4", "5"], ["/dev/zero"], ["fifo"]),
    ["\udcff"],  # a byte that is not UTF-8
]
PRETRAIN = {
    f"pretrain demo --method {method} --pairs {pairs} OPTION --data gone": with_settings(
        PretrainArguments, Config(method=method, pairs=pairs)
    )
    for method, pairs in zip(METHODS.names(), ("adasim", "nearest", "standard"), strict=False)
}
OTHERS: dict[str, Any] = {
    "pretrain photos OPTION --data gone": PhotosArguments,
    "plan OPTION --batch 0": PlanArguments,
    "demo OPTION --out run": DemoArguments,
    "apply gone --data gone --out new OPTION": ApplyArguments,
    "embed pixels --out x.npz OPTION --data gone": EmbedArguments,
    "similar pixels fifo OPTION --in gone": SimilarArguments,
    "export no/where --to timm OPTION": ExportArguments,
    "explore --backbone pixels OPTION --data gone": ExploreArguments,
    "gallery --backbone pixels OPTION --data gone": GalleryArguments,
    "plot gone OPTION": PlotArguments,
    "eval table gone OPTION": TableArguments,
    **{
        f"eval {name} pixels OPTION --data gone": with_options(EVALUATIONS.outline(name), Encoder)
        for name in EVALUATIONS.names()
    },
}
"""Whatever is typed for OPTION, in the end something is not there: nothing is started."""


@pytest.mark.slow
@pytest.mark.parametrize("command", [*PRETRAIN, *OTHERS])
def test_no_option_takes_a_wrong_value_silently_or_with_a_traceback(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("run").mkdir()
    Path("run/config.json").write_text("{}")
    draw = random.Random(command)
    # The settings of a run are many, and slow to read: all with one method, and what others have of their own.
    kinds, first = {**PRETRAIN, **OTHERS}, next(iter(PRETRAIN))
    known = option_types(kinds[first]) if command != first and command.startswith("pretrain") else {}
    takes = option_types(kinds[command])
    turns: dict[str, Iterator[list[str]]] = {}  # options of one type share the values among them
    for option in sorted(takes.keys() - known.keys()):
        values = turns.setdefault(str(takes[option]), cycle(draw.sample(VALUES, len(VALUES))))
        for given in islice(values, 1 if command == first else 3):
            before, _, after = command.partition("OPTION")
            began = time.monotonic()
            refusal([*before.split(), option, *given, *after.split()], capsys)
            assert time.monotonic() - began < 20, (option, given)
    assert sorted(os.listdir()) == ["fifo", "run"]
