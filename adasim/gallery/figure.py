"""The picture: queries, one below the other, each with its ranked support and a bar for every probability."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from adasim.data import Unreadable
from adasim.explore.collection import Collection
from adasim.gallery.opening import Supports
from adasim.gallery.picking import Picked
from adasim.gallery.tables import Row
from adasim.tools.sheet import EMPTY, fitted
from adasim.util.errors import UserError
from adasim.util.terminal import without_font_warnings

_INK, _QUIET, _TRACK, _PAPER = "#1d1d1f", "#66666b", "#e6e6ea", "#ffffff"
# Okabe and Ito's blue and a darker vermillion: told apart by all kinds of colour vision, and readable as text.
_SAME, _OTHER = "#0072b2", "#b34700"
_CELL, _GAP, _CAPTION, _MARGIN = 1.15, 0.13, 0.44, 0.3  # inches
_ASIDE = 0.24  # between the query and its support
_HEAD, _FOOT = 1.34, 0.42  # above the first row, below the last one
_BAR, _SWATCH, _TEXT = 0.1, 0.22, 0.22  # a bar's height, room for a colour of the legend, a line of it
_LINE = 10  # neighbours beside each other; more go on in the next line
_TALLEST = 200  # inches: what a PDF page may have
_PIXELS = {"png": 160, "pdf": 300}  # per inch, of the images
_SIZE = 10.5  # of letters, in points
_SCRIPTS = (  # fonts of other scripts, for names of classes: whichever of them a machine has
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "MS Gothic",
    "Malgun Gothic",
    "Apple SD Gothic Neo",
    "WenQuanYi Zen Hei",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Arial Unicode MS",
)


def render(supports: Supports, rows: Sequence[Row], picked: Picked, *, show: int, format: str) -> bytes:
    """The picture as the content of a file: "png", or "pdf", whose text is text."""
    buffer = io.BytesIO()
    figure = draw(supports, rows, picked, show=show, pixels=_PIXELS[format])
    with _plain():
        date = {"CreationDate": None} if format == "pdf" else {}  # the same picture is the same file
        figure.savefig(buffer, format=format, dpi=_PIXELS["png"], facecolor=_PAPER, metadata=date)
    return buffer.getvalue()


def draw(
    supports: Supports, rows: Sequence[Row], picked: Picked, *, show: int = 10, pixels: int = 160
) -> Any:
    """The picture as a matplotlib figure.

    Args:
        show: how many neighbours of each image are drawn at most.
        pixels: per inch, of the images.
    """
    with _plain():
        return _Drawing(supports.collection, rows, show, pixels).whole(picked, supports.origin)


@contextmanager
def _plain() -> Iterator[None]:
    """The look does not depend on the settings of a person's matplotlib."""
    from matplotlib import style
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
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


