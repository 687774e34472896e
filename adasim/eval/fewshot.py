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
from adasim.eval.evaluation import Evaluation, Extractor, Report, with_changes
from adasim.eval.splits import Source, data_name, open_all, require_labels
from adasim.eval.tensors import check_features, check_labels, check_positive
from adasim.options import FewshotOptions
from adasim.registry import EVALUATIONS
from adasim.util.errors import UserError
from adasim.util.seeding import uniform

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
    _refuse_small_classes(classes, counts, shots, 1 if per_class else queries, class_names)

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
    # (E, ways)
    classes, _ = _choose(counts.new_full((E,), len(counts)), ways, episodes, seed, "fewshot classes")
    rows = (episodes[:, None] * ways + torch.arange(ways, device=episodes.device)).flatten()
    flat = classes.flatten()
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


def _refuse_small_classes(
    classes: Tensor, counts: Tensor, shots: int, queries: int, names: Sequence[str] | None
) -> None:
    small = (counts < shots + queries).nonzero()[:, 0].tolist()
    if not small:
        return
    called = [repr(names[c]) if names else f"class {c}" for c in classes[small[:5]].tolist()]
    listed = ", ".join(f"{name} ({int(counts[i])})" for name, i in zip(called, small, strict=False))
    more = f" and {len(small) - 5} more" if len(small) > 5 else ""
    raise UserError(
        f"shots={shots} and queries={queries} need {shots + queries} images of every class; too few in "
        f"{listed}{more}. Leave those classes out, or lower shots or queries."
    )


@EVALUATIONS.register("fewshot")
@dataclass(kw_only=True)
class Fewshot(FewshotOptions, Evaluation):
    """Measures what its options, in adasim/options.py, ask for."""

    def run(self, extractor: Extractor) -> Report:
        sources = self.data or tuple(filter(None, [extractor.encoder.own_source()]))
        if not sources:
            raise UserError("Which images? Name one or several data sets with --data.")
        unbalanced = pick_unbalanced(sources, self.per_class)
        table = Table("data", "images", "accuracy", "95%", box=None, padding=(0, 2))
        results = []
        for source in sources:
            per_class = source in unbalanced
            accuracy, data = self._measure(extractor, source, per_class)
            score, interval = f"{accuracy.mean:.2f}", f"± {accuracy.interval95:.2f}"
            table.add_row(str(data["name"]), f"{data['images']:,}", score, interval)
            results.append(
                extractor.result(
                    "fewshot",
                    accuracy.mean,
                    setting=self._setting(extractor),
                    metrics={"mean": accuracy.mean, "interval95": accuracy.interval95},
                    data=data,
                    settings=self._options()
                    | {"per_class": per_class, "seed": extractor.seed}
                    | {"size": extractor.encoder.transform.size},
                )
            )
        if len(results) > 1:
            mean = sum(result.value for result in results) / len(results)
            table.add_row("average", "", f"{mean:.2f}", "", style="bold")
        what = f"Few-shot, {self.ways}-way {self.shots}-shot, {self.episodes} episodes"
        return Report(results=tuple(results), title=extractor.title(what), table=table)

    def _setting(self, extractor: Extractor) -> str:
        return with_changes(
            f"{self.ways}-way {self.shots}-shot",
            queries=(self.queries, Fewshot.queries),
            episodes=(self.episodes, Fewshot.episodes),
            size=(extractor.encoder.transform.size, extractor.encoder.usual_size),
        )

    def _options(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("ways", "shots", "queries", "episodes")}

    def _measure(
        self, extractor: Extractor, source: Source, per_class: bool
    ) -> tuple[FewShotAccuracy, dict[str, Any]]:
        """The accuracy on all splits of a data set together, and what the data set was."""
        size = extractor.encoder.transform.size
        splits = open_all(source, size=size, exclude=extractor.exclude)
        for images in splits:
            extractor.say(describe(images, used=None))
        classes = sorted({name for images in splits for name in images.classes})
        values, labels, fingerprints = [], [], []
        for images in splits:
            require_labels(images)
            found = extractor.features(images, extractor.encoder.transform.for_fewshot())
            assert found.labels is not None
            values.append(found.values)
            labels.append(match_classes(found.labels, images.classes, classes))
            fingerprints.append(images.fingerprint())
        pool = torch.cat(values)
        accuracy = fewshot_accuracy(
            pool,
            torch.cat(labels),
            **self._options(),
            seed=extractor.seed,
            class_names=classes,
            per_class=per_class,
        )
        name = data_name(source) + (" (per class)" if per_class else "")
        return accuracy, {"name": name, "fingerprint": "+".join(fingerprints), "images": len(pool)}


def pick_unbalanced(sources: Sequence[Source], wanted: Sequence[str] | None) -> list[Source]:
    """The data sets to be scored per class: those named (as with --data, or by their short names), or all."""
    if wanted is None:
        return []
    chosen = [source for source in sources if source in wanted or data_name(source) in wanted]
    known = {name for source in chosen for name in (source, data_name(source))}
    unknown = next((name for name in wanted if name not in known), None)
    if unknown is not None:
        raise UserError(f"--per-class {unknown} is none of the data sets {', '.join(map(str, sources))}.")
    return chosen if wanted else list(sources)
