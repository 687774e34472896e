"""What every benchmark shares: timing, peak memory, and a table that is printed and saved."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def options(about: str | None, **defaults: Any) -> argparse.Namespace:
    """What was typed: an option for each of these names, of the type of its default; False is a switch, a list takes
    several values, None and an empty list are text."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=raw)
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(option, action="store_true")
        elif isinstance(default, list):
            kind = type(default[0]) if default else str
            parser.add_argument(option, type=kind, nargs="+", default=default)
        else:
            parser.add_argument(option, type=str if default is None else type(default), default=default)
    return parser.parse_args()


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


def take_turns(
    contenders: dict[str, Callable[[], Any]], rounds: int = 5, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each. They take turns, so that a busy moment of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            start = clock()
            run()
            if turn:  # the first turn warms up
                times[name].append(clock() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def extra_memory(run: Callable[[], Any]) -> tuple[Any, float]:
    """What `run` returns, and by how many GB it raised this process's memory at its peak (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # forget earlier peaks
    before = _status_gb("VmRSS")
    result = run()
    return result, _status_gb("VmHWM") - before


def report(
    name: str, settings: dict[str, Any], rows: list[dict[str, Any]], script: str = "", arguments: str = ""
) -> None:
    """Print the rows as a table; save them, with date and machine, as JSON and Markdown.

    `script` is the benchmark's own name where the result has another, `arguments` what it was called with.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = [columns, *([_text(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in table
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print("\n".join(lines))
    machine = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    record = {
        "benchmark": name,
        "date": date.today().isoformat(),
        "machine": machine,
        "settings": settings,
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    command = f"python benchmarks/{script or name}.py {arguments}".strip()
    heading = f"`{command}`, {record['date']}, " + ", ".join(f"{k} {v}" for k, v in machine.items())
    text = ", ".join(f"{k} {v}" for k, v in settings.items())
    (RESULTS / f"{name}.md").write_text("\n".join([heading, "", text, "", *lines]) + "\n")


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def resident_gb() -> float:
    """What this process holds in memory, in GiB (Linux)."""
    return _status_gb("VmRSS")


def _status_gb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 2**20


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
