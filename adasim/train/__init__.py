"""Training: the loop, its optimiser and schedules, checkpoints, the run folder, what is watched and shown."""

from typing import Any

__all__ = ["pretrain"]


def __getattr__(name: str) -> Any:
    if name == "pretrain":  # methods import schedules from this package, and the loop imports methods
        from adasim.train.loop import pretrain

        return pretrain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
