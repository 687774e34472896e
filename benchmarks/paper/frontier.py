"""What partners would a pair policy choose, and how many of them are right? From one frozen encoder, in a minute.

    python -m benchmarks.paper.frontier runs/paper/simsiam_standard_0
    python -m benchmarks.paper.frontier runs/paper/simsiam_standard_0 --plugin examples/own_pairs.py --pairs mutual

The encoder sees the training images as in training (view 1, batch statistics), pass after pass, but learns nothing.
Labels judge the partners afterwards. Three tables: AdaSim's gate, bootstrapping ratio and precision over (w, K, tau);
how precise the surest share q of the nearest other images is by several measures of sureness; and whole policies.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from adasim.api import load_run
from adasim.data import PairLoader
from adasim.neighbors import NeighborMemory, PairContext
from adasim.registry import PAIRS, load_plugin

from .cell import append, stamp

WINDOWS, SUPPORTS, TAUS = (1, 5, 10, 20), (3, 5, 10), (0.05, 0.1, 0.2, 0.4)
SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
DECAYS = (0.8, 0.9)
Passes = list[tuple[Tensor, Tensor]]
"""(ids, features) of each pass over the images."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run folder: its encoder, images and augmentations are used")
    parser.add_argument("--passes", type=int, default=max(WINDOWS) + 1, help="passes over the images")
    parser.add_argument("--pairs", nargs="+", default=["nearest", "adasim"], help="whole policies")
    parser.add_argument(
        "--plugin", type=Path, action="append", default=[], help="files that register policies"
    )
    parser.add_argument("--results", type=Path, help="append everything as a line of JSON to this file")
    args = parser.parse_args()
    if args.passes < 2:
        parser.error("--passes must be at least 2: the first pass finds an empty cache")
    torch.set_num_threads(1)
    for plugin in args.plugin:
        load_plugin(plugin)
    passes = features_of(args.run, args.passes)
    labels = load_run(args.run).images().labels
    assert labels is not None
    lists = neighbour_lists(passes, len(labels))
    rows = {
        "adasim": adasim_table(lists, labels),
        "sureness": sureness_table(passes, lists, labels),
        "policies": [policy_row(name, args.run, passes, labels) for name in args.pairs],
    }
    for name, table in rows.items():
        print(f"\n{name}")
        show(table)
    if args.results:
        append(args.results, {"run": args.run.name, "passes": args.passes} | stamp() | {"tables": rows})


@torch.no_grad()
def features_of(path: Path, passes: int) -> Passes:
    """(ids, features) of each pass, in the order of the batches; all images but the last, incomplete batch."""
    run = load_run(path)
    config, images = run.config, run.images()
    encoder = run.encoder.train()  # batch statistics, as in training
    loader = PairLoader(
        images, config.views, batch_size=config.batch_size, seed=config.seed + 1, workers=0, device="cpu"
    )
    found = []
    for number in range(passes):
        batches = loader.views(number, loader.batches(number))
        parts = [
            (batch.ids, encoder(batch.views[0].contiguous(memory_format=torch.channels_last)))
            for batch in batches
        ]
        found.append((torch.cat([ids for ids, _ in parts]), torch.cat([z for _, z in parts])))
    loader.close()
    return found


def observed(memory: NeighborMemory, passes: Passes) -> NeighborMemory:
    for ids, features in passes:
        for some, z in zip(ids.split(128), features.split(128), strict=True):
            memory.observe(some, z)
        memory.end_epoch()
    return memory


def neighbour_lists(passes: Passes, count: int) -> NeighborMemory:
    """The longest window and lists; shorter ones are parts of them. (The first pass finds an empty cache.)"""
    window = min(max(WINDOWS), len(passes) - 1)
    return observed(NeighborMemory(count, passes[0][1].shape[1], window, max(SUPPORTS)), passes)


def part(whole: NeighborMemory, window: int, k: int) -> NeighborMemory:
    """The memory as it would be with a shorter window of shorter lists."""
    memory = NeighborMemory(whole.num_images, whole.dim, window, k)
    for epoch in range(window):
        lists = whole.epoch_lists(whole.epochs - window + epoch)
        memory.load_epoch_lists(epoch, {name: tensor[:, :k] for name, tensor in lists.items()})
    memory.epochs = window
    return memory


def judged(partners: Tensor, labels: Tensor) -> dict[str, float]:
    """How many images have another one as partner, and how many of those are of their class."""
    changed = partners != torch.arange(len(partners))
    same = labels[partners] == labels[: len(partners)]
    precision = float(same[changed].double().mean()) if changed.any() else float("nan")
    return {"bootstrapped": float(changed.double().mean()), "precision": precision}


def adasim_table(lists: NeighborMemory, labels: Tensor) -> list[dict[str, Any]]:
    rows = []
    for window in (w for w in WINDOWS if w <= lists.window):
        for k in SUPPORTS:
            memory = part(lists, window, k)
            everyone = torch.arange(memory.num_images)
            gate = float((memory.distribution(everyone, 0.2)[0][:, 0] == everyone).double().mean())
            for tau in TAUS:
                partners = memory.draw_partners(window, tau, 0)
                rows.append({"w": window, "K": k, "tau": tau, "gate": gate, **judged(partners, labels)})
    return rows


