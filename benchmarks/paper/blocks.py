"""The tables and sentences that docs/results.md and README.md take from the results, as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import published
from .names import BENCH_NAMES, METHOD_NAMES, arm_name
from .results import Results, figure_of, gain_of, shares
from .tables import TABLES

STEP_SHARE = Path(__file__).parents[1] / "results" / "step_share.json"
ARMS = ("standard", "nearest", "adasim")


def blocks(results: Results) -> dict[str, str]:
    """Every table by its name in the texts."""
    main = [(method, arm) for method in published.MAIN for arm in ARMS]
    policies = [("simsiam", arm) for arm in ("standard", "adasim", *results.arms("simsiam", "confident"))]
    contrast = [("nnclr", "standard"), *(("infonce", arm) for arm in ARMS)]
    more = [("simsiam-more", arm) for arm in ("standard", "adasim", "confident")]
    weak = [("simsiam-weak", arm) for arm in ("standard", "adasim", "confident", "oracle:p=0.5")]
    oracle = [("simsiam", arm) for arm in ("standard", "oracle:p=0.5", "oracle:p=0")]
    return {
        "results": bench_table(results),
        "main": arm_table(results, main, published.MAIN),
        "oracle": arm_table(results, oracle, {"simsiam": published.ORACLE}),
        "ablation": ablation_table(results),
        "frontier": frontier_table(results),
        "fewshot": fewshot_table(results),
        "segmentation": segmentation_table(results),
        "runtime": runtime_table(results),
        "contrast": arm_table(results, contrast, {}),
        "weak": arm_table(results, weak, {}),
        "policies": arm_table(results, policies, {}),
        "more": arm_table(results, more, {}),
        "late": partners_table(results, "late"),
        "partners": partners_table(results, "simsiam"),
        "quality": partners_table(results, "late-low-3", "late-low-12", "late-low-40"),
        "continued": partners_table(results, "clothes", "cifar-96"),
        "glyphs": partners_table(results, "glyphs-0", "glyphs-1", "glyphs-dino-0", "glyphs-dino-1"),
        "sureness": sureness_table(results),
        "collapse": collapse_list(results),
        "effort": effort(results),
        "pairing": pairing(results),
    }


def arm_table(results: Results, rows: list[tuple[str, str]], paper: dict[str, Any]) -> str:
    """k-NN and linear accuracy of each arm, and its gains over standard pairs of the same seeds."""
    heads = ["method", "pairs", *(["paper"] if paper else []), "seeds", "k-NN", "gain", "linear", "gain"]
    body = []
    for method, arm in rows:
        lines = results.seeds(method, arm)
        row = [METHOD_NAMES[method], arm_name(arm)]
        if paper:
            row.append(paper_figure(paper.get(method, {}), arm))
        failed = sum("failed" in line for line in lines)
        row.append(f"{len(lines)}{f', {failed} failed' if failed else ''}" if lines else "not run")
        for name in ("knn", "linear"):
            row += [figure_of(lines, name), gain_of(lines, results.seeds(method, "standard"), name)]
        body.append([*row, bootstrapped(lines)])
    return markdown([*heads, "bootstrapped"], body)


def bench_table(results: Results) -> str:
    """The benches below each other: k-NN of standard pairs, and what other pairs gain over it; seeds in brackets."""
    arms = ("adasim", "nearest", "control:partner=random", "control:partner=right")
    rows = []
    for method, name in BENCH_NAMES.items():
        standard = results.seeds(method, "standard")
        if not standard:
            continue
        start = knn_before(results, method)
        row = [name, f"{start:.1f}" if start else "", f"{figure_of(standard, 'knn')} ({len(standard)})"]
        for arm in arms:
            lines = results.seeds(method, arm)
            row.append(f"{gain_of(lines, standard, 'knn')} ({len(lines)})" if lines else "not run")
        rows.append(row)
    return markdown(["bench", "before", "standard", *map(arm_name, arms)], rows)


def knn_before(results: Results, method: str) -> float | None:
    """Of the encoder that a bench starts from; None where that is an untrained one."""
    return next(
        (line["knn_start"] for line in results.seeds(method, "standard") if "knn_start" in line), None
    )


def partners_table(results: Results, *methods: str) -> str:
    """Every arm that was run, with how many images it joins and how many of those rightly."""
    heads = ["pairs", "seeds", "joined", "right", "k-NN", "gain", "linear", "gain"]
    rows = []
    for method in methods:
        standard = results.seeds(method, "standard")
        planned = [cell.arm for cells in TABLES.values() for cell in cells if cell.method == method]
        for arm in dict.fromkeys(planned):
            lines = results.seeds(method, arm)
            if not lines:
                continue
            parts = [shares(line) for line in lines]
            joined = sum(right + wrong for right, wrong in parts) / len(parts)
            rights = sum(right for right, _ in parts) / len(parts)
            row = [
                arm_name(arm),
                str(len(lines)),
                percent(joined),
                percent(rights / joined) if joined > 0.001 else "",
            ]
            for name in ("knn", "linear"):
                row += [figure_of(lines, name), gain_of(lines, standard, name)]
            start = knn_before(results, method)
            name = METHOD_NAMES[method] if start is None else f"{METHOD_NAMES[method]}: {start:.1f}"
            rows.append([name, *row] if len(methods) > 1 else row)
    if not rows:
        return "Not run yet."
    first = "bench" if knn_before(results, methods[0]) is None else "bench: k-NN before"
    return markdown([*([first] if len(methods) > 1 else []), *heads], rows)


def ablation_table(results: Results) -> str:
    settings = {"tau": (0.05, 0.1, 0.2, 0.4), "window": (1, 5, 10, 20), "k": (3, 5, 10)}
    usual = {"tau": 0.2, "window": 5, "k": 5}
    rows = []
    for name, values in settings.items():
        for value in values:
            arm = "adasim" if value == usual[name] else f"adasim:{name}={value}"
            lines = results.seeds("simsiam-short", arm)
            shown = {"window": "w", "k": "K"}.get(name, name)
            found = [
                figure_of(lines, "knn"),
                gain_of(lines, results.seeds("simsiam-short", "standard"), "knn"),
            ]
            rows.append([f"{shown} = {value:g}", paper_figure(published.ABLATION, paper_arm(name, value))])
            rows[-1] += [*found, figure_of(lines, "linear"), bootstrapped(lines), partners_right(lines)]
    baseline = results.seeds("simsiam-short", "standard")
    first = ["tau = 0 (standard)", paper_figure(published.ABLATION, "standard"), figure_of(baseline, "knn")]
    rows.insert(0, [*first, "", figure_of(baseline, "linear"), bootstrapped(baseline), ""])
    return markdown(["setting", "paper", "k-NN", "gain", "linear", "bootstrapped", "of the same class"], rows)


def paper_arm(name: str, value: float) -> str:
    """The paper's base is tau = 0.2, w = 10, K = 3."""
    base = {"tau": 0.2, "window": 10, "k": 3}
    return "adasim" if value == base[name] else f"adasim:{name}={value:g}"


