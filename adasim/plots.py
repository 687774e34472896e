"""Figures. Each function writes one file and needs nothing but data at hand."""

from __future__ import annotations

from pathlib import Path

import torch

from adasim.data import ImageSet
from adasim.neighbors import NeighborMemory
from adasim.seeding import permutation

_INK, _BAR, _SELF = "#222222", "#4477aa", "#ee6677"


def gallery(
    path: Path, images: ImageSet, memory: NeighborMemory, *, tau: float, seed: int = 0, queries: int = 8
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
    figure, axes = plt.subplots(
        len(shown), columns + 1, figsize=(1.15 * (columns + 1), 1.3 * len(shown)), squeeze=False
    )
    for row, place in enumerate(shown.tolist()):
        query = int(order[place])
        _show(axes[row, 0], images, query, "query" if row == 0 else "")
        for column in range(columns):
            j, share = int(neighbours[place, column]), float(p[place, column])
            axis = axes[row, column + 1]
            if j < 0:
                axis.axis("off")
                continue
            _show(axis, images, j, f"{column + 1}" if row == 0 else "")
            side = images.load(j).shape[-1]
            colour = _SELF if j == query else _BAR
            axis.barh(side * 1.06, side * share, height=side * 0.1, left=-0.5, color=colour, clip_on=False)
            axis.text(side * share, side * 1.06, f" {share:.2f}", va="center", fontsize=7, color=_INK)
            axis.set_xlim(-0.5, side - 0.5)
            axis.set_ylim(side * 1.15, -0.5)
    figure.text(0.995, 0.005, "bars: p_win; red: the query itself", ha="right", fontsize=7, color=_INK)
    figure.tight_layout(pad=0.4)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _show(axis: object, images: ImageSet, i: int, title: str) -> None:
    axis.imshow(images.load(i).permute(1, 2, 0), interpolation="nearest")  # type: ignore[attr-defined]
    axis.set_title(title, fontsize=8, color=_INK, pad=2)  # type: ignore[attr-defined]
    axis.axis("off")  # type: ignore[attr-defined]
