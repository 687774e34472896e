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
from torch import Tensor

from adasim.api import Run, load_run
from adasim.data import ImageSet
from adasim.data.sources import is_from_python
from adasim.explore import KINDS
from adasim.explore.collection import Collection, collect
from adasim.explore.open import Opened, Say, origin_in_words, own_images
from adasim.explore.support import support_of_memory
from adasim.neighbors import NeighborMemory
from adasim.options import TAU
from adasim.tools.sheet import INK, Sheet, load_readable, plain_look, text_width
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
        asked: one of KINDS; or ids and file names, with commas between them.
    """
    best = supports.support.neighbours[:, 0]
    total = f"{len(best):,} images"
    if asked not in KINDS:
        ids = named(supports.collection, asked)
        for i in ids:
            if best[i] < 0:
                raise UserError(
                    f"Nothing is known of image {i} ({supports.collection.names[i]}): it could not be read, or has "
                    f"not been looked at yet. Pick another."
                )
        return Picked(ids, "Images and their support", f"{len(ids):,} of {total}")
    labels = supports.collection.labels
    if asked == "other-class" and labels is None:
        raise UserError("--pick other-class needs labels, and these images have none. Use --pick intriguing.")
    among = _of_kind(asked, best, labels)
    if not among.any():
        raise UserError(_none(supports, asked))
    order = permutation(seed, "gallery", 0, len(among))
    ids = order[among[order]][:count].tolist()
    if asked == "random":
        return Picked(ids, "Random images and their support", f"{len(ids):,} of {total}")
    title = f"The best match is {'another image' if asked == 'intriguing' else 'of another class'}"
    return Picked(ids, title, f"{len(ids):,} of {int(among.sum()):,} such images among {total}")


def _of_kind(kind: str, best: Tensor, labels: Tensor | None) -> Tensor:
    """(N,) bool: which images are of a kind, by their best match (N,), which is -1 where nothing is known.

    "intriguing": that is another image, so that the gate is shut. "other-class": it is of another class than the
    image; both have a label.
    """
    known = best >= 0
    if kind == "random":
        return known
    if kind == "intriguing":
        return known & (best != torch.arange(len(best)))
    assert labels is not None
    theirs = labels[best.clamp(min=0)]
    return known & (labels >= 0) & (theirs >= 0) & (theirs != labels)


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


def _none(supports: Opened, kind: str) -> str:
    """Why there is no image of a kind."""
    if kind == "random":
        return "Nothing is known of any of these images: none could be read."
    if not supports.windowed:
        return (
            "No image has another one as its best match: features of one view each always match themselves best. "
            "Use --backbone, which compares several views, or --pick random."
        )
    what = "another one" if kind == "intriguing" else "one of another class"
    count = len(supports.support)
    return f"None of the {count:,} images has {what} as its best match. Use --pick random, or name some."


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

_QUIET, _TRACK = "#66666b", "#e6e6ea"
# Okabe and Ito's blue and a darker vermillion: told apart by all kinds of colour vision, and readable as text.
_SAME, _OTHER = "#0072b2", "#b34700"
_CELL, _GAP, _CAPTION, _MARGIN = 1.15, 0.13, 0.44, 0.3  # inches
_ASIDE = 0.24  # between the query and its support
_HEAD, _FOOT = 1.34, 0.42  # above the first row, below the last one
_BAR, _SWATCH, _TEXT = 0.1, 0.22, 0.22  # a bar's height, a colour of the legend, a line of it
_LINE = 10  # neighbours beside each other; more go on in the next line
_TALLEST = 200  # inches: what a PDF page may have
_SIZE = 10.5  # of letters, in points


def render(supports: Opened, rows: Sequence[Row], picked: Picked, *, show: int, format: str) -> bytes:
    """The picture as the content of a file: "png", or "pdf", whose text is text."""
    with plain_look():
        return _Drawing(supports.collection, rows, show, format).whole(picked, supports.origin).render()


def draw(supports: Opened, rows: Sequence[Row], picked: Picked, *, show: int = 10) -> Any:
    """The picture as a matplotlib figure, with at most `show` neighbours of each image."""
    with plain_look():
        return _Drawing(supports.collection, rows, show, "png").whole(picked, supports.origin).figure


class _Drawing:
    """Queries, one below the other, each with its support and a bar for every probability."""

    def __init__(self, collection: Collection, rows: Sequence[Row], show: int, format: str) -> None:
        self.collection, self.rows, self.show = collection, rows, show
        widest = max(min(len(row.ids), show) for row in rows)
        columns = min(max(widest, 4), _LINE)  # with fewer than four the words above would not fit
        self.left = _MARGIN + _CELL + _ASIDE  # of the supports
        self.width = self.left + columns * (_CELL + _GAP) - _GAP + _MARGIN
        self.tops = [_HEAD]
        for row in rows:
            lines = math.ceil(min(len(row.ids), show) / _LINE)
            self.tops.append(self.tops[-1] + lines * (_CELL + _CAPTION) + _GAP)
        largest = max(share for row in rows for share in row.p[:show])
        self.full = min(1.0, math.ceil(largest * 20 - 1e-9) / 20)  # the next multiple of 0.05
        self.entries = self.legend()
        height = self.tops[-1] + _FOOT + _TEXT * self.entries[-1][1]
        if height > _TALLEST:
            raise UserError(
                f"{len(rows):,} images with their support make a picture of {height:.0f} inches, and a page has "
                f"at most {_TALLEST}. Lower --count or --show."
            )
        self.sheet = Sheet(self.width, height, format)

    def whole(self, picked: Picked, origin: str) -> Sheet:
        room = self.width - 2 * _MARGIN
        self.sheet.text(_MARGIN, 0.24, picked.title, size=17, weight="bold", room=room)
        self.quiet(_MARGIN, 0.56, picked.choice, room)
        self.quiet(_MARGIN, 0.56 + _TEXT, f"p_win from {origin}", room)
        self.quiet(_MARGIN, _HEAD - 0.22, "query")
        self.quiet(self.left, _HEAD - 0.22, "its support, best first")
        for top, row in zip(self.tops, self.rows, strict=False):
            self.query(row, top)
            for rank, (j, share) in enumerate(zip(row.ids[: self.show], row.p, strict=False)):
                line, column = divmod(rank, _LINE)
                x = self.left + column * (_CELL + _GAP)
                self.neighbour(row.query, j, share, x, top + line * (_CELL + _CAPTION))
        for x, line, colour, words in self.entries:
            y = self.tops[-1] + 0.06 + line * _TEXT
            if colour:
                self.bar(x, y + 0.03, _SWATCH - 0.06, 1, colour)
            self.quiet(x + (_SWATCH if colour else 0), y, words)
        return self.sheet

    def query(self, row: Row, top: float) -> None:
        self.image(row.query, _MARGIN, top, framed=True)
        name = self.collection.class_name(row.query) or f"image {row.query}"
        self.sheet.text(_MARGIN, top + _CELL + 0.06, name, size=_SIZE, weight="bold", room=_CELL)
        match = "matches itself" if row.ids[0] == row.query else "matches another"
        self.quiet(_MARGIN, top + _CELL + 0.24, match, _CELL + _ASIDE)

    def neighbour(self, query: int, j: int, share: float, x: float, top: float) -> None:
        theirs, own = self.collection.class_name(j), self.collection.class_name(query)
        differs = bool(theirs and own) and theirs != own
        unknown = self.collection.labels is not None and not (theirs and own)
        colour = INK if j == query else _OTHER if differs else _QUIET if unknown else _SAME
        self.image(j, x, top, framed=j == query)
        y, number = top + _CELL + 0.06, 0.4
        self.sheet.text(x, y, f"{share:.2f}", size=_SIZE)
        self.bar(x + number, y + 0.03, _CELL - number, share / self.full, colour)
        if j == query:
            self.sheet.text(x, y + 0.18, "the query", size=_SIZE, style="italic", room=_CELL)
        elif differs:
            self.sheet.text(x, y + 0.18, f"≠ {theirs}", size=_SIZE, color=_OTHER, room=_CELL)
        else:
            self.quiet(x, y + 0.18, theirs or f"image {j}", _CELL)

    def legend(self) -> list[tuple[float, int, str, str]]:
        """What bars, frames and marks mean: for each its place from the left, its line, a colour, and words."""
        entries = [("", f"bars: p_win, full at {self.full:.2f}"), (INK, "dark, framed: the query itself")]
        if self.collection.labels is not None:
            entries += [(_SAME, "the query's class"), (_OTHER, "≠ another class")]
        if max(len(row.ids) for row in self.rows) > self.show:
            entries.append(("", f"the {self.show} best are shown"))
        placed, x, line = [], _MARGIN, 0
        for colour, words in entries:
            width = text_width(words, _SIZE) + (_SWATCH if colour else 0)
            if x > _MARGIN and x + width > self.width - _MARGIN:
                x, line = _MARGIN, line + 1
            placed.append((x, line, colour, words))
            x += width + 0.3
        return placed

    def image(self, i: int, x: float, y: float, *, framed: bool) -> None:
        self.sheet.image(load_readable(*self.collection.place(i)), x, y, _CELL, _QUIET)
        if framed:
            self.sheet.rectangle(x, y, _CELL, _CELL, INK, fill=False, linewidth=2, zorder=3)

    def bar(self, x: float, y: float, width: float, share: float, colour: str) -> None:
        """A bar of up to `width` inches on a pale track."""
        self.sheet.rectangle(x, y, width, _BAR, _TRACK)
        self.sheet.rectangle(x, y, width * share, _BAR, colour)

    def quiet(self, x: float, y: float, words: str, room: float | None = None) -> None:
        self.sheet.text(x, y, words, size=_SIZE, color=_QUIET, room=room)
