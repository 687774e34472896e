"""Figures. Each function writes one file and needs nothing but data at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from adasim.data import ImageSet
from adasim.neighbors import NeighborMemory
from adasim.seeding import permutation

_INK, _BAR, _SELF = "#222222", "#4477aa", "#ee6677"


def gallery(
    path: Path, images: ImageSet, memory: NeighborMemory, *, tau: float, seed: int = 0, queries: int = 6
) -> None:
    """Random queries, one a row, with their support by p_win: the image, a bar for its probability.

    Only queries whose gate is open are shown, as only these draw partners (the paper's gallery of supports).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    order = permutation(seed, "gallery", 0, len(images))
    neighbours, p = memory.distribution(order, tau)
    open_gates = (neighbours[:, 0] == order).nonzero()[:, 0][:queries]
    shown = open_gates if len(open_gates) else torch.arange(min(queries, len(order)))
    columns = neighbours.shape[1]
    height = 1.3 * len(shown) + 0.25
    figure, axes = plt.subplots(
        len(shown), columns + 1, figsize=(1.15 * (columns + 1), height), squeeze=False
    )
    for row, place in enumerate(shown.tolist()):
        query = int(order[place])
        _show(axes[row, 0], images, query, None, _INK)
        for column in range(columns):
            j, share = int(neighbours[place, column]), float(p[place, column])
            if j < 0:
                axes[row, column + 1].axis("off")
            else:
                _show(axes[row, column + 1], images, j, share, _SELF if j == query else _BAR)
    axes[0, 0].set_title("image", fontsize=8, color=_INK)
    axes[0, 1].set_title("its support, best first", fontsize=8, color=_INK, loc="left")
    figure.tight_layout(pad=0.4, rect=(0, 0.25 / height, 1, 1))
    figure.text(
        0.99, 0.06 / height, "bars: p_win (red: the image itself)", ha="right", fontsize=7, color=_INK
    )
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _show(axis: Any, images: ImageSet, i: int, share: float | None, colour: str) -> None:
    """One image with room below it for a bar of length `share`."""
    pixels = images.load(i).permute(1, 2, 0)
    side = pixels.shape[1]
    axis.imshow(pixels, interpolation="nearest")
    axis.set_xlim(-0.5, side - 0.5)
    axis.set_ylim(side * 1.15, -0.5)
    axis.axis("off")
    if share is not None:
        axis.barh(side * 1.06, side * share, height=side * 0.1, left=-0.5, color=colour)
        axis.text(side * share, side * 1.06, f" {share:.2f}", va="center", fontsize=7, color=_INK)
