"""Write the tables of docs/results.md, its figures, and the README's table of results from the committed results.

    python -m benchmarks.paper.report            # after new lines in benchmarks/paper/results
    python -m benchmarks.paper.report --check    # only say whether the texts are up to date

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`; the words around it are written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from . import figures, published
from .cell import RESULTS
from .names import METHOD_NAMES, arm_name
from .results import Results, figure_of, gain_of
from .weighing import FITTED, weigh

ROOT = Path(__file__).parents[2]
TEXTS = (ROOT / "README.md", ROOT / "docs" / "results.md")
ARMS = ("standard", "nearest", "adasim")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a text is out of date")
    args = parser.parse_args()
    results = Results(RESULTS)
    tables = blocks(results)
    stale = []
    for path in TEXTS:
        old = path.read_text()
        new = filled(old, tables)
        if new != old:
            stale.append(path.name)
            if not args.check:
                path.write_text(new)
    if args.check:
        sys.exit(f"Out of date: {', '.join(stale)}. Run python -m benchmarks.paper.report." if stale else 0)
    figures.draw(results, ROOT / "docs" / "images")
    print(f"Changed: {', '.join(stale) or 'no text'}; figures drawn.")


def filled(text: str, tables: dict[str, str]) -> str:
    """The text with each marked table replaced.

    >>> filled("<!-- a -->old<!-- /a -->", {"a": "new"})
    '<!-- a -->\\nnew\\n<!-- /a -->'
    """
    for name, table in tables.items():
        pattern = re.compile(rf"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
        text = pattern.sub(lambda _, n=name, t=table: f"<!-- {n} -->\n{t}\n<!-- /{n} -->", text)  # type: ignore[misc]
    return text


def blocks(results: Results) -> dict[str, str]:
    """Every table by its name in the texts."""
    simsiam = [("simsiam", arm) for arm in (*ARMS, "confident", "oracle:p=0.5")]
    main = [(method, arm) for method in published.MAIN for arm in ARMS]
    policies = [("simsiam", arm) for arm in ("standard", "adasim", *results.arms("simsiam", "confident"))]
    policies += [("dino", arm) for arm in ("standard", "adasim", "confident")]
    contrast = [("nnclr", "standard"), *(("infonce", arm) for arm in ARMS)]
    weak = [("simsiam-weak", arm) for arm in ("standard", "adasim", "confident", "oracle:p=0.5")]
    oracle = [("simsiam", arm) for arm in ("standard", "oracle:p=0.5", "oracle:p=0")]
    return {
        "results": arm_table(results, simsiam, {}),
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
        "weighing": weighing_table(results),
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
        body.append([*row, joined(lines)])
    return markdown([*heads, "joined"], body)


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
            rows[-1] += [*found, figure_of(lines, "linear"), joined(lines), partners_right(lines)]
    baseline = results.seeds("simsiam-short", "standard")
    first = ["tau = 0 (standard)", paper_figure(published.ABLATION, "standard"), figure_of(baseline, "knn")]
    rows.insert(0, [*first, "", figure_of(baseline, "linear"), joined(baseline), ""])
    return markdown(["setting", "paper", "k-NN", "gain", "linear", "joined", "of the same class"], rows)


def paper_arm(name: str, value: float) -> str:
    """The paper's base is tau = 0.2, w = 10, K = 3."""
    base = {"tau": 0.2, "window": 10, "k": 3}
    return "adasim" if value == base[name] else f"adasim:{name}={value:g}"


def frontier_table(results: Results) -> str:
    """AdaSim's gate, share and precision from one frozen encoder, for tau = 0.2 and the extremes of tau."""
    rows = []
    for run, tables in results.frontiers():
        for row in tables["adasim"]:
            if row["tau"] in (0.05, 0.2, 0.4):
                shares = [percent(row[name]) for name in ("gate", "bootstrapped", "precision")]
                rows.append([run, str(row["w"]), str(row["K"]), f"{row['tau']:g}", *shares])
    return markdown(["encoder", "w", "K", "tau", "gate open", "joined", "of the same class"], rows)


