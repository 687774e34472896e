"""Which settings may differ between two processes of a run, or between runs of one setting."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from adasim.config import Config
from adasim.registry import PAIRS
from adasim.util.errors import UserError

_OF_IMAGES = ("data.source", "data.exclude", "data.labels")
_MAY_CHANGE = ("recipe", "device", "deterministic", "compile", "data.", "save.", "eval.")


def check_same(before: Config, now: Config) -> None:
    """Refuse to continue a run with other settings, naming the first differences.

    Where the images lie, how they are read, the device, saving and evaluation may change, so may `micro_batch`, and
    the run may become longer; whatever else shapes the result may not. The images are compared by
    `adasim.data.check_same_data`.
    """
    if changed := changed_settings(decisive(before), decisive(now)):
        raise UserError(
            f"Cannot resume with other settings: {changed}. "
            f"Resume without these options, or start a new run with another --out."
        )


def decisive(config: Config, also: Collection[str] = ()) -> dict[str, Any]:
    """The settings that shape the result, and those named `also`, by their names on the command line."""
    flat = flatten(json.loads(json.dumps(config.to_dict())))
    return {name: flat[name] for name in flat if name in also or not name.startswith(_MAY_CHANGE)}


def changed_settings(before: dict[str, Any], after: dict[str, Any]) -> str:
    """In words, which `decisive` settings differ so that a run cannot go on; empty if none does."""
    # micro_batch matters to batch norm alone: see `pretrain`. A setting that `before` does not have is newer than it
    # and at its default, or another method's or policy's, which are named.
    names = before.keys() - {"micro_batch"}
    if before.get("method") != after.get("method"):  # whose settings have nothing in common
        own = tuple(f"{settings.get('method')}." for settings in (before, after))
        names = {name for name in names if not name.startswith(own)}
    changed = []
    for name in sorted(names):
        if before.get(name) == after.get(name) or (name == "epochs" and before[name] < after[name]):
            continue
        only = " (it can only be raised)" if name == "epochs" else ""
        changed.append(f"{name} was {before.get(name)} and is now {after.get(name)}{only}")
    more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
    return "; ".join(changed[:3]) + more


def group_by_setting(runs: Sequence[tuple[Config, str | None]]) -> list[tuple[dict[str, Any], list[int]]]:
    """Each setting with the numbers of the runs that have it with some random seed, in the runs' order.

    Args:
        runs: of each its configuration, and the fingerprint of its images: they are the same wherever they lay.
    """
    places_of: dict[str, dict[str, Any]] = {}
    members: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for number, (config, fingerprint) in enumerate(runs):
        settings = settings_of(config)
        if fingerprint is not None:
            where = {name: settings[name] for name in _OF_IMAGES}
            settings |= places_of.setdefault(fingerprint, where)
        members.setdefault(json.dumps(settings, sort_keys=True), (settings, []))[1].append(number)
    return list(members.values())


def settings_of(config: Config) -> dict[str, Any]:
    """All settings that shape what is learnt but the seed, by their names on the command line; without those that
    have no effect beside the others."""
    shaping = decisive(config, also=_OF_IMAGES)
    idle = {"seed", "neighbors.watch", "neighbors.cache", "views.in_memory", "views.reduced_jpeg"}
    if not PAIRS[config.pairs].draws_from_memory and not config.neighbors.watch:
        idle |= {name for name in shaping if name.startswith("neighbors.") and name != "neighbors.oracle_p"}
    if config.pairs in ("standard", "nearest", "oracle"):
        idle.add("neighbors.tau")
    if config.pairs != "oracle":
        idle.add("neighbors.oracle_p")
    return {name: value for name, value in shaping.items() if name not in idle}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`: the names of the command line."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return flat
