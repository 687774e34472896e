"""The figures of docs/results.md, from the curves in the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from adasim.tools.plot import COLOURS, band

from .names import BENCH_NAMES, METHOD_NAMES, arm_name
from .results import Lines, Results, shares

mpl.use("Agg")
from matplotlib import pyplot as plt

BLUE, VERMILLION, GREEN, PINK, ORANGE, SKY, BLACK = COLOURS
STYLES = {  # line styles differ, too
    "standard": (BLACK, "-"),
    "nearest": (VERMILLION, ":"),
    "adasim": (BLUE, "-"),
    "confident": (GREEN, "--"),
    "oracle:p=0.5": (PINK, "-."),
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
        _partners(results, folder / "results-partners.png")


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
            runs.items(), (SKY, GREEN, BLUE, VERMILLION), (":", "--", "-", "-."), strict=False
        ):
            _band(axis, lines, name, colour, style, f"tau = {tau:g}", 100)
        axis.set(title=title, xlabel="epoch", ylabel="%")
    axes[0].legend(loc="lower right")
    _save(figure, path)


def _precision(results: Results, path: Path) -> None:
    """Precision of partners against the share of images that get one, by measure of sureness."""
    tables = results.frontier()
    figure, axis = plt.subplots(figsize=(8.4, 5.2), layout="constrained")
    shown = {
        "cosine in one pass": (ORANGE, ":", "o"),
        "m_win, w = 10": (BLUE, "--", "s"),
        "running mean, decay 0.9": (GREEN, "-", "D"),
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
    axis.scatter(x, y, s=26, color=SKY, edgecolor=BLUE, label="AdaSim's draw, any w, K, tau", zorder=3)
    axis.set(xlabel="images that get a partner, %", ylabel="partners of the image's class, %", xlim=(0, 103))
    axis.legend(loc="upper right")
    _save(figure, path)


SCATTERED = {  # which arms the first panels show, and how many points their names stand beside and above them
    "adasim": (9, -6),
    "adasim:k=20,tau=1": (9, 12),
    "nearest": (9, 0),
    "confident": (9, -14),
    "oracle:p=0.5": (-9, -26),
    "oracle:p=0": (-9, 0),
    "control:partner=random": (9, 12),
    "control:partner=right": (-9, 0),
    "control:partner=only-wrong": (9, -14),
}
RIGHT_ONES = (  # partners of the image's class, from near to far, and the more of them
    "control:partner=only-right",
    "control:partner=any-right",
    "control:partner=right,nearest=0,farthest=0.1",
    "control:partner=right",
    "control:partner=right,nearest=0.9",
    "control:partner=right,share=0.05",
    "control:partner=right,share=0.5",
)


ALL_BENCHES = {  # AdaSim's points in the last panel, and how many points their names stand beside and above them
    "simsiam": ("SimSiam from scratch", (9, 0)),
    "simsiam-short": ("100 epochs", (-9, 0)),
    "simsiam-more": ("20,000 images", (9, 0)),
    "simsiam-weak": ("crops and flips", (-9, 0)),
    "infonce": ("InfoNCE", (-9, 4)),
    "dino": ("DINO from scratch", (9, 0)),
    "dino-vit": ("DINO, small ViT", (-9, 0)),
    "late": ("SimSiam after 12 epochs with labels", (-9, 26)),
    "late-low-3": ("low rate, after 3 epochs", (-9, 13)),
    "late-low-12": ("low rate, after 12", (-9, -4)),
    "late-low-40": ("low rate, after 40", (9, -3)),
    "cifar-96": ("ImageNet's weights, CIFAR-10", (9, -4)),
    "clothes": ("ImageNet's weights, clothes", (9, -10)),
    "glyphs-0": ("letters, first draw", (9, 3)),
    "glyphs-1": ("letters, second draw", (9, 9)),
}


def _partners(results: Results, path: Path) -> None:
    """The gain of arms against how many of their partners are right, one panel for each bench; where all partners
    are right, against which they are; and that of AdaSim, on all benches."""
    benches = {m: title for m, title in BENCH_NAMES.items() if results.seeds(m, "control:partner=random")}
    rows = (len(benches) + 3) // 2
    figure, grid = plt.subplots(rows, 2, figsize=(14, 5.6 * rows), layout="constrained")
    axes = grid.flatten()
    for axis in axes[len(benches) + 2 :]:
        axis.set_axis_off()
    for axis, (method, title) in zip(axes, benches.items(), strict=False):
        for arm, beside in SCATTERED.items():
            gains, joined, precision = _gains(results, method, arm)
            if not gains:
                continue
            own = arm.startswith(("adasim", "nearest"))
            name = f"{arm_name(arm)}\n{joined:.0f}% joined, {len(gains)} seed{'s' * (len(gains) > 1)}"
            _point(axis, precision, gains, own, name, beside)
        axis.margins(y=0.14)
        axis.axhline(0, color=BLACK, linewidth=1)
        axis.set(title=title, xlabel="partners of the image's class, %", xlim=(-4, 104))
        axis.set(ylabel="k-NN, gain over standard pairs, points")
    last, shown = axes[len(benches)], [arm for arm in RIGHT_ONES if _gains(results, "late", arm)[0]]
    for place, arm in enumerate(shown):
        gains, joined, _ = _gains(results, "late", arm)
        last.plot(gains, [place] * len(gains), ".", color=ORANGE, alpha=0.6)
        last.plot(float(np.mean(gains)), place, "D", markersize=9, color=ORANGE)
        label = f"{arm_name(arm)} ({joined:.0f}% joined, {len(gains)} seed{'s' * (len(gains) > 1)})"
        last.annotate(
            label, (0.0, place - 0.22), (6, 0), textcoords="offset points", fontsize=10, va="center"
        )
    last.axvline(0, color=BLACK, linewidth=1)
    last.set(
        title="From a trained encoder: which right partners?", xlabel="k-NN, gain over standard pairs, points"
    )
    last.set(yticks=[], ylim=(len(shown) - 0.5, -0.6))
    _on_all_benches(results, axes[len(benches) + 1])
    _save(figure, path)


def _on_all_benches(results: Results, axis: Any) -> None:
    """AdaSim's gain on each bench against how many of its partners are right there."""
    for method, (name, beside) in ALL_BENCHES.items():
        gains, _, precision = _gains(results, method, "adasim")
        if not gains:
            continue
        _point(axis, precision, gains, True, f"{name} ({len(gains)})", beside)
    axis.margins(y=0.14)
    axis.axhline(0, color=BLACK, linewidth=1)
    axis.set(title="AdaSim on all benches (seeds in brackets)", xlabel="partners of the image's class, %")
    axis.set(ylabel="k-NN, gain over standard pairs, points", xlim=(0, 100))


