"""What every benchmark shares: timing, peak memory, and a table that is printed and saved."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def seconds(run: Callable[[], Any], repeats: int = 5, warm_up: bool = True) -> float:
    """The fastest of several runs: the one least disturbed by whatever else the machine does."""
    if warm_up:
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def extra_memory(run: Callable[[], Any]) -> tuple[Any, float]:
    """What `run` returns, and by how many GB it raised this process's memory at its peak (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # forget earlier peaks
    before = _status_gb("VmRSS")
    result = run()
    return result, _status_gb("VmHWM") - before


def report(name: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table, and save them with the machine they were measured on."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = [columns, *([_text(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    RESULTS.mkdir(exist_ok=True)
    machine = {"cpu": _cpu(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    record = {"benchmark": name, "settings": settings, "machine": machine, "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _status_gb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 2**20


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
