"""Sheets of images, as `similar` and `gallery` draw them: queries one below the other, each with its neighbours."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from adasim.data import ImageSet, Unreadable
from adasim.util.errors import UserError
from adasim.util.terminal import without_font_warnings

INK, QUIET = "#1d1d1f", "#66666b"
_EMPTY, _TRACK = "#f1f1f3", "#e6e6ea"  # where an image leaves room in its square; below a bar
_PIXELS = {"png": 160, "pdf": 300}  # per inch, of images
_SIZE = 10.5  # of letters, in points
_SIDE, _GAP, _CAPTION, _MARGIN, _ASIDE, _LINE = 1.15, 0.13, 0.44, 0.3, 0.24, 0.22  # inches
_TALLEST = 200  # inches: what a PDF page may have
_SCRIPTS = (  # fonts of other scripts, for names: whichever of them a machine has
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "PingFang SC", "Hiragino Sans", "Microsoft YaHei", "MS Gothic"),
    *("Malgun Gothic", "Apple SD Gothic Neo", "WenQuanYi Zen Hei", "Noto Sans Devanagari", "Noto Sans Thai"),
    "Arial Unicode MS",
)


@dataclass(frozen=True)
class Cell:
    """An image with two lines of words below it."""

    image: Tensor | tuple[ImageSet, int]
    """(3, H, W), or which one of a set."""
    first: str
    second: str
    style: dict[str, Any] = field(default_factory=lambda: {"color": QUIET})
    """Of the second line, as matplotlib has it."""
    share: float | None = None
    """A bar of this length stands beside the first line; 1 is a full one."""
    colour: str = INK
    """Of the bar."""
    framed: bool = False


def draw(
    rows: Sequence[tuple[Cell, Sequence[Cell]]],
    title: str,
    notes: Sequence[str],
    headings: tuple[str, str],
    legend: Sequence[tuple[str, str]] = (),
    *,
    enlarged: float = 1.0,
    per_line: int = 10,
    format: str = "png",
) -> Any:
    """A matplotlib figure of queries, each with its neighbours.

    Args:
        title, notes, headings: above everything; below the title; above the queries and above their neighbours.
        legend: (colour or "", words) for the lines below the images.
        enlarged: how much larger a query is than a neighbour.
        per_line: neighbours beside each other; more go on in the next line.
        format: of the file that `render` will make of it.
    """
    large, pitch = _SIDE * enlarged, _SIDE + _CAPTION
    left, top = _MARGIN + large + _ASIDE, 0.9 + _LINE * len(notes)
    columns = min(max(4, *(len(cells) for _, cells in rows)), per_line)  # words need four
    width = left + columns * (_SIDE + _GAP) - _GAP + _MARGIN
    lines = [math.ceil(len(cells) / per_line) for _, cells in rows]
    heights = [max(count * pitch, large + _CAPTION) + _GAP for count in lines]
    height = top + sum(heights) + _LINE * len(legend) + 0.2
    if height > _TALLEST:
        raise UserError(
            f"{len(rows):,} images with their neighbours make a picture of {height:.0f} inches, and a page has at "
            f"most {_TALLEST}. Lower --count or --show."
        )
    with plain_look():
        sheet = _Sheet(width, height, format)
        room = width - 2 * _MARGIN
        sheet.text(_MARGIN, 0.24, title, room, size=17, weight="bold")
        for number, note in enumerate(notes):
            sheet.text(_MARGIN, 0.56 + number * _LINE, note, room, color=QUIET)
        for x, words in zip((_MARGIN, left), headings, strict=True):
            sheet.text(x, top - 0.22, words, width - x, color=QUIET)
        for (query, cells), row_height in zip(rows, heights, strict=True):
            sheet.cell(query, _MARGIN, top, large, large + _ASIDE, weight="bold")
            for place, cell in enumerate(cells):
                line, column = divmod(place, per_line)
                sheet.cell(cell, left + column * (_SIDE + _GAP), top + line * pitch, _SIDE, _SIDE)
            top += row_height
        for number, (colour, words) in enumerate(legend):
            y = top + number * _LINE
            if colour:
                sheet.bar(_MARGIN, y + 0.03, _LINE - 0.06, 1.0, colour)
            sheet.text(_MARGIN + (_LINE if colour else 0), y, words, room - _LINE, color=QUIET)
    return sheet.figure


def render(figure: Any, format: str = "png") -> bytes:
    """The content of a file, "png", or "pdf", whose text is text; the same for the same picture."""
    buffer = io.BytesIO()
    date = {"CreationDate": None} if format == "pdf" else {}
    with plain_look():
        figure.savefig(buffer, format=format, dpi=_PIXELS["png"], metadata=date)
    return buffer.getvalue()


class _Sheet:
    """A figure of one pair of axes in inches from its upper left corner: axes for every image would take most of
    the time."""

    def __init__(self, width: float, height: float, format: str) -> None:
        from matplotlib.figure import Figure

        self._pixels = _PIXELS[format]
        self.figure = Figure(figsize=(width, height), facecolor="white")
        self._axes = self.figure.add_axes((0, 0, 1, 1))
        self._axes.set(xlim=(0, width), ylim=(height, 0))
        self._axes.axis("off")

    def cell(self, cell: Cell, x: float, y: float, side: float, room: float, **style: Any) -> None:
        """The whole image in the middle of a pale square, and the words below it, in `room` inches; `style` is of
        the first line."""
        self._rectangle(x, y, side, side, _EMPTY)
        try:
            pixels = cell.image if isinstance(cell.image, Tensor) else cell.image[0].load(cell.image[1])
        except Unreadable:
            self.text(x + 0.1, y + side / 2 - 0.08, "cannot be read", side, color=QUIET, size=9)
        else:
            shown, width, height = fitted(pixels, round(side * self._pixels))
            at, top = x + side * (1 - width) / 2, y + side * (1 - height) / 2
            box = (at, at + side * width, top + side * height, top)
            self._axes.imshow(shown, extent=box, aspect="auto", interpolation="none", zorder=2)
        if cell.framed:
            self._rectangle(x, y, side, side, INK, fill=False, linewidth=2, zorder=3)
        self.text(x, y + side + 0.06, cell.first, side, **style)
        if cell.share is not None:
            self.bar(x + 0.4, y + side + 0.09, side - 0.4, cell.share, cell.colour)
        self.text(x, y + side + 0.24, cell.second, room, **cell.style)

    def bar(self, x: float, y: float, width: float, share: float, colour: str) -> None:
        self._rectangle(x, y, width, 0.1, _TRACK)
        self._rectangle(x, y, width * share, 0.1, colour)

    def text(self, x: float, y: float, words: str, room: float, **style: Any) -> None:
        """Words whose upper left corner is at (x, y); what does not fit into `room` inches is cut off."""
        style = {"color": INK, "size": _SIZE, **style}
        kind = (style["size"], style.get("weight", "normal"))
        if text_width(words, *kind) > room:
            while words and text_width(words + "…", *kind) > room:
                words = words[:-1]
            words = words.rstrip() + "…"
        # Names may hold dollars, which would begin a formula.
        self._axes.text(x, y, words, va="top", parse_math=False, **style)

    def _rectangle(self, x: float, y: float, width: float, height: float, colour: str, **style: Any) -> None:
        from matplotlib.patches import Rectangle

        self._axes.add_patch(Rectangle((x, y), width, height, color=colour, **{"linewidth": 0, **style}))


def text_width(words: str, size: float, weight: str = "normal") -> float:
    """In inches."""
    from matplotlib.font_manager import FontProperties

    font = FontProperties(size=size, weight=weight)
    return _ruler().get_text_width_height_descent(words, font, False)[0] / 72


@cache
def _ruler() -> Any:
    from matplotlib.backends.backend_agg import RendererAgg

    return RendererAgg(16, 16, 72)


def fitted(pixels: Tensor, target: int) -> tuple[np.ndarray, float, float]:
    """An image (3, H, W) made to fit into a square of `target` pixels, its proportions kept: uint8 (h, w, 3), and the
    parts of the square's width and height that it takes up.

    Small images keep their pixels as squares; large ones are averaged, not sampled.
    """
    scale = target / max(pixels.shape[-2:])
    size = [max(1, round(length * scale)) for length in pixels.shape[-2:]]
    smooth = TF.InterpolationMode.NEAREST_EXACT if scale >= 4 else TF.InterpolationMode.BICUBIC
    shown = TF.resize(pixels, size, interpolation=smooth, antialias=True)
    return shown.permute(1, 2, 0).to(torch.uint8).numpy(), size[1] / target, size[0] / target


@contextmanager
def plain_look() -> Iterator[None]:
    """The look does not depend on the settings of a person's matplotlib."""
    from matplotlib import style
    from matplotlib.font_manager import fontManager

    installed = fontManager.get_font_names()
    families = ["DejaVu Sans", *(name for name in _SCRIPTS if name in installed)]
    look = {"font.family": families, "pdf.fonttype": 42, "image.composite_image": False}
    log = logging.getLogger("matplotlib.font_manager")
    level = log.level
    with style.context(["default", look]), without_font_warnings():
        log.setLevel(logging.ERROR)  # that a font has no bold letters interests nobody
        try:
            yield
        finally:
            log.setLevel(level)
