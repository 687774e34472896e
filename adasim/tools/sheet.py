"""A sheet of images and words, placed in inches from its upper left corner: what `similar` and `gallery` draw on."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from adasim.data import ImageSet, Unreadable
from adasim.util.terminal import without_font_warnings

INK, PAPER = "#1d1d1f", "#ffffff"
_EMPTY = "#f1f1f3"  # where an image leaves room in its square
_PIXELS = {"png": 160, "pdf": 300}  # per inch, of images
_SCRIPTS = (  # fonts of other scripts, for names: whichever of them a machine has
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "PingFang SC", "Hiragino Sans", "Microsoft YaHei", "MS Gothic"),
    *("Malgun Gothic", "Apple SD Gothic Neo", "WenQuanYi Zen Hei", "Noto Sans Devanagari", "Noto Sans Thai"),
    "Arial Unicode MS",
)


class Sheet:
    """A matplotlib figure of one pair of axes in inches: axes for every image would take most of the time.

    It is made, and drawn on, within `plain_look`.

    Args:
        width, height: of the sheet.
        format: of the file that `render` makes of it: "png", or "pdf", whose text is text.
    """

    def __init__(self, width: float, height: float, format: str = "png") -> None:
        from matplotlib.figure import Figure

        self._format = format
        self.figure = Figure(figsize=(width, height), facecolor=PAPER)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")

    def render(self) -> bytes:
        """The content of the file; the same for the same picture."""
        buffer = io.BytesIO()
        date = {"CreationDate": None} if self._format == "pdf" else {}
        with plain_look():
            self.figure.savefig(
                buffer, format=self._format, dpi=_PIXELS["png"], facecolor=PAPER, metadata=date
            )
        return buffer.getvalue()

    def image(self, pixels: Tensor | None, x: float, y: float, side: float, quiet: str) -> None:
        """The whole image (3, H, W) in the middle of a pale square; None, in `quiet` words, cannot be read."""
        self.rectangle(x, y, side, side, _EMPTY)
        if pixels is None:
            self.text(x + 0.1, y + side / 2 - 0.08, "cannot be read", color=quiet, size=9)
            return
        shown, width, height = fitted(pixels, round(side * _PIXELS[self._format]))
        left, top = x + side * (1 - width) / 2, y + side * (1 - height) / 2
        box = (left, left + side * width, top + side * height, top)
        self.axes.imshow(shown, extent=box, aspect="auto", interpolation="none", zorder=2)

    def rectangle(self, x: float, y: float, width: float, height: float, colour: str, **style: Any) -> None:
        from matplotlib.patches import Rectangle

        style = {"linewidth": 0, **style}
        self.axes.add_patch(Rectangle((x, y), width, height, color=colour, **style))

    def text(self, x: float, y: float, words: str, *, room: float | None = None, **style: Any) -> None:
        """Words whose upper left corner is at (x, y); what does not fit into `room` inches is cut off."""
        style = {"color": INK, **style}
        if room is not None:
            words = _cut(words, room, style["size"], style.get("weight", "normal"))
        # Names may hold dollars, which would begin a formula.
        self.axes.text(x, y, words, va="top", parse_math=False, **style)


def text_width(words: str, size: float, weight: str = "normal") -> float:
    """In inches."""
    from matplotlib.font_manager import FontProperties

    width, _, _ = _ruler().get_text_width_height_descent(
        words, FontProperties(size=size, weight=weight), False
    )
    return width / 72


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


def load_readable(images: ImageSet, i: int) -> Tensor | None:
    """The image (3, H, W), or None: it was readable when its features were made."""
    try:
        return images.load(i)
    except Unreadable:
        return None


@contextmanager
def plain_look() -> Iterator[None]:
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


@cache
def _ruler() -> Any:
    from matplotlib.backends.backend_agg import RendererAgg

    return RendererAgg(16, 16, 72)


def _cut(words: str, room: float, size: float, weight: str) -> str:
    if text_width(words, size, weight) <= room:
        return words
    while words and text_width(words + "…", size, weight) > room:
        words = words[:-1]
    return words.rstrip() + "…"
