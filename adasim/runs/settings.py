"""What a run depends on: the settings that shape its result, and the versions of what it runs on."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Any

import torch

from adasim.util.errors import UserError

PACKAGES = ("torch", "torchvision", "timm", "numpy", "safetensors", "adasim")
_CAME_LATER = {  # what runs of earlier versions did without saying so
    "model.init": "",
    "model.freeze_norm": False,
    "optim.encoder_lr": 1.0,
    "optim.head_epochs": 0,
}
_MAY_CHANGE = ("recipe", "device", "deterministic", "compile", "data.", "save.", "eval.")


def versions(device: str) -> dict[str, Any]:
    """What the numbers of a run depend on beside its configuration."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from a checkout that was never installed
            found[name] = None
    found["torch"] = str(torch.__version__)  # with the build (+cu132), which the package's metadata lack
    return {**found, "device": str(device), "threads": torch.get_num_threads()}


def check_same(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to continue a run with other settings, naming the first differences.

    Both are `{"config": ...}`. Where the images lie, how they are read, the device, saving and evaluation may
    change, so may `micro_batch`, and the run may become longer; whatever else shapes the result may not. The images
    are compared by `adasim.data.check_same_data`.
    """
    changed = changed_settings(decisive(saved["config"]), decisive(now["config"]))
    if changed:
        raise UserError(
            f"Cannot resume with other settings: {changed}. "
            f"Resume without these options, or start a new run with another --out."
        )


def decisive(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that shape the result, by their names on the command line."""
    flat = flatten(json.loads(json.dumps(config)))
    return {name: value for name, value in flat.items() if not name.startswith(_MAY_CHANGE)}


def changed_settings(before: dict[str, Any], after: dict[str, Any]) -> str:
    """In words, which `decisive` settings differ so that a run cannot go on; empty if none does."""
    before = _in_todays_names(before, after)
    names = (before.keys() | after.keys()) - {"micro_batch"}  # matters to batch norm alone: see `pretrain`
    if before.get("method") != after.get("method"):  # whose settings have nothing in common
        own = tuple(f"{settings.get('method')}." for settings in (before, after))
        names = {name for name in names if not name.startswith(own)}
    changed = [
        f"{name} was {before.get(name)} and is now {after.get(name)}"
        + (" (it can only be raised)" if name == "epochs" else "")
        for name in sorted(names)
        if before.get(name) != after.get(name) and not _raised(name, before.get(name), after.get(name))
    ]
    more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
    return "; ".join(changed[:3]) + more


def _in_todays_names(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Settings that an earlier version wrote, as this one would have written them."""
    before = {**{name: value for name, value in _CAME_LATER.items() if name in after}, **before}
    # Up to 0.2, which decoded JPEGs at full size.
    if (engine := before.pop("views.engine", None)) is not None:
        before |= {"views.in_memory": engine != "image", "views.reduced_jpeg": False}
    return before


def _raised(name: str, before: Any, after: Any) -> bool:
    return name == "epochs" and isinstance(before, int) and isinstance(after, int) and before < after


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`: the names of the command line."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return flat
