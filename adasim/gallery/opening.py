"""From a run, or from what the explorer opens, to images and their supports."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from adasim.data import ImageSet
from adasim.data.sources.handed import was_handed_over
from adasim.explore.collection import Collection, collect
from adasim.explore.opening import Opened, Say, origin_in_words, own_images, require_as_many
from adasim.neighbors import NeighborMemory
from adasim.options import TAU
from adasim.run import Run, load_run
from adasim.util.errors import UserError

_CHUNK = 8192


@dataclass(frozen=True)
class Supports:
    """Images, whom each of them resembles, and in words who says so."""

    collection: Collection
    best: Tensor
    """(N,) int64: the best match of every image by p_win, often itself; -1 where nothing is known of it."""
    of: Callable[[Tensor], tuple[Tensor, Tensor]]
    """From ids (B,) to neighbours (B, S), best first and padded with -1, and their probabilities (B, S)."""
    origin: str
    windowed: bool = True
    """Whether several views of an image were compared, so that its best match may be another image."""


def supports_of_run(
    path: str | Path,
    say: Say,
    *,
    data: str | None = None,
    tau: float | None = None,
    images: ImageSet | None = None,
) -> Supports:
    """What a run draws its partners from: p_win over its last w epochs, with its own K and its own support.

    Args:
        data: where the run's images are now, if they moved; other images are refused.
        tau: temperature; the run's own by default, or 0.2 where that is 0.
        images: the training images, for a run that they were handed over to in Python.
    """
    run = load_run(path)
    memory = _full_memory(run, say)
    images = own_images(run, data, images, "gallery")
    require_as_many(memory, images, run)
    return supports_of_memory(
        memory, collect([images]), tau or run.config.neighbors.tau or TAU, Path(path).resolve().name
    )


def supports_of_memory(memory: NeighborMemory, collection: Collection, tau: float, name: str) -> Supports:
    """The supports of a neighbour memory whose window is full; `name` is that of its run."""
    # A few at a time: a union may be wide.
    best = [memory.distribution(ids, tau)[0][:, 0] for ids in torch.arange(memory.num_images).split(_CHUNK)]
    origin = origin_in_words(memory, tau, name)
    return Supports(collection, torch.cat(best), lambda ids: memory.distribution(ids, tau), origin)


def supports_of_opened(opened: Opened, k: int) -> Supports:
    """The supports that the explorer finds for any encoder or any features, the K best of each image, as of a run."""
    support = opened.support.best(k)
    return Supports(
        opened.collection,
        support.neighbours[:, 0],
        lambda ids: (support.neighbours[ids], support.p[ids]),
        opened.origin,
        opened.windowed,
    )


def _full_memory(run: Run, say: Say) -> NeighborMemory:
    """The run's memory, if all epochs of its window are in it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        memory = run.memory
    sentences = [str(warning.message) for warning in said]
    encoder = ""
    if (run.path / "backbone.safetensors").exists() and not was_handed_over(run.config.data.source):
        encoder = (
            f" Its encoder has neighbours, too: adasim gallery --backbone {run.path} --data "
            f"{run.config.data.source}"
        )
    if memory is None:
        raise UserError(f"{' '.join(sentences)}{encoder}")
    if not memory.lists:
        raise UserError(
            f"{run.path} keeps no lists of neighbours: its pairs are {run.config.pairs}, and --neighbors.watch was "
            f"not given.{encoder}"
        )
    if memory.epochs < memory.window:
        raise UserError(
            f"{run.path} has saved {memory.epochs} of the {memory.window} epochs that its window averages: until "
            f"then it draws no partners. Wait for the others, or resume it.{encoder}"
        )
    for sentence in sentences:
        say(sentence)
    return memory
