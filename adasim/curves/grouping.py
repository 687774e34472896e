"""Which runs are one setting with several random seeds, and what tells the settings apart, in few words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from adasim.curves.reading import RunCurves
from adasim.registry import PAIRS
from adasim.run import Run
from adasim.runs.settings import decisive, flatten
from adasim.util.terminal import printable

MOST_WORDS = 3
"""So many settings stand in a label; a talk has no room for more."""

_WORDS = {
    "method": "{}",
    "pairs": "{} pairs",
    "neighbors.tau": "tau {}",
    "neighbors.window": "window {}",
    "neighbors.k": "K {}",
    "model.name": "{}",
    "data.source": "{}",
    "epochs": "{} epochs",
    "batch_size": "batch {}",
    "optim.lr": "learning rate {}",
}
"""The settings that people compare most, the most telling first."""
_NAMES = {"dino": "DINO", "simsiam": "SimSiam", "nnclr": "NNCLR", "adasim": "AdaSim"}


@dataclass
class Group:
    """Runs that are drawn as one line."""

    label: str
    runs: list[RunCurves]


@dataclass
class Grouped:
    """All runs of a figure."""

    groups: list[Group]
    unsaid: list[str]
    """Settings in which the groups differ, too, and for which the labels have no room."""


def group(runs: Sequence[RunCurves]) -> Grouped:
    """Runs that differ by their random seed alone together; each group labelled by what tells it from the others.

    Two runs of the same settings and the same seed differ by something that we cannot see (a version, a repetition):
    they are kept apart, and named by their folders.
    """
    settings = [settings_of(one.run) for one in runs]
    places_of: dict[str, dict[str, Any]] = {}
    for each, own in zip(runs, settings, strict=True):  # the same images, wherever they lay
        if each.run.data_fingerprint is not None:
            where = {name: own[name] for name in ("data.source", "data.exclude")}
            own |= places_of.setdefault(each.run.data_fingerprint, where)
    keys = [json.dumps(one, sort_keys=True) for one in settings]
    members = {key: [i for i, other in enumerate(keys) if other == key] for key in keys}  # in the runs' order
    words, unsaid = labels([settings[places[0]] for places in members.values()])
    told = dict(zip(members, words, strict=True))
    names = [folder_name(one.run) for one in runs]
    if len(set(names)) < len(names):
        names = [_short(one.run.path) for one in runs]
    found: list[Group] = []
    for key, places in members.items():
        seeds = {runs[i].run.config.seed for i in places}
        if len(seeds) == len(places):
            found.append(Group(told[key], [runs[i] for i in places]))
        else:
            found += [Group(_joined([told[key], names[i]]), [runs[i]]) for i in places]
    again = [one for one in found if [other.label for other in found].count(one.label) > 1]
    for one in again:  # what tells them apart has no place in both, as between versions
        one.label = _joined([one.label, names[list(runs).index(one.runs[0])]])
    return Grouped(found, unsaid)


def settings_of(run: Run) -> dict[str, Any]:
    """All settings that shape what is learnt but the seed, by their names on the command line; without those that
    have no effect beside the others."""
    config = run.config
    flat = flatten(json.loads(json.dumps(config.to_dict())))
    kept = decisive(config.to_dict()) | {name: flat[name] for name in ("data.source", "data.exclude")}
    idle = {"seed", "neighbors.watch", "neighbors.cache", "views.in_memory", "views.reduced_jpeg"}
    policy = PAIRS[config.pairs]
    if not policy.draws_from_memory and not config.neighbors.watch:
        idle |= {name for name in kept if name.startswith("neighbors.") and name != "neighbors.oracle_p"}
    if config.pairs in ("standard", "nearest", "oracle", "confident"):
        idle.add("neighbors.tau")
    if config.pairs != "oracle":
        idle.add("neighbors.oracle_p")
    return {name: value for name, value in kept.items() if name not in idle}


def labels(settings: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """A label for each: its values of the settings in which they differ; and those settings that were left out."""
    values: dict[str, set[str]] = {}
    for one in settings:
        for name, value in one.items():
            values.setdefault(name, set()).add(json.dumps(value))
    order = list(_WORDS)
    differing = sorted(
        (name for name, found in values.items() if len(found) > 1),
        key=lambda name: (order.index(name) if name in order else len(order), name),
    )
    chosen = _telling(differing, settings) if len(differing) > MOST_WORDS else [*differing]
    chosen += [name for name in differing if name not in chosen][: max(0, MOST_WORDS - len(chosen))]
    shown = [name for name in differing if name in chosen]
    words = [_joined([in_words(name, one[name]) for name in shown if name in one]) for one in settings]
    return words, [name for name in differing if name not in chosen]


def _telling(names: Sequence[str], settings: Sequence[dict[str, Any]]) -> list[str]:
    """Those of the names, in their order, that each tell apart what the ones before do not."""
    chosen: list[str] = []
    apart = 1
    for name in names:
        kinds = {json.dumps([one.get(part) for part in [*chosen, name]]) for one in settings}
        if len(kinds) > apart:
            chosen.append(name)
            apart = len(kinds)
    return chosen


def in_words(name: str, value: Any) -> str:
    """A setting as people say it: `tau 0.2`, `AdaSim pairs`, `teacher temp 0.07`."""
    if name == "data.source":
        value = PurePath(str(value)).name or value  # by name, not by path
    if isinstance(value, list):
        value = " to ".join(map(str, value)) if len(value) == 2 else ", ".join(map(str, value))
    if isinstance(value, bool):
        value = "on" if value else "off"
    if name in ("method", "pairs"):
        value = _NAMES.get(str(value), value)
    pattern = _WORDS.get(name, f"{name.split('.')[-1].replace('_', ' ')} {{}}")
    return _short(pattern.format(value))


def shared_words(runs: Sequence[RunCurves]) -> str:
    """What all runs have in common, for a title: method, encoder, pairs, images."""
    settings = [settings_of(one.run) for one in runs]
    words = [
        in_words(name, settings[0][name])
        for name in ("method", "model.name", "pairs", "data.source")
        if all(one[name] == settings[0][name] for one in settings)
    ]
    return _joined(words)


def folder_name(run: Run) -> str:
    return _short(run.path.resolve().name)


def _short(text: object, letters: int = 48) -> str:
    """What fits into a legend: of a long name the end, which tells more than the beginning."""
    shown = printable(text)
    return shown if len(shown) <= letters else "…" + shown[1 - letters :]


def _joined(words: Sequence[str]) -> str:
    return ", ".join(word for word in words if word)