def frontier_table(results: Results) -> str:
    """AdaSim's gate, share and precision from one frozen encoder, for tau = 0.2 and the extremes of tau."""
    rows = []
    for row in results.frontier()["adasim"]:
        if row["tau"] in (0.05, 0.2, 0.4):
            found = [percent(row[name]) for name in ("gate", "bootstrapped", "precision")]
            rows.append([str(row["w"]), str(row["K"]), f"{row['tau']:g}", *found])
    return markdown(["w", "K", "tau", "gate open", "bootstrapped", "of the same class"], rows)


def sureness_table(results: Results) -> str:
    rows = results.frontier()["sureness"]
    shares_kept = [name for name in rows[0] if name != "measure"]
    body = [[row["measure"], *(percent(row[share]) for share in shares_kept)] for row in rows]
    return markdown(["nearest other image by", *shares_kept], body)


def fewshot_table(results: Results) -> str:
    """Few-shot accuracy on each target, and the gain of their mean over standard pairs of the same seeds."""
    rows = []
    transfer = results.transfer()
    for (method, arm), lines in transfer.items():
        paper = published.FEWSHOT.get(method, {})
        cell = paper_figure(paper, arm) if arm in paper else ""
        row = [METHOD_NAMES[method], arm_name(arm), cell, str(len(lines))]
        row += [figure_of(lines, name) for name in ("cifar10", "patterns", "mean")]
        rows.append([*row, gain_of(lines, transfer.get((method, "standard"), []), "mean")])
    heads = ["method", "pairs", "paper", "seeds", "CIFAR-10", "generated patterns", "mean"]
    return markdown([*heads, "gain"], rows)