def _point(axis: Any, x: float, gains: list[float], ours: bool, name: str, beside: tuple[int, int]) -> None:
    """The gain of each seed, their mean, and its name so many points beside and above it."""
    colour, y = BLUE if ours else ORANGE, float(np.mean(gains))
    axis.plot([x] * len(gains), gains, ".", color=colour, alpha=0.6)
    axis.plot(x, y, "o" if ours else "D", markersize=9, color=colour)
    side = "left" if beside[0] > 0 else "right"
    axis.annotate(name, (x, y), beside, textcoords="offset points", fontsize=10, ha=side, va="center")


def _gains(results: Results, method: str, arm: str) -> tuple[list[float], float, float]:
    """The gain of each seed, the share of joined pairs and how many of these are right, both in percent."""
    standard = {line["seed"]: line["knn"] for line in results.seeds(method, "standard")}
    lines = [line for line in results.seeds(method, arm) if line["seed"] in standard and "knn" in line]
    if not lines:
        return [], 0.0, 0.0
    right, wrong = (100 * float(np.mean(part)) for part in zip(*map(shares, lines), strict=True))
    return (
        [line["knn"] - standard[line["seed"]] for line in lines],
        right + wrong,
        100 * right / (right + wrong),
    )


def _band(
    axis: Any, lines: Lines, name: str, colour: str, style: str, label: str, scale: float = 1.0
) -> None:
    """Mean over seeds, and from the lowest to the highest."""
    curves = [
        {
            float(epoch + 1): scale * value
            for epoch, value in enumerate(line["curves"].get(name, ()))
            if value is not None
        }
        for line in lines
    ]
    seeds = band(curves)
    axis.plot(seeds.epochs, seeds.mean, color=colour, linestyle=style, label=label)
    if len(curves) > 1:
        axis.fill_between(seeds.epochs, seeds.low, seeds.high, color=colour, alpha=0.15, linewidth=0)
    for curve in seeds.rest:  # of seeds that went on longer than another
        axis.plot(list(curve), list(curve.values()), color=colour, linestyle=style, linewidth=1.2)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
