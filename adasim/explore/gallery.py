"""The paper's galleries: which images are shown, and the picture of them with their support, ranked, and a bar for
every probability. The same as tables: lists.py."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adasim.api import Run, load_run
from adasim.data import ImageSet
from adasim.data.sources import is_from_python
from adasim.explore import KINDS
from adasim.explore.collection import Collection, collect
from adasim.explore.open import Opened, Say, origin_in_words, own_images
from adasim.explore.support import support_of_memory
from adasim.neighbors import NeighborMemory
from adasim.options import TAU
from adasim.tools import sheet
from adasim.util.errors import UserError
from adasim.util.seeding import permutation

# ---- whose neighbours ----


def supports_of_run(
    path: str | Path,
    say: Say,
    *,
    data: str | None = None,
    tau: float | None = None,
    images: ImageSet | None = None,
) -> Opened:
    """What a run draws its partners from: p_win over its last w epochs, with its own K and its own support.

    Args:
        data: where the run's images are now, if they moved; other images are refused.
        tau: temperature; the run's own by default, or 0.2 where that is 0.
        images: the training images, for a run that they were handed over to in Python.
    """
    run = load_run(path)
    memory = _full_memory(run, say)
    images = own_images(run, data, images, "gallery", memory)
    tau = tau or run.config.neighbors.tau or TAU
    return supports_of_memory(memory, collect([images]), tau, Path(path).resolve().name)


def supports_of_memory(memory: NeighborMemory, collection: Collection, tau: float, name: str) -> Opened:
    """The supports of a neighbour memory whose window is full; `name` is that of its run."""
    support = support_of_memory(memory, tau, form=memory.support, width=None)
    return Opened(collection, support, torch.empty(0), origin_in_words(memory, tau, name))


def _full_memory(run: Run, say: Say) -> NeighborMemory:
    """The run's memory, if all epochs of its window are in it."""
    sentences: list[str] = []
    memory = run.read_memory(sentences.append)
    encoder = ""
    if (run.path / "backbone.safetensors").exists() and not is_from_python(run.config.data.source):
        encoder = (
            f" Its encoder has neighbours, too: adasim gallery --backbone {run.path} --data "
            f"{run.config.data.source}"
        )
    if memory is None:
        raise UserError(f"{' '.join(sentences)}{encoder}")
    if memory.epochs < memory.window:
        raise UserError(
            f"{run.path} has saved {memory.epochs} of the {memory.window} epochs that its window averages: until "
            f"then it draws no partners. Wait for the others, or resume it.{encoder}"
        )
    for sentence in sentences:
        say(sentence)
    return memory


# ---- which images ----


@dataclass(frozen=True)
class Picked:
    """The images of a gallery, and in words what they have in common."""

    ids: list[int]
    title: str
    choice: str
    """How many there are to choose from."""


def pick(supports: Opened, asked: str, count: int, seed: int) -> Picked:
    """The images that are asked for: up to `count` of a kind in a random order, or all that are named.

    A greater count adds images and keeps the others. Images of which nothing is known are never chosen.

    Args:
        asked: one of KINDS, by the best match: "intriguing", it is another image, so that the gate is shut;
            "other-class", it is of another class. Or ids and file names, with commas between them.
    """
    best, labels = supports.support.neighbours[:, 0], supports.collection.labels
    total = f"{len(best):,} images"
    known = best >= 0
    if asked not in KINDS:
        ids = named(supports.collection, asked)
        for i in ids:
            if not known[i]:
                raise UserError(
                    f"Nothing is known of image {i} ({supports.collection.names[i]}): it could not be read, or has "
                    f"not been looked at yet. Pick another."
                )
        return Picked(ids, "Images and their support", f"{len(ids):,} of {total}")
    if asked == "other-class":
        if labels is None:
            raise UserError(
                "--pick other-class needs labels, and these images have none. Use --pick intriguing."
            )
        theirs = labels[best.clamp(min=0)]
        among = known & (labels >= 0) & (theirs >= 0) & (theirs != labels)
    else:
        among = known if asked == "random" else known & (best != torch.arange(len(best)))
    if not among.any():
        way_out = "Use --pick random, or name some." if asked != "random" else "None could be read."
        if not supports.windowed:  # features of one view each
            way_out = (
                f"An image always matches its own view best: use --backbone, which has several. {way_out}"
            )
        raise UserError(f"None of the {total} is such a one. {way_out}")
    order = permutation(seed, "gallery", 0, len(among))
    ids = order[among[order]][:count].tolist()
    if asked == "random":
        return Picked(ids, "Random images and their support", f"{len(ids):,} of {total}")
    title = f"The best match is {'another image' if asked == 'intriguing' else 'of another class'}"
    return Picked(ids, title, f"{len(ids):,} of {int(among.sum()):,} such images among {total}")


