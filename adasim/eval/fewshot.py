"""`adasim eval fewshot`: few-shot transfer by prototypes (Snell et al., 2017) on frozen, unnormalised features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from adasim.data import describe
from adasim.data.images import match_classes
from adasim.eval.evaluation import Evaluation, Extractor, Report
from adasim.eval.features import check_features, check_labels, check_positive
from adasim.eval.splits import Source, data_name, open_all, require_labels
from adasim.options import FewshotOptions
from adasim.registry import EVALUATIONS
from adasim.util.errors import UserError
from adasim.util.seeding import uniform
from adasim.util.terminal import few

_DRAWN = 1 << 16  # images drawn at a time
_VALUES = 1 << 20  # feature values compared at a time: 4 MB, which stay in the cache between two uses


class FewShotAccuracy(NamedTuple):
    """Mean accuracy over the episodes in percent, and half the width of its 95% confidence interval."""

    mean: float
    interval95: float


def fewshot_accuracy(
    features: Any,
    labels: Any,
    ways: int = 5,
    shots: int = 5,
    queries: int = 15,
    episodes: int = 600,
    seed: int = 0,
    *,
    class_names: Sequence[str] | None = None,
    per_class: bool = False,
) -> FewShotAccuracy:
    """Accuracy of nearest-prototype classification, averaged over random episodes.

    An episode draws `ways` classes, and of each class `shots` support and `queries` query images, all
    distinct. A class's prototype is the mean of its support features; a query takes the class of the nearest
    prototype in squared Euclidean distance. The interval is 1.96 * population std / sqrt(episodes).

    Args:
        features: (N, D), used as they are: the protocol does not normalise.
        labels: (N,) whole numbers.
        class_names: the name of class i at place i, for the error messages.
        per_class: for unbalanced data. A class needs only shots + 1 images and brings as many queries as it
            has left, up to `queries`; an episode's accuracy is the mean of its classes' accuracies.
    """
    features = check_features(features, "features")
    labels = check_labels(labels, len(features), "labels").to(features.device)
    check_positive(ways=ways, shots=shots, queries=queries, episodes=episodes)
    classes, counts = labels.unique(return_counts=True)  # (C,)
    if len(classes) < ways:
        raise UserError(f"ways={ways} needs as many classes and the data has {len(classes)}. Lower ways.")
    needed = shots + (1 if per_class else queries)
    if len(small := (counts < needed).nonzero()[:, 0]):
        names = [repr(class_names[c]) if class_names else f"class {c}" for c in classes[small].tolist()]
        listed = few((f"{name} ({n})" for name, n in zip(names, counts[small].tolist(), strict=True)), 5)
        raise UserError(
            f"shots={shots} and queries={needed - shots} need {needed} images of every class; too few in {listed}. "
            f"Leave those classes out, or lower shots or queries."
        )

    by_class = labels.argsort(stable=True)  # the images of class 0, then of class 1, ...
    first = counts.cumsum(0) - counts  # where each class begins in `by_class`
    group = max(1, _DRAWN // (ways * (shots + queries)))
    step = max(1, _VALUES // (ways * (shots + queries) * features.shape[1]))
    accuracies = []
    for ids in torch.arange(episodes, device=features.device).split(group):
        images, drawn = _draw(ids, by_class, first, counts, ways, shots + queries, seed)  # (E, ways, S + Q)
        correct = torch.cat([_correct(features, part, shots) for part in images.split(step)])  # (E, ways, Q)
        asked = drawn[:, :, shots:]
        by_way = (correct & asked).sum(dim=2) / asked.sum(dim=2)  # (E, ways)
        accuracies.append(by_way.mean(dim=1))
    percent = torch.cat(accuracies).double() * 100
    interval = 1.96 * float(percent.std(correction=0)) / episodes**0.5
    return FewShotAccuracy(float(percent.mean()), interval)


def _draw(
    episodes: Tensor, by_class: Tensor, first: Tensor, counts: Tensor, ways: int, count: int, seed: int
) -> tuple[Tensor, Tensor]:
    """The images of some episodes, (E, ways, count), and a mask of those that a class really had."""
    E = len(episodes)
    classes, _ = _choose(counts.new_full((E,), len(counts)), ways, episodes, seed, "fewshot classes")
    flat = classes.flatten()  # (E * ways)
    rows = (episodes[:, None] * ways + torch.arange(ways, device=episodes.device)).flatten()
    places, drawn = _choose(counts[flat], count, rows, seed, "fewshot images")  # (E * ways, count)
    images = by_class[first[flat, None] + places]
    return images.view(E, ways, count), drawn.view(E, ways, count)


def _choose(sizes: Tensor, count: int, ids: Tensor, seed: int, purpose: str) -> tuple[Tensor, Tensor]:
    """For each row, `count` distinct numbers below its size, in random order: (rows, count), and a mask.

    Floyd's algorithm: the work depends on `count` alone, not on the sizes. A row whose size is below `count`
    gets a shuffle of all its numbers; what is left of the row is 0 and False in the mask.
    """
    random = uniform(seed, purpose, 0, ids, 2 * count)  # (rows, 2 * count)
    places = torch.arange(count, device=sizes.device)[:, None]
    top = sizes - count + places  # (count, rows)
    chosen = (random[:, :count].T * (top + 1)).long()
    for i in range(1, count):
        taken = (chosen[:i] == chosen[i]).any(dim=0)
        chosen[i] = torch.where(taken, top[i], chosen[i])
    chosen = torch.where(sizes < count, places, chosen).T  # (rows, count)
    real = chosen < sizes[:, None]
    # Floyd's set is uniform, its order is not: later places lean to large numbers. Shuffle, unreal ones last.
    order = torch.where(real, random[:, count:], 2.0).argsort(dim=1)
    real = real.gather(1, order)
    return chosen.gather(1, order) * real, real


def _correct(features: Tensor, images: Tensor, shots: int) -> Tensor:
    """Whether each query image lies nearest to its own class's prototype: (E, ways, queries)."""
    E, ways, _ = images.shape
    support, asked = images[:, :, :shots], images[:, :, shots:]
    # index_select copies whole rows, several times as fast as features[support].
    prototypes = features.index_select(0, support.flatten()).float().view(E, ways, shots, -1).mean(dim=2)
    queries = features.index_select(0, asked.flatten()).float().view(E, -1, features.shape[1])
    # |q - p|^2 orders the prototypes as |d|^2 - 2 (q - m).d does, with m their mean and d = p - m: a product
    # of matrices, without the cancellation that a large common offset of all features would bring to q.p.
    middle = prototypes.mean(dim=1, keepdim=True)
    offsets = prototypes - middle  # (E, ways, D)
    constant = ((prototypes + middle) * offsets).sum(dim=2, keepdim=True)  # |d|^2 + 2 m.d
    distances = torch.baddbmm(constant, offsets, queries.transpose(1, 2), alpha=-2)  # (E, ways, ways * Q)
    nearest = distances.transpose(1, 2).contiguous().argmin(dim=2)  # many times as fast as over dimension 1
    return nearest.view_as(asked) == torch.arange(ways, device=images.device)[:, None]


