"""The picture of `adasim similar`: the image asked for, and its nearest ones with their scores, on one sheet."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from adasim.data import Unreadable
from adasim.tools.similar import Similar
from adasim.util.files import atomic_write
from adasim.util.terminal import printable, without_font_warnings

_INK, _QUIET, _ACCENT, _PAPER = "#1d1d1f", "#75757a", "#2f6fab", "#ffffff"
EMPTY = "#f1f1f3"
"""Where an image leaves room in its square."""
_CELL, _CAPTION, _GAP, _MARGIN = 1.6, 0.42, 0.16, 0.28  # inches
_PIXELS = 160  # per inch
_LETTERS = 24  # of a file's name


def contact_sheet(path: Path, found: Similar, title: str) -> None:
    """Write the sheet as a PNG, whole or not at all. `title` names the image asked for."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    columns = min(5, max(1, len(found)))
    rows = max(2, math.ceil(len(found) / columns))  # beside the query, which is two cells high
    large = 2 * _CELL + _CAPTION + _GAP
    pitch_x, pitch_y = _CELL + _GAP, _CELL + _CAPTION + _GAP
    left = _MARGIN + large + 2 * _GAP  # of the answers
    width, height = left + columns * pitch_x - _GAP + _MARGIN, rows * pitch_y - _GAP + 2 * _MARGIN
    figure = Figure(figsize=(width, height), dpi=_PIXELS, facecolor=_PAPER)

    def cell(
        pixels: Tensor | None, x: float, y: float, side: float, top: str, below: str, colour: str
    ) -> None:
        """A square of `side` inches whose upper left corner lies (x, y) from that of the sheet, and two lines."""
        axis = figure.add_axes((x / width, 1 - (y + side) / height, side / width, side / height))
        _show(axis, pixels, round(side * _PIXELS))
        plain: dict[str, Any] = {"va": "top", "parse_math": False}  # a file name may hold dollars
        figure.text(
            x / width, 1 - (y + side + 0.07) / height, top, size=8, color=colour, weight="bold", **plain
        )
        figure.text(x / width, 1 - (y + side + 0.22) / height, below, size=6.5, color=_QUIET, **plain)

    cell(found.query, _MARGIN, _MARGIN, large, "your image", _short(title, 2 * _LETTERS), _ACCENT)
    for place, (i, score, name) in enumerate(zip(found.ids, found.scores, found.files, strict=True)):
        row, column = divmod(place, columns)
        x, y = left + column * pitch_x, _MARGIN + row * pitch_y
        cell(_load(found, i), x, y, _CELL, f"{place + 1}.  {score:.3f}", _short(name, _LETTERS), _INK)
    buffer = io.BytesIO()
    with without_font_warnings():
        figure.savefig(buffer, format="png", facecolor=_PAPER)
    atomic_write(path, buffer.getvalue())


def _show(axis: Any, pixels: Tensor | None, target: int) -> None:
    """The whole image in the middle of a pale square of `target` pixels, its proportions kept."""
    axis.set_xticks([])
    axis.set_yticks([])
    for line in axis.spines.values():
        line.set_visible(False)
    axis.set_facecolor(EMPTY)
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)
    if pixels is None:
        axis.text(0.5, 0.5, "cannot be read", ha="center", va="center", size=7, color=_QUIET)
        return
    shown, w, h = fitted(pixels, target)
    box = (0.5 - w / 2, 0.5 + w / 2, 0.5 - h / 2, 0.5 + h / 2)
    axis.imshow(shown, extent=box, interpolation="none")
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)


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


def _load(found: Similar, i: int) -> Tensor | None:
    try:
        return found.images.load(i)
    except Unreadable:  # it was readable once: its features were kept
        return None


def _short(name: str, letters: int) -> str:
    """A name that fits below its image: the end says more than the beginning."""
    name = printable(name)
    return name if len(name) <= letters else "…" + name[1 - letters :]
