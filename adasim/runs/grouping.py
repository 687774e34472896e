"""Which runs are one setting with several random seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from adasim.config import Config
from adasim.registry import PAIRS
from adasim.runs.folder import decisive, flatten


def group_by_setting(runs: Sequence[tuple[Config, str | None]]) -> list[tuple[dict[str, Any], list[int]]]:
    """Each setting with the numbers of the runs that have it, in the runs' order.

    Args:
        runs: of each its configuration, and the fingerprint of its images: they are the same wherever they lay.
    """
    places_of: dict[str, dict[str, Any]] = {}
    members: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for number, (config, fingerprint) in enumerate(runs):
        settings = settings_of(config)
        if fingerprint is not None:
            where = {name: settings[name] for name in ("data.source", "data.exclude")}
            settings |= places_of.setdefault(fingerprint, where)
        members.setdefault(json.dumps(settings, sort_keys=True), (settings, []))[1].append(number)
    return list(members.values())


def settings_of(config: Config) -> dict[str, Any]:
    """All settings that shape what is learnt but the seed, by their names on the command line; without those that
    have no effect beside the others."""
    flat = flatten(json.loads(json.dumps(config.to_dict())))
    shaping = decisive(config.to_dict()) | {name: flat[name] for name in ("data.source", "data.exclude")}
    idle = {"seed", "neighbors.watch", "neighbors.cache", "views.in_memory", "views.reduced_jpeg"}
    policy = PAIRS[config.pairs]
    if not policy.draws_from_memory and not config.neighbors.watch:
        idle |= {name for name in shaping if name.startswith("neighbors.") and name != "neighbors.oracle_p"}
    if config.pairs in ("standard", "nearest", "oracle"):
        idle.add("neighbors.tau")
    if config.pairs != "oracle":
        idle.add("neighbors.oracle_p")
    return {name: value for name, value in shaping.items() if name not in idle}
