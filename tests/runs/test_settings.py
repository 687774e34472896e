"""Settings of checkpoints that earlier versions wrote, beside today's."""

from __future__ import annotations

from typing import Any

import pytest

from adasim.config import Config, ModelConfig, ViewsConfig
from adasim.runs.settings import changed_settings, decisive


def as_version_0_2_wrote(engine: str, **changes: Any) -> dict[str, Any]:
    """It had `views.engine` where two settings are now, and neither micro-batches nor weights to start from."""
    later = ("views.in_memory", "views.reduced_jpeg", "micro_batch", "model.init")
    settings = decisive(Config().to_dict())
    return {name: value for name, value in settings.items() if name not in later} | {
        "views.engine": engine,
        **changes,
    }


@pytest.mark.parametrize(("engine", "in_memory"), [("batch", True), ("auto", True), ("image", False)])
def test_a_checkpoint_of_0_2_goes_on_with_the_same_settings(engine: str, in_memory: bool) -> None:
    now = Config(views=ViewsConfig(in_memory=in_memory, reduced_jpeg=False))
    assert changed_settings(as_version_0_2_wrote(engine), decisive(now.to_dict())) == ""


def test_what_differs_from_0_2_is_named() -> None:
    before = as_version_0_2_wrote("image", seed=3)
    now = Config(views=ViewsConfig(in_memory=False, reduced_jpeg=True), model=ModelConfig(init="weights.pth"))
    changed = changed_settings(before, decisive(now.to_dict()))
    assert changed == (
        "model.init was  and is now weights.pth; seed was 3 and is now 0; "
        "views.reduced_jpeg was False and is now True"
    )