def sureness_table(passes: Passes, lists: NeighborMemory, labels: Tensor) -> list[dict[str, Any]]:
    """The nearest other image by a measure, used for the share q of images where that measure is largest."""
    measures = {"cosine in one pass": _by_lists(part(lists, 1, lists.k))}
    for window in (w for w in WINDOWS[1:] if w <= lists.window):
        measures[f"m_win, w = {window}"] = _by_lists(part(lists, window, lists.k))
    for decay in DECAYS:
        means = mean_features(passes, len(labels), decay)
        measures[f"running mean, decay {decay}"] = by_means(means)
    measures |= {f"running mean, decay {decay}, {name}": m for name, m in by_matrix(means).items()}
    rows = []
    for name, (nearest, sureness) in measures.items():
        order = sureness.argsort(descending=True, stable=True)[: int((sureness > -torch.inf).sum())]
        row: dict[str, Any] = {"measure": name}
        for share in SHARES:
            chosen = order[: round(share * len(labels))]
            right = float((labels[nearest[chosen]] == labels[chosen]).double().mean())
            enough = len(chosen) > 0.99 * share * len(labels)  # a pass leaves the last, incomplete batch out
            row[f"q = {share:g}"] = right if enough else None
        rows.append(row)
    return rows


def by_matrix(features: Tensor, k: int = 10) -> dict[str, tuple[Tensor, Tensor]]:
    """Other ways to choose and to trust a partner, from all N x N similarities: for some thousand images only."""
    unit = F.normalize(features - features.mean(0), dim=1)
    similar = (unit @ unit.T).fill_diagonal_(-torch.inf)
    best, nearest = similar.max(1)
    mutual = nearest[nearest] == torch.arange(len(nearest))
    top, lists = similar.topk(k, dim=1)
    crowd = top.mean(1)  # how near an image's k nearest are: hubs have many near
    relative = 2 * similar - crowd[:, None] - crowd[None]
    surest, chosen = relative.max(1)
    in_list = torch.zeros_like(similar).scatter_(1, lists, 1.0)
    shared = (in_list * in_list[nearest]).sum(1)  # neighbours that both have
    return {
        "half whitened": half_whitened(features),
        "mutual": (nearest, torch.where(mutual, best, -torch.inf)),
        "less both images' crowds": (chosen, surest),
        "ahead of the tenth": (nearest, best - top[:, -1]),
        "shared neighbours": (nearest, shared + best / 2),
    }


def half_whitened(features: Tensor) -> tuple[Tensor, Tensor]:
    """The cosine after the features were multiplied by their covariance to the power -1/4."""
    centred = (features - features.mean(0)).double()
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(centred))
    unit = F.normalize(centred @ directions * variances.clamp(min=1e-4 * variances.max()) ** -0.25, dim=1)
    best, nearest = (unit @ unit.T).fill_diagonal_(-torch.inf).max(1)
    return nearest, best


def _by_lists(memory: NeighborMemory) -> tuple[Tensor, Tensor]:
    """The candidate other than the image with the largest sum over the window, and that sum."""
    own = torch.arange(memory.num_images)
    best = memory.best_other(own)
    named = torch.where(memory.history_ids == best[:, None, None], memory.history_similarities, 0.0)
    return torch.where(best >= 0, best, own), torch.where(best >= 0, named.sum((1, 2)), -torch.inf)


def mean_features(passes: Passes, count: int, decay: float) -> Tensor:
    """m_i <- decay m_i + (1 - decay) z_i over the passes, (N, D); zeros for an image that was in none."""
    means = torch.zeros(count, passes[0][1].shape[1])
    for ids, features in passes:
        seen = means[ids].any(1, keepdim=True)
        z = F.normalize(features, dim=1)
        means[ids] = torch.where(seen, decay * means[ids] + (1 - decay) * z, z)
    return means


def by_means(means: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest other image by the cosine of means less the mean of all, and that cosine; -inf if never seen."""
    seen = means.any(1)
    unit = F.normalize(means - means[seen].mean(0), dim=1)
    similar = (unit @ unit.T).fill_diagonal_(-torch.inf)
    similar[:, ~seen] = similar[~seen] = -torch.inf
    best, nearest = similar.max(1)
    return nearest, best


def policy_row(name: str, path: Path, passes: Passes, labels: Tensor) -> dict[str, Any]:
    """A whole policy with the run's settings of the neighbours, and its own defaults."""
    config, kind = load_run(path).config, PAIRS[name]
    own = None if kind.Settings is None else kind.Settings()
    count, dim = len(labels), passes[0][1].shape[1]
    window = min(kind.window(config.neighbors), len(passes))
    memory = NeighborMemory(count, dim, window, config.neighbors.k)
    observed(memory, passes)
    context = PairContext(count, len(passes) + 1, config.seed, config.neighbors, memory, labels, own)
    return {"pairs": name, **judged(kind.build(context).partners(len(passes)), labels)}


def show(rows: list[dict[str, Any]]) -> None:
    columns = list(rows[0])
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        cells = [f"{v:.3g}" if isinstance(v, float) else "-" if v is None else str(v) for v in row.values()]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
