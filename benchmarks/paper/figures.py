"""The figures of docs/results.md, from the curves in the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from .names import METHOD_NAMES, arm_name
from .results import Lines, Results

mpl.use("Agg")
from matplotlib import pyplot as plt

# Okabe and Ito's colours, which colour-blind people tell apart; line styles differ, too.
STYLES = {
    "standard": ("#000000", "-"),
    "nearest": ("#D55E00", ":"),
    "adasim": ("#0072B2", "-"),
    "confident": ("#009E73", "--"),
    "oracle:p=0.5": ("#CC79A7", "-."),
}
LOOKS: Any = {
    "font.size": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "lines.linewidth": 2.2,
    "legend.frameon": False,
    "savefig.dpi": 120,
    "svg.hashsalt": "adasim",
}


def draw(results: Results, folder: Path) -> None:
    """All figures that there are results for."""
    with plt.rc_context(LOOKS):
        _training(results, folder / "results-training.png")
        _under_the_hood(results, folder / "results-temperatures.png")
        _precision(results, folder / "results-precision.png")


def _training(results: Results, path: Path) -> None:
    """k-NN accuracy during training, one panel for each method."""
    methods = [m for m in ("simsiam", "dino", "dino-vit") if results.seeds(m, "standard")]
    if not methods:
        return
    size = (7.2 * len(methods), 6.0)
    figure, axes = plt.subplots(1, len(methods), figsize=size, squeeze=False, layout="constrained")
    for axis, method in zip(axes[0], methods, strict=True):
        for arm, (colour, style) in STYLES.items():
            lines = results.seeds(method, arm)
            if lines:
                count = f", {len(lines)} seeds" if len(lines) > 1 else ", one seed"
                _band(axis, lines, "knn", colour, style, arm_name(arm) + count)
        axis.set(title=METHOD_NAMES[method], xlabel="epoch", ylabel="k-NN accuracy in training, %")
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)  # below: no curve is hidden
    _save(figure, path)


def _under_the_hood(results: Results, path: Path) -> None:
    """The paper's three curves per temperature."""
    arms = {"adasim:tau=0.05": 0.05, "adasim:tau=0.1": 0.1, "adasim": 0.2, "adasim:tau=0.4": 0.4}
    runs = {tau: lines for arm, tau in arms.items() if (lines := results.seeds("simsiam-short", arm))}
    if len(runs) < 2:
        return
    panels = {
        "bootstrapped": "pairs that join two images",
        "partner_accuracy": "partner has the image's class",
        "second_neighbour_accuracy": "second neighbour has its class",
    }
    figure, axes = plt.subplots(1, 3, figsize=(16, 4.6), layout="constrained")
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        for (tau, lines), colour, style in zip(
            runs.items(), ("#56B4E9", "#009E73", "#0072B2", "#D55E00"), (":", "--", "-", "-."), strict=False
        ):
            _band(axis, lines, name, colour, style, f"tau = {tau:g}", 100)
        axis.set(title=title, xlabel="epoch", ylabel="%")
    axes[0].legend(loc="lower right")
    _save(figure, path)


def _precision(results: Results, path: Path) -> None:
    """Precision of partners against the share of images that get one, by measure of sureness."""
    frontiers = results.frontiers()
    if not frontiers:
        return
    _, tables = frontiers[0]
    figure, axis = plt.subplots(figsize=(8.4, 5.2), layout="constrained")
    shown = {
        "cosine in one pass": ("#E69F00", ":", "o"),
        "m_win, w = 10": ("#0072B2", "--", "s"),
        "running mean, decay 0.9": ("#009E73", "-", "D"),
    }
    for row in tables["sureness"]:
        if row["measure"] in shown:
            colour, style, marker = shown[row["measure"]]
            points = [(float(k[4:]), v) for k, v in row.items() if k != "measure" and v is not None]
            x, y = (100 * np.array(values) for values in zip(*points, strict=True))
            axis.plot(
                x, y, color=colour, linestyle=style, marker=marker, label=f"nearest other by {row['measure']}"
            )
    places = [(r["bootstrapped"], r["precision"]) for r in tables["adasim"]]
    x, y = (100 * np.array(values) for values in zip(*places, strict=True))
    axis.scatter(
        x, y, s=26, color="#56B4E9", edgecolor="#0072B2", label="AdaSim's draw, any w, K, tau", zorder=3
    )
    axis.set(xlabel="images that get a partner, %", ylabel="partners of the image's class, %", xlim=(0, 103))
    axis.legend(loc="upper right")
    _save(figure, path)


def _band(
    axis: Any, lines: Lines, name: str, colour: str, style: str, label: str, scale: float = 1.0
) -> None:
    """Mean over seeds, and from the lowest to the highest."""
    curves = [line["curves"][name] for line in lines if name in line["curves"]]
    if not curves:
        return
    length = min(len(curve) for curve in curves)
    values = scale * np.array([[np.nan if v is None else v for v in curve[:length]] for curve in curves])
    measured = ~np.isnan(values).any(axis=0)
    epochs, values = np.arange(1, length + 1)[measured], values[:, measured]
    axis.plot(epochs, values.mean(axis=0), color=colour, linestyle=style, label=label)
    if len(curves) > 1:
        axis.fill_between(
            epochs, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0
        )


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