def named(collection: Collection, asked: str) -> list[int]:
    """The ids that a list names: "3, 17", "cat/01.jpg,cat/02.jpg". A file name may be the end of a path, or have
    more before it, as long as one image alone fits; it may hold commas if it stands alone.
    """
    asked = asked.strip()
    if not re.fullmatch(r"[\d,\s]*", asked) and len(alone := collection.fitting(asked)) == 1:
        return alone
    parts = [part.strip() for part in asked.split(",") if part.strip()]
    if not parts:
        raise UserError(f"--pick names no image. It takes {', '.join(KINDS)}, or ids and file names.")
    return list(dict.fromkeys(_one(collection, part) for part in parts))


def _one(collection: Collection, part: str) -> int:
    if re.fullmatch(r"-?\d+", part, re.ASCII):
        if not 0 <= int(part) < len(collection):
            raise UserError(f"There is no image {part}: ids run from 0 to {len(collection) - 1:,}.")
        return int(part)
    fitting = collection.fitting(part)
    if not fitting:
        raise UserError(
            f"No image is called {part}. --pick takes {', '.join(KINDS)}, or ids and file names with commas between "
            f"them."
        )
    if len(fitting) > 1:
        few = " and ".join(collection.names[i] for i in fitting[:2])
        raise UserError(f"{len(fitting):,} images fit {part}, such as {few}. Name more of the path, or ids.")
    return fitting[0]


@dataclass(frozen=True)
class Row:
    """One image and its support, best first."""

    query: int
    ids: list[int]
    p: list[float]


def rows_of(supports: Opened, ids: Sequence[int]) -> list[Row]:
    """The whole support of each image."""
    rows = []
    for query in ids:
        neighbours = supports.support.neighbours[query]
        known = neighbours >= 0
        rows.append(Row(query, neighbours[known].tolist(), supports.support.p[query][known].tolist()))
    return rows


# ---- the picture ----

# Okabe and Ito's blue and a darker vermillion: told apart by all kinds of colour vision, and readable as text.
_SAME, _OTHER = "#0072b2", "#b34700"


def draw(
    supports: Opened, rows: Sequence[Row], picked: Picked, *, show: int = 10, format: str = "png"
) -> Any:
    """The picture as a matplotlib figure, with at most `show` neighbours of each image and a bar for every p_win."""
    images = supports.collection
    full = min(1.0, math.ceil(max(max(row.p[:show]) for row in rows) * 20 - 1e-9) / 20)  # a multiple of 0.05
    legend = [("", f"bars: p_win, full at {full:.2f}"), (sheet.INK, "dark, framed: the query itself")]
    if images.labels is not None:
        legend += [(_SAME, "the query's class"), (_OTHER, "≠ another class")]
    if max(len(row.ids) for row in rows) > show:
        legend.append(("", f"the {show} best are shown"))
    notes = (picked.choice, f"p_win from {supports.origin}")
    cells = []
    for row in rows:
        name = images.class_name(row.query) or f"image {row.query}"
        match = "matches itself" if row.ids[0] == row.query else "matches another"
        support = zip(row.ids[:show], row.p, strict=False)
        neighbours = [_neighbour(images, row.query, j, share, full) for j, share in support]
        cells.append((sheet.Cell(images.place(row.query), name, match, framed=True), neighbours))
    headings = ("query", "its support, best first")
    return sheet.draw(cells, picked.title, notes, headings, legend, format=format)


def _neighbour(images: Collection, query: int, j: int, share: float, full: float) -> sheet.Cell:
    theirs, own = images.class_name(j), images.class_name(query)
    words, style = theirs or f"image {j}", {"color": sheet.QUIET}
    colour = _SAME if images.labels is None or (theirs and own) else sheet.QUIET
    if j == query:
        words, style, colour = "the query", {"style": "italic"}, sheet.INK
    elif theirs and own and theirs != own:
        words, style, colour = f"≠ {theirs}", {"color": _OTHER}, _OTHER
    return sheet.Cell(images.place(j), f"{share:.2f}", words, style, share / full, colour, framed=j == query)


def render(supports: Opened, rows: Sequence[Row], picked: Picked, *, show: int, format: str) -> bytes:
    """The picture as the content of a file: "png", or "pdf", whose text is text."""
    return sheet.render(draw(supports, rows, picked, show=show, format=format), format)