class _Drawing:
    """Places everything in inches from the upper left corner."""

    def __init__(self, collection: Collection, rows: Sequence[Row], show: int, pixels: int) -> None:
        from matplotlib.backends.backend_agg import RendererAgg
        from matplotlib.figure import Figure

        self.collection, self.rows, self.show, self.pixels = collection, rows, show, pixels
        widest = max(min(len(row.ids), show) for row in rows)
        self.columns = min(max(widest, 4), _LINE)  # with fewer than four the words above would not fit
        self.left = _MARGIN + _CELL + _ASIDE  # of the supports
        self.width = self.left + self.columns * (_CELL + _GAP) - _GAP + _MARGIN
        self.tops = [_HEAD]
        for row in rows:
            lines = math.ceil(min(len(row.ids), show) / _LINE)
            self.tops.append(self.tops[-1] + lines * (_CELL + _CAPTION) + _GAP)
        largest = max(share for row in rows for share in row.p[:show])
        self.full = min(1.0, math.ceil(largest * 20 - 1e-9) / 20)  # the next multiple of 0.05
        self.ruler = RendererAgg(16, 16, 72)
        self.entries = self.legend()
        self.height = self.tops[-1] + _FOOT + _TEXT * self.entries[-1][1]
        if self.height > _TALLEST:
            raise UserError(
                f"{len(rows):,} images with their support make a picture of {self.height:.0f} inches, and a page has "
                f"at most {_TALLEST}. Lower --count or --show."
            )
        self.figure = Figure(figsize=(self.width, self.height), facecolor=_PAPER)
        # One for all: axes of their own for every image would take most of the time.
        self.axes = self.figure.add_axes((0, 0, 1, 1))

    def whole(self, picked: Picked, origin: str) -> Any:
        room = self.width - 2 * _MARGIN
        self.text(_MARGIN, 0.24, picked.title, size=17, weight="bold", room=room)
        self.text(_MARGIN, 0.56, picked.choice, color=_QUIET, room=room)
        self.text(_MARGIN, 0.56 + _TEXT, f"p_win from {origin}", color=_QUIET, room=room)
        self.text(_MARGIN, _HEAD - 0.22, "query", color=_QUIET)
        self.text(self.left, _HEAD - 0.22, "its support, best first", color=_QUIET)
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
            self.text(x + (_SWATCH if colour else 0), y, words, color=_QUIET)
        self.axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        self.axes.axis("off")
        return self.figure

    def query(self, row: Row, top: float) -> None:
        self.image(row.query, _MARGIN, top, framed=True)
        name = self.collection.class_name(row.query) or f"image {row.query}"
        self.text(_MARGIN, top + _CELL + 0.06, name, weight="bold", room=_CELL)
        match = "matches itself" if row.ids[0] == row.query else "matches another"
        self.text(_MARGIN, top + _CELL + 0.24, match, color=_QUIET, room=_CELL + _ASIDE)

    def neighbour(self, query: int, j: int, share: float, x: float, top: float) -> None:
        theirs, own = self.collection.class_name(j), self.collection.class_name(query)
        differs = bool(theirs and own) and theirs != own
        unknown = self.collection.labels is not None and not (theirs and own)
        colour = _INK if j == query else _OTHER if differs else _QUIET if unknown else _SAME
        self.image(j, x, top, framed=j == query)
        y, number = top + _CELL + 0.06, 0.4
        self.text(x, y, f"{share:.2f}")
        self.bar(x + number, y + 0.03, _CELL - number, share / self.full, colour)
        if j == query:
            self.text(x, y + 0.18, "the query", color=_INK, style="italic", room=_CELL)
        elif differs:
            self.text(x, y + 0.18, f"≠ {theirs}", color=_OTHER, room=_CELL)
        else:
            self.text(x, y + 0.18, theirs or f"image {j}", color=_QUIET, room=_CELL)

    def legend(self) -> list[tuple[float, int, str, str]]:
        """What bars, frames and marks mean: for each its place from the left, its line, a colour, and words."""
        entries = [("", f"bars: p_win, full at {self.full:.2f}"), (_INK, "dark, framed: the query itself")]
        if self.collection.labels is not None:
            entries += [(_SAME, "the query's class"), (_OTHER, "≠ another class")]
        if max(len(row.ids) for row in self.rows) > self.show:
            entries.append(("", f"the {self.show} best are shown"))
        placed, x, line = [], _MARGIN, 0
        for colour, words in entries:
            width = self.measure(words, _SIZE) + (_SWATCH if colour else 0)
            if x > _MARGIN and x + width > self.width - _MARGIN:
                x, line = _MARGIN, line + 1
            placed.append((x, line, colour, words))
            x += width + 0.3
        return placed

    # ---- parts ----

    def image(self, i: int, x: float, y: float, *, framed: bool) -> None:
        """The whole image in the middle of a pale square."""
        self.rectangle(x, y, _CELL, _CELL, EMPTY)
        pixels = self.load(i)
        if pixels is None:
            self.text(x + 0.1, y + _CELL / 2 - 0.08, "cannot be read", color=_QUIET, size=9)
        else:
            shown, width, height = fitted(pixels, round(_CELL * self.pixels))
            left, top = x + _CELL * (1 - width) / 2, y + _CELL * (1 - height) / 2
            box = (left, left + _CELL * width, top + _CELL * height, top)
            self.axes.imshow(shown, extent=box, aspect="auto", interpolation="none", zorder=2)
        if framed:
            self.rectangle(x, y, _CELL, _CELL, _INK, fill=False, linewidth=2, zorder=3)

    def load(self, i: int) -> Tensor | None:
        images, place = self.collection.place(i)
        try:
            return images.load(place)
        except Unreadable:  # it was readable when its neighbours were found
            return None

    def bar(self, x: float, y: float, width: float, share: float, colour: str) -> None:
        """A bar of up to `width` inches on a pale track."""
        self.rectangle(x, y, width, _BAR, _TRACK)
        self.rectangle(x, y, width * share, _BAR, colour)

    def rectangle(self, x: float, y: float, width: float, height: float, colour: str, **style: Any) -> None:
        from matplotlib.patches import Rectangle

        style = {"linewidth": 0, **style}
        self.axes.add_patch(Rectangle((x, y), width, height, color=colour, **style))

    def text(self, x: float, y: float, words: str, *, room: float | None = None, **style: Any) -> None:
        """Words whose upper left corner is at (x, y); what does not fit into `room` inches is cut off."""
        style = {"size": _SIZE, "color": _INK, **style}
        if room is not None:
            words = self.fitting(words, room, style["size"], style.get("weight", "normal"))
        # Names of classes may hold dollars, which would begin a formula.
        self.axes.text(x, y, words, va="top", parse_math=False, **style)

    def fitting(self, words: str, room: float, size: float, weight: str) -> str:
        if self.measure(words, size, weight) <= room:
            return words
        while words and self.measure(words + "…", size, weight) > room:
            words = words[:-1]
        return words.rstrip() + "…"

    def measure(self, words: str, size: float, weight: str = "normal") -> float:
        """Width in inches."""
        from matplotlib.font_manager import FontProperties

        font = FontProperties(size=size, weight=weight)
        width, _, _ = self.ruler.get_text_width_height_descent(words, font, False)
        return width / 72