@EVALUATIONS.register("fewshot")
@dataclass(kw_only=True)
class Fewshot(FewshotOptions, Evaluation):
    """Measures what its options, in adasim/options.py, ask for."""

    def run(self, extractor: Extractor) -> Report:
        sources = self.data or tuple(filter(None, [extractor.encoder.own_source()]))
        if not sources:
            raise UserError("Which images? Name one or several data sets with --data.")
        unbalanced = pick_unbalanced(sources, self.per_class)
        episode: dict[str, Any] = {
            name: getattr(self, name) for name in ("ways", "shots", "queries", "episodes")
        }
        table = Table("data", "images", "accuracy", "95%", box=None, padding=(0, 2))
        results = []
        for source in sources:
            per_class = source in unbalanced
            name = data_name(source) + (" (per class)" if per_class else "")
            features, labels, classes, fingerprint = _all_splits(extractor, source)
            how = {**episode, "per_class": per_class, "seed": extractor.seed}
            accuracy = fewshot_accuracy(features, labels, **how, class_names=classes)
            table.add_row(name, f"{len(labels):,}", f"{accuracy.mean:.2f}", f"± {accuracy.interval95:.2f}")
            results.append(
                extractor.result(
                    "fewshot",
                    accuracy.mean,
                    setting=f"{self.ways}-way {self.shots}-shot",
                    changes={
                        "queries": (self.queries, Fewshot.queries),
                        "episodes": (self.episodes, Fewshot.episodes),
                    },
                    metrics=accuracy._asdict(),
                    data={"name": name, "fingerprint": fingerprint, "images": len(labels)},
                    settings=how,
                )
            )
        what = f"Few-shot, {self.ways}-way {self.shots}-shot, {self.episodes} episodes"
        report = Report(results=tuple(results), title=extractor.title(what), table=table)
        if len(results) > 1:
            table.add_row("average", "", f"{report.value:.2f}", "", style="bold")
        return report


def _all_splits(extractor: Extractor, source: Source) -> tuple[Tensor, Tensor, list[str], str]:
    """Features (N, D), labels (N,), names of the classes and a fingerprint of all splits of a source together."""
    encoder = extractor.encoder
    splits = open_all(source, size=encoder.transform.size, exclude=extractor.exclude)
    for images in splits:
        extractor.say(describe(images, used=None))
        require_labels(images)
    classes = sorted({name for images in splits for name in images.classes})
    values, labels = [], []
    for images in splits:
        features = extractor.features(images, encoder.transform.for_fewshot())
        values.append(features.values)
        labels.append(match_classes(require_labels(images)[features.ids], images.classes, classes))
    fingerprint = "+".join(images.fingerprint() for images in splits)
    return torch.cat(values), torch.cat(labels), classes, fingerprint


def pick_unbalanced(sources: Sequence[Source], wanted: Sequence[str] | None) -> list[Source]:
    """The data sets to be scored per class: those named (as with --data, or by their short names), or all."""
    if wanted is None:
        return []
    known = {name: source for source in sources for name in (source, data_name(source))}
    for name in wanted:
        if name not in known:
            raise UserError(f"--per-class {name} is none of the data sets {', '.join(map(str, sources))}.")
    return [known[name] for name in wanted] or list(sources)
