"""`adasim eval knn`: k-NN classification of frozen features by DINO's weighted vote (Caron et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize

from adasim.data import ImageSet, Subset
from adasim.dist.processes import ALONE, Distributed
from adasim.eval.evaluation import Evaluation, Extractor, Report
from adasim.eval.features import check_positive, check_split, extract
from adasim.eval.splits import require_labels
from adasim.models import Backbone
from adasim.models.transform import EvalTransform
from adasim.neighbors import QuantizedRows, merge, search
from adasim.options import KnnOptions
from adasim.registry import EVALUATIONS
from adasim.util import seeding
from adasim.util.errors import UserError

PUBLISHED_K = (10, 20, 100, 200)
_QUERIES = 16384  # test images searched for at a time
_ROW_VALUES = 1 << 28  # training values normalised at a time: 1 GB, half of ImageNet at width 384
_INT8_QUERIES = 2048  # test images from which an int8 copy of the training features pays
_SCORE_VALUES = 1 << 24  # (test image, class) scores held at a time


class KnnAccuracy(NamedTuple):
    """Percent of the test images whose class is the best, or among the five best."""

    top1: float
    top5: float


def knn_accuracy(
    train_features: Any,
    train_labels: Any,
    test_features: Any,
    test_labels: Any,
    k: int | Sequence[int] = 20,
    temperature: float = 0.07,
    ranks: Distributed = ALONE,
) -> Any:
    """Classify each test image by a vote of its `k` nearest training images in cosine similarity.

    A neighbour at similarity s gives its class exp(s / temperature). Classes are ranked by their sum, ties by
    the smaller label; top-5 looks at the first min(5, k) of the ranking, as DINO's script does.

    Args:
        train_features: (N, D), of any length: both sides are normalised here.
        train_labels: (N,) whole numbers, in any range.
        test_features: (M, D).
        test_labels: (M,); each must occur among `train_labels`.
        k: how many neighbours vote.
        temperature: DINO's 0.07.
        ranks: processes that have the same features and share the search.

    Returns:
        A `KnnAccuracy`; for a sequence of k, a dict from each k to its `KnnAccuracy`, out of one search.

    >>> train = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> knn_accuracy(train, [3, 8], torch.tensor([[2.0, 1.0]]), [3], k=1)
    KnnAccuracy(top1=100.0, top5=100.0)
    """
    sets = check_split(train_features, train_labels, test_features, test_labels)
    ks = sorted({k} if isinstance(k, int) else set(k))
    check_positive(temperature=temperature, k=min(ks, default=0))
    if ks[-1] > len(sets.train):
        raise UserError(f"k={ks[-1]} is more than the {len(sets.train)} training images. Lower k.")

    def count_hits() -> Tensor:
        """How often this process's share of the test images is right: (k, 2), top-1 and top-5."""
        hits = torch.zeros(len(ks), 2, dtype=torch.int64)
        limits = torch.tensor([[1, min(5, size)] for size in ks])[:, :, None]  # places that count: (k, 2, 1)
        voting = max(1, _SCORE_VALUES // len(sets.classes))  # test images that vote at a time
        for start in range(ranks.rank * _QUERIES, len(sets.test), ranks.world * _QUERIES):
            queries = slice(start, start + _QUERIES)
            similarities, ids = _nearest(sets.test[queries], sets.train, ks[-1])  # (B, K)
            for weights, voters, labels in zip(
                # Relative to the best neighbour: the ranking is the same, and a low temperature does not overflow.
                ((similarities - similarities[:, :1]) / temperature).exp().split(voting),
                sets.train_labels[ids].split(voting),
                sets.test_labels[queries].split(voting),
                strict=True,
            ):
                places = _places(weights, voters, labels, ks, len(sets.classes)).cpu()  # (k, B)
                hits += (places[:, None] < limits).sum(dim=2)
        return hits

    mine = ranks.run_with_heartbeat(count_hits)
    assert mine is not None
    percent = (torch.stack(ranks.gather(mine)).sum(0).double() * 100 / len(sets.test)).tolist()
    results = {size: KnnAccuracy(*row) for size, row in zip(ks, percent, strict=True)}
    return results[k] if isinstance(k, int) else results


def _nearest(queries: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best rows by cosine similarity, best first, ties to the smaller id: (B, k) similarities and ids.

    The rows are normalised a part at a time: the search takes inner products, and a normalised copy of all
    rows would double the memory of a large training set.
    """
    queries = normalize(queries.float(), dim=1)
    best = queries.new_empty(len(queries), 0)
    best_ids, first = best.long(), 0
    for part in rows.split(max(k, _ROW_VALUES // rows.shape[1])):
        part = normalize(part.float(), dim=1)
        # An int8 copy takes about as long to make as 500 queries take to search; the answer is the same.
        worth = part.device.type == "cpu" and len(queries) >= _INT8_QUERIES and part.numel() >= 1 << 24
        quantized = QuantizedRows(part) if worth else None
        values, ids = search(queries, part, min(k, len(part)), quantized=quantized, row_norm=1.001)
        best, best_ids = merge(torch.cat([best, values], dim=1), torch.cat([best_ids, ids + first], dim=1), k)
        first += len(part)
    return best, best_ids


def _places(weights: Tensor, voters: Tensor, labels: Tensor, ks: list[int], num_classes: int) -> Tensor:
    """The place (0 is best) of the true class in the ranking of each row, for each k: (k, B)."""
    scores = weights.new_zeros(len(labels), num_classes)  # (B, C)
    smaller = torch.arange(num_classes, device=labels.device) < labels[:, None]
    places, done = [], 0
    for k in ks:  # ascending: each k adds the votes that the one before it did not count
        scores.scatter_add_(1, voters[:, done:k], weights[:, done:k])
        true = scores.gather(1, labels[:, None])
        places.append(((scores > true) | ((scores == true) & smaller)).sum(dim=1))
        done = k
    return torch.stack(places)


def online_knn(
    backbone: Backbone,
    images: ImageSet,
    transform: EvalTransform,
    *,
    max_images: int = 5000,
    k: int = 20,
    device: torch.device | str = "cpu",
    workers: int = 0,
    seed: int = 0,
) -> float:
    """Top-1 in percent of a fifth of up to `max_images` training images, classified by the other four fifths.

    The images are the same at every call, so the values of a run compare. Nothing of the training state moves:
    no random number is drawn, and the encoder's modes and running statistics are left as they were. Images without
    a label are left out, and those of a class that the four fifths lack are not asked about; where none is left, the
    answer is NaN.
    """
    labels = require_labels(images)
    chosen = seeding.permutation(seed, "online k-NN", 0, len(images))
    chosen = chosen[labels[chosen] >= 0][:max_images]
    if not len(chosen):
        return math.nan
    how: dict[str, Any] = {"device": device, "workers": workers, "progress": False, "unreadable": {}}
    features = extract(backbone, Subset(images, chosen), transform, **how)
    usable = features.isfinite().all(dim=1)  # neither unreadable nor diverged
    features, labels = features[usable], labels[chosen][usable]
    asked = len(labels) // 5
    bank, bank_labels = features[asked:], labels[asked:]
    known = torch.isin(labels[:asked], bank_labels)
    if not known.any():
        return math.nan
    queries = features[:asked][known], labels[:asked][known]
    return knn_accuracy(bank, bank_labels, *queries, k=min(k, len(bank))).top1


@EVALUATIONS.register("knn")
@dataclass(kw_only=True)
class Knn(KnnOptions, Evaluation):
    """Measures what its options, in adasim/options.py, ask for."""

    def run(self, extractor: Extractor) -> Report:
        split = extractor.open_split(self)
        train, labels, test, test_labels = extractor.split_features(split)
        # By default those that the training set allows.
        ks = self.k or tuple(k for k in PUBLISHED_K if k <= len(labels)) or PUBLISHED_K[:1]
        scores = knn_accuracy(train.values, labels, test.values, test_labels, k=ks, ranks=extractor.ranks)
        table = Table("k", "top-1", "top-5", box=None, padding=(0, 2))
        for k, score in scores.items():
            table.add_row(str(k), f"{score.top1:.2f}", f"{score.top5:.2f}", style="bold" if k == 20 else "")
        main = 20 if 20 in scores else max(scores)
        result = extractor.result(
            "knn",
            scores[main].top1,
            setting=f"k={main}",
            metrics={f"top{n}_k{k}": score[i] for k, score in scores.items() for i, n in enumerate((1, 5))},
            data=split,
            settings={"k": list(scores), "temperature": 0.07},
        )
        return Report(results=(result,), title=extractor.title("k-NN", split), table=table)
