"""The explorer: what its hunts find of what was planted, and how long it takes with how large a page.

    python benchmarks/explore.py                                       # some twelve minutes of one core
    python benchmarks/explore.py --images 1000 --epochs 3 --large 1000 # a quick try
    python benchmarks/explore.py --cifar10 features.npz                # wrong labels in 10,000 images of CIFAR-10

Found: generated images, of which one in fifty is an exact copy, one in fifty a near copy and one in twenty-five has
a wrong label, after a short pretraining. Figures are means over the seeds.

Beside ours stand cleanlab and SelfClean where they are installed (the latter pins an old transformers: `pip install
--no-deps selfclean`, then what its import asks for).

Speed: a folder of PNG files, a run of three epochs on it, then from the finished run to the page, which Chromium
opens and scrolls through.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _planted import Planted, planted
from _report import report
from PIL import Image
from torch import Tensor

from adasim.api import pretrain
from adasim.data import ImageSet
from adasim.data.synthetic import synthetic
from adasim.explore.collection import collect
from adasim.explore.duplicates import Group
from adasim.explore.labels import LabelFindings, find_wrong_labels
from adasim.explore.open import Opened, open_run
from adasim.explore.page import explore, write_page
from adasim.explore.support import nearest_others, support_of_features
from adasim.options import ExploreOptions
from adasim.recipes import get_recipe

Pair = tuple[int, int]


def found_of_planted(images: int, epochs: int, seeds: list[int], folder: Path) -> list[dict[str, Any]]:
    """Recall and precision of duplicates, and precision among the first suspects of wrong labels."""
    each = [found_with_seed(images, epochs, seed, folder / f"{seed}") for seed in seeds]
    return [mean_row(rows) for rows in zip(*each, strict=True)]


def mean_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The means of what is a number in rows of one kind."""
    return {
        column: value if isinstance(value, str) else sum(row[column] for row in rows) / len(rows)
        for column, value in rows[0].items()
    }


