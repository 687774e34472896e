"""Run folders without a training: settings, and numbers that a test can compute with."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pretrainings import Small

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, small: Small) -> Make:
    """A run folder of these settings with these numbers for each epoch of ten steps, as pretraining writes it."""

    def write(name: str, values: dict[str, Sequence[Any]], **changes: Any) -> Path:
        run = tmp_path / name
        run.mkdir()
        (run / "config.json").write_text(json.dumps(small(**changes).to_dict()))
        (run / "data.json").write_text("{}")
        count = max(map(len, values.values()), default=0)
        lines = [
            {"step": 10 * (e + 1), "epoch": e, **{k: v[e] for k, v in values.items() if e < len(v)}}
            for e in range(count)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run

    return write