def segmentation_table(results: Results) -> str:
    """Mean IoU, and its gain over standard pairs of the same seeds."""
    rows = []
    transfer = results.transfer()
    for (method, arm), lines in transfer.items():
        paper = published.SEGMENTATION.get(method, {})
        cell = paper_figure(paper, arm) if arm in paper else ""
        gain = gain_of(lines, transfer.get((method, "standard"), []), "miou")
        rows.append(
            [METHOD_NAMES[method], arm_name(arm), cell, str(len(lines)), figure_of(lines, "miou"), gain]
        )
    return markdown(["method", "pairs", "paper", "seeds", "mean IoU", "gain"], rows)


def runtime_table(results: Results) -> str:
    rows = []
    for batch, (without, with_memory) in published.RUNTIME.items():
        rows.append(runtime_row("paper: ViT-S/16, 1.28 M images, four MI250X", batch, without, with_memory))
    for line in results.lines("runtime"):
        if "recipe" in line:  # of a cluster
            continue
        threads = f"{line['threads']} thread{'s' if line['threads'] > 1 else ''}"
        where = f"here: small ResNet, 5,000 images, {threads} of a CPU"
        rows.append(runtime_row(where, line["batch"], line["without"], line["with"]))
    share = json.loads(STEP_SHARE.read_text())["rows"][0]
    without = share["standard step s"]
    added = share["observe s"] + share["draw s"]
    rows.append(
        runtime_row("here: ViT-S/16, 1.28 M images, 2 threads of a CPU", 128, without, without + added)
    )
    return markdown(["where", "batch", "without, s", "with, s", "added"], rows)


def runtime_row(where: str, batch: int, without: float, with_memory: float) -> list[str]:
    added = with_memory / without - 1
    return [
        where,
        str(batch),
        f"{without:.4g}",
        f"{with_memory:.4g}",
        f"{added:.2%}" if added < 0.01 else f"{added:.1%}",
    ]


def collapse_list(results: Results) -> str:
    """What the monitor said first of each run, or why the run ended, in its own words."""
    said = {
        cell: [*line["collapse"], *filter(None, [line.get("failed")])] for cell, line in results.cells.items()
    }
    found = [(cell, sentences[0]) for cell, sentences in sorted(said.items()) if sentences]
    return (
        "\n".join(f"- `{cell}`: *{sentence}*" for cell, sentence in found)
        or "The monitor has said nothing so far."
    )


def pairing(results: Results) -> str:
    """Whose gains are not over a baseline of the same bits."""
    found = ", ".join(f"`{cell}`" for cell in results.unpaired())
    return (
        f"The first epoch of these runs, which joins no two images, is not that of standard pairs of the same seed: "
        f"another version of the code made one of the two. Their gains hold the noise of two unpaired runs: {found}."
        if found
        else "In every run the first epoch, which joins no two images, is that of standard pairs of the same seed."
    )


def effort(results: Results) -> str:
    lines = list(results.cells.values())
    hours = sum(line["cpu_seconds"] for line in lines) / 3600
    resumed = sum(line["resumed"] for line in lines)
    before = (
        f" {resumed} of them went on after a break; what they used before it is not counted."
        if resumed
        else ""
    )
    dates = sorted({line["date"] for line in lines})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    cpu = f"{hours:.1f} hours of CPU time in all"
    return f"{len(lines)} runs on one core each, {cpu} ({when}), torch {lines[0]['torch']}.{before}"


def bootstrapped(lines: list[dict[str, Any]]) -> str:
    """Pairs that join two images, in the last epoch."""
    found = [line["curves"]["bootstrapped"][-1] for line in lines if line["curves"]]
    return percent(sum(found) / len(found)) if found else ""


def partners_right(lines: list[dict[str, Any]]) -> str:
    """Of the pairs that join two images, how many are of one class, in the last epoch."""
    parts = [shares(line, slice(-1, None)) for line in lines if line["curves"]]
    found = [right / (right + wrong) for right, wrong in parts if right + wrong]
    return percent(sum(found) / len(found)) if found else ""


def paper_figure(paper: dict[str, Any], arm: str) -> str:
    if arm not in paper:
        return "not given"
    figures_ = paper[arm]
    if figures_ is None:
        return "collapse"
    return (
        f"{figures_:.1f}" if isinstance(figures_, float) else " / ".join(f"{value:.1f}" for value in figures_)
    )


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}%"


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