def found_with_seed(images: int, epochs: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    hidden = planted(images, seed, exact=images // 50, near=images // 50, wrong=images // 25)
    data = hidden.images
    config = get_recipe("desk-resnet")
    config.epochs, config.seed = epochs, seed
    config.neighbors.window = min(config.neighbors.window, epochs - 1)
    run = pretrain(config, folder / "run", data=data)
    found = explore(open_run(run, ExploreOptions(no_cache=True), print, images=data))
    rows = duplicates_found(found.findings.groups, hidden)
    wrong = torch.zeros(len(data), dtype=torch.bool)
    wrong[[i for i, _ in hidden.wrong_labels]] = True
    features = found_features(run, data)
    for name, scores in rankings(features, data.labels).items():
        rows.append({"hunt": f"wrong labels: {name}", "planted": int(wrong.sum()), **quality(scores, wrong)})
    rows.append({"hunt": "wrong labels: the list as shown", **listed(found.findings.labels, wrong)})
    return rows


def found_features(run: Path, data: ImageSet) -> Tensor:
    return open_run(run, ExploreOptions(no_cache=True), print, images=data).features


# ---- wrong labels ----


def rankings(features: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Scores (N,) of every label by ours and by the packages that are installed, the larger the more suspicious."""
    classes = int(labels.max()) + 1
    found = find_wrong_labels(features, nearest_others(features), labels, classes)
    assert found is not None
    scores = {"adasim explore": found.score}
    unit = torch.nn.functional.normalize(features, dim=1)
    try:
        from cleanlab.rank import get_label_quality_scores
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import cross_val_predict

        model = LogisticRegression(max_iter=200)
        p = cross_val_predict(model, unit.numpy(), labels.numpy(), cv=5, method="predict_proba")
        for method in ("self_confidence", "normalized_margin"):
            quality_scores = get_label_quality_scores(labels.numpy(), p, method=method)
            scores[f"cleanlab, {method.replace('_', ' ')}"] = 1 - torch.from_numpy(quality_scores)
    except ImportError as error:
        print(f"Without cleanlab: {error}")
    try:
        from selfclean.cleaner.label_errors.intra_extra_distance_mixin import (
            IntraExtraDistanceLabelErrorMixin,
        )

        ratio = IntraExtraDistanceLabelErrorMixin()
        ratio.labels, ratio.distance_matrix = labels.numpy(), ((1 - unit @ unit.T) / 2).clamp(min=0).numpy()
        scores["SelfClean's ratio"] = 1 - torch.from_numpy(ratio.labels_calc_scores()).float()
    except ImportError as error:
        print(f"Without SelfClean: {error}")
    return scores


def quality(scores: Tensor, wrong: Tensor) -> dict[str, float]:
    """Precision among the first 50 and 200, and average precision, in percent."""
    right = wrong[scores.argsort(descending=True, stable=True)].double()
    precision = right.cumsum(0) / torch.arange(1, len(right) + 1)
    average = 100 * float((precision * right).sum() / right.sum())
    return {"first 50": percent(right[:50]), "first 200": percent(right[:200]), "average precision": average}


def listed(found: LabelFindings | None, wrong: Tensor) -> dict[str, float]:
    """The list down to its threshold, and all suspects."""
    assert found is not None
    shown = found.suspects[found.score[found.suspects] >= found.threshold]
    return {
        "planted": int(wrong.sum()),
        "estimate": found.estimate,
        "listed": len(shown),
        "recall": 100 * float(wrong[shown].sum() / wrong.sum()),
        "precision": percent(wrong[shown]),
        "suspects": len(found.suspects),
        "recall of suspects": 100 * float(wrong[found.suspects].sum() / wrong.sum()),
    }


EXCHANGED = {"cat": "dog", "dog": "cat", "truck": "automobile", "automobile": "truck"}


def spoil(labels: Tensor, classes: list[str], kind: float | str, seed: int) -> Tensor:
    """Labels of which a share is replaced by any other class; or a tenth of four classes by the class that is
    confused with it."""
    generator = torch.Generator().manual_seed(seed)
    spoiled = labels.clone()
    if isinstance(kind, float):
        chosen = torch.randperm(len(labels), generator=generator)[: round(kind * len(labels))]
        more = torch.randint(1, len(classes), (len(chosen),), generator=generator)
        spoiled[chosen] = (labels[chosen] + more) % len(classes)
        return spoiled
    other = torch.tensor([classes.index(EXCHANGED.get(name, name)) for name in classes])
    among = (other[labels] != labels).nonzero()[:, 0]
    chosen = among[torch.randperm(len(among), generator=generator)[: len(among) // 10]]
    spoiled[chosen] = other[labels[chosen]]
    return spoiled


def wrong_labels(file: Path, images: int, seeds: list[int]) -> list[dict[str, Any]]:
    """CIFAR-10 with labels made wrong on purpose; means over the seeds."""
    arrays = np.load(file)
    classes = [str(name) for name in arrays["classes"]]
    kinds: dict[str, float | str] = {
        "2%, any class": 0.02,
        "10%, any class": 0.1,
        "cat-dog, truck-automobile": "pairs",
    }
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    for kind, what in kinds.items():
        for seed in seeds:
            chosen = torch.randperm(len(arrays["labels"]), generator=torch.Generator().manual_seed(seed))
            chosen = chosen[:images]
            features = torch.from_numpy(arrays["features"])[chosen].float()
            truth = torch.from_numpy(arrays["labels"])[chosen].long()
            labels = spoil(truth, classes, what, seed)
            wrong = labels != truth
            for name, scores in rankings(features, labels).items():
                results.setdefault((kind, name), []).append(quality(scores, wrong))
            found = find_wrong_labels(features, nearest_others(features), labels, len(classes))
            results.setdefault((kind, "the list as shown"), []).append(listed(found, wrong))
            print(kind, seed, {n: r[-1] for (k, n), r in results.items() if k == kind}, flush=True)
    return [{"noise": kind, "ranked by": name, **mean_row(each)} for (kind, name), each in results.items()]


# ---- duplicates ----


def duplicates_found(groups: list[Group], hidden: Planted) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    exact = {ordered(pair) for pair in hidden.duplicates}
    near = {ordered(pair) for pair in hidden.near_duplicates}
    anywhere = pairs_within(groups)
    for name, known in (
        ("exact", exact),
        ("near", near),
        ("same scene", set()),
        ("of any kind", exact | near),
    ):
        listed = pairs_within(group for group in groups if name in (group.kind, "of any kind"))
        row = {"hunt": f"duplicates: {name}", "planted": len(known), "listed": len(listed)}
        if known:
            # An exact copy may stand in a group with a near one: it is found all the same.
            row["recall"] = 100 * len(anywhere & known) / len(known)
            row["precision"] = 100 * len(listed & known) / max(1, len(listed))
        rows.append(row)
    return rows


def pairs_within(groups: Iterable[Group]) -> set[Pair]:
    return {
        ordered((i, j))
        for group in groups
        for n, i in enumerate(group.members)
        for j in group.members[n + 1 :]
    }


def speed(images: int, folder: Path) -> list[dict[str, Any]]:
    """From a finished run on files to the page, and what a browser makes of it."""
    data = synthetic(images)
    for i in range(images):
        path = folder / "photos" / f"{int(data.labels[i]):02d}" / f"{i:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(data.images[i, 0].numpy()).convert("RGB").save(path, compress_level=1)
    config = get_recipe("desk-resnet")
    config.epochs, config.neighbors.window = 3, 2
    run = pretrain(config, folder / "large", data=str(folder / "photos"))
    start = time.perf_counter()
    opened = open_run(run, ExploreOptions(no_cache=True), print)
    features = time.perf_counter()
    found = explore(opened)
    hunts = time.perf_counter()
    page = folder / "page.html"
    written = write_page(page, found)
    end = time.perf_counter()
    size = sum(
        file.stat().st_size for path in written for file in ([path] if path.is_file() else path.iterdir())
    )
    rows: list[dict[str, Any]] = [
        {"what": "features and supports", "images": images, "value": features - start, "unit": "s"},
        {"what": "thumbnails and hunts", "images": images, "value": hunts - features, "unit": "s"},
        {"what": "writing the page", "images": images, "value": end - hunts, "unit": "s"},
        {"what": "run to page", "images": images, "value": end - start, "unit": "s", "goal": "< 60"},
        {"what": "page and sheets", "images": images, "value": size / 1e6, "unit": "MB"},
    ]
    return rows + browser(page, images)


def browser(page: Path, images: int) -> list[dict[str, Any]]:
    """First content, scrolling, and the heap, in headless Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("Chromium is not installed: the page was not opened.")
        return []
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        window = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = window.new_page(viewport={"width": 1280, "height": 900})
        tab.goto(page.as_uri())
        tab.wait_for_selector("main h2")
        ready = tab.evaluate("performance.now()")
        paint = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        tab.goto(page.as_uri() + "#/surprising")
        tab.wait_for_selector("article")
        frames = tab.evaluate(
            """async () => {
                const times = [];
                let last = performance.now();
                for (let n = 0; n < 200; n++) {
                    scrollBy(0, 700);
                    await new Promise(requestAnimationFrame);
                    times.push(performance.now() - last);
                    last = performance.now();
                }
                return times.sort((a, b) => a - b);
            }"""
        )
        for view in ("duplicates", "wrong-labels", "lonely", "neighbours?image=7", "neighbours", "overview"):
            tab.goto(f"{page.as_uri()}#/{view}")
            tab.wait_for_selector("main h2")
        session = tab.context.new_cdp_session(tab)
        session.send("Performance.enable")
        metrics = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
        window.close()
    rows = [
        ("first content", max(paint, 0) / 1000, "s", "< 3"),
        ("page ready", ready / 1000, "s", "< 3"),
        ("scrolling, median frame", frames[len(frames) // 2], "ms", ""),
        ("scrolling, 95% of frames", frames[int(len(frames) * 0.95)], "ms", ""),
        ("heap after all views", metrics["JSHeapUsedSize"] / 1e6, "MB", "< 400"),
    ]
    return [{"what": w, "images": images, "value": v, "unit": u, "goal": g} for w, v, u, g in rows]


def page_size(images: int, folder: Path) -> list[dict[str, Any]]:
    """A page of larger images, whose thumbnails fill their tiles."""
    data = synthetic(images, size=128)
    features = torch.randn(images, 32, generator=torch.Generator().manual_seed(0))
    found = explore(Opened(collect([data]), support_of_features(nearest_others(features)), features, ""))
    (page,) = write_page(folder / "small.html", found)
    size = page.stat().st_size / 1e6
    return [
        {"what": "page, images of 128 pixels", "images": images, "value": size, "unit": "MB", "goal": "< 25"}
    ]


def ordered(pair: Pair) -> Pair:
    return min(pair), max(pair)


def percent(right: Tensor) -> float:
    return 100 * float(right.double().mean()) if len(right) else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--images", type=int, default=5000, help="of those with planted finds; 0 leaves it out"
    )
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--large", type=int, default=20_000, help="images of the speed test; 0 leaves it out")
    parser.add_argument(
        "--cifar10", type=Path, help="features of CIFAR-10's training images, by `adasim embed`"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13], help="of what is planted")
    args = parser.parse_args()
    if args.cifar10:
        rows = wrong_labels(args.cifar10, 10_000, args.seeds)
        report("explore_labels", {"images": 10_000, "seeds": args.seeds}, rows, script="explore")
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.images:
            rows = found_of_planted(args.images, args.epochs, args.seeds, Path(folder))
            report("explore", vars(args), rows)
        if args.large:
            rows = speed(args.large, Path(folder)) + page_size(args.large // 10, Path(folder))
            report("explore_speed", vars(args), rows, script="explore")


if __name__ == "__main__":
    main()