def weighing_table(results: Results) -> str:
    """What right and wrong partners are worth to SimSiam, and which arms keep to it."""
    found = weigh(results, "simsiam", [*FITTED, *results.arms("simsiam", "confident")])
    if found is None:
        return "Too few runs so far."
    rule, rows = found
    sentence = (
        f"gain = {rule.a:.0f} x right - {rule.b:.0f} x wrong: partners help if more than {rule.break_even:.0%} of "
        f"them are of the image's class."
    )
    body = []
    for row in rows:
        gains = [f"{row.gain:+.1f}", f"{row.expected:+.1f}", "yes" if row.fitted else "no"]
        body.append([arm_name(row.arm), percent(row.right), percent(row.wrong), *gains])
    return sentence + "\n\n" + markdown(["pairs", "right", "wrong", "gain", "by the rule", "fitted"], body)


def sureness_table(results: Results) -> str:
    rows: list[list[str]] = []
    shares: tuple[str, ...] = ()
    for run, tables in results.frontiers():
        shares = tuple(name for name in tables["sureness"][0] if name != "measure")
        for row in tables["sureness"]:
            rows.append([run, row["measure"], *(percent(row[share]) for share in shares)])
    return markdown(["encoder", "nearest other image by", *shares], rows)


def fewshot_table(results: Results) -> str:
    rows = []
    targets = ("cifar10", "fashion", "patterns")
    for (method, arm), lines in results.transfer().items():
        means = [mean_text([line["fewshot"][target][0] for line in lines]) for target in targets]
        average = mean_text([sum(line["fewshot"][t][0] for t in targets) / len(targets) for line in lines])
        paper = published.FEWSHOT.get(method, {})
        cell = paper_figure(paper, arm) if arm in paper else ""
        rows.append([METHOD_NAMES[method], arm_name(arm), cell, str(len(lines)), *means, average])
    heads = ["method", "pairs", "paper", "seeds", "CIFAR-10", "Fashion-MNIST", "generated patterns", "mean"]
    return markdown(heads, rows)


def segmentation_table(results: Results) -> str:
    rows = []
    for (method, arm), lines in results.transfer().items():
        if arm in (*ARMS, "confident", "oracle:p=0.5"):
            paper = published.SEGMENTATION.get(method, {})
            cell = paper_figure(paper, arm) if arm in paper else ""
            rows.append([METHOD_NAMES[method], arm_name(arm), cell, str(len(lines))])
            rows[-1].append(mean_text([line["segmentation"] for line in lines]))
    return markdown(["method", "pairs", "paper", "seeds", "mean IoU"], rows)


def runtime_table(results: Results) -> str:
    rows = []
    for batch, (without, with_memory) in published.RUNTIME.items():
        rows.append(runtime_row("paper: ViT-S/16, 1.28 M images, four MI250X", batch, without, with_memory))
    for line in results.lines("runtime"):
        threads = f"{line['threads']} thread{'s' if line['threads'] > 1 else ''}"
        where = f"here: small ResNet, 5,000 images, {threads} of a CPU"
        rows.append(runtime_row(where, line["batch"], line["without"], line["with"]))
    share = json.loads((ROOT / "benchmarks" / "results" / "step_share.json").read_text())["rows"][0]
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


def joined(lines: list[dict[str, Any]]) -> str:
    """Pairs that join two images, in the last epoch."""
    found = [line["curves"]["bootstrapped"][-1] for line in lines if line["curves"]]
    return percent(sum(found) / len(found)) if found else ""


def partners_right(lines: list[dict[str, Any]]) -> str:
    """Of the pairs that join two images, how many are of one class, in the last epoch."""
    found = []
    for line in (line for line in lines if line["curves"]):
        ratio, right = (line["curves"][name][-1] for name in ("bootstrapped", "partner_accuracy"))
        if ratio:
            found.append(1 - (1 - right) / ratio)
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


def mean_text(values: list[float]) -> str:
    return f"{sum(values) / len(values):.1f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}%"


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
