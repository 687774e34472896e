"""`adasim eval views`: what can be said of an encoder without labels, by retrieval of augmented views and RankMe."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize

from adasim.data import ImageSet, Subset
from adasim.eval.evaluation import Evaluation, Extractor, Report
from adasim.eval.features import check_features, encode, frozen
from adasim.neighbors import search
from adasim.options import ViewsOptions
from adasim.registry import EVALUATIONS
from adasim.util import seeding
from adasim.util.collapse import rankme
from adasim.util.terminal import progress_bar

_RANKED = 25_600  # images that RankMe looks at, as in the paper
_BATCH = 64


class Retrieval(NamedTuple):
    """Percent of the views whose own image is the nearest, or among the five nearest."""

    top1: float
    top5: float


def view_retrieval(views: Any, images: Any, own: Any) -> Retrieval:
    """Search each view's own image among all images by cosine similarity.

    Args:
        views: (M, D) features of augmented views.
        images: (N, D) features of the images.
        own: (M,) which row of `images` each view is of.
    """
    views, images = check_features(views, "views"), check_features(images, "images")
    nearest = search(normalize(views, dim=1), normalize(images, dim=1), 5)[1]  # (M, 5)
    hits = nearest == torch.as_tensor(own)[:, None]
    return Retrieval(*(100 * float(hits[:, :k].any(1).double().mean()) for k in (1, 5)))


def mean_similarity(features: Tensor) -> float:
    """Mean cosine similarity of two different rows of the features (N, D); NaN of a single one.

    The squared length of the sum of N unit vectors is N and twice the sum over all pairs.
    """
    n, unit = len(features), normalize(features.double(), dim=1)
    total = unit.sum(dim=0).square().sum() - unit.square().sum()
    return float(total) / (n * (n - 1)) if n > 1 else float("nan")


@EVALUATIONS.register("views")
@dataclass(kw_only=True)
class OwnViews(ViewsOptions, Evaluation):
    """Measures what its options, in adasim/options.py, ask for."""

    def run(self, extractor: Extractor) -> Report:
        images = extractor.open_images(self.data)
        features = extractor.features(images)
        count, width = features.values.shape
        order = seeding.permutation(extractor.seed, "views", 0, count)
        asked = order[: self.queries]
        views, places = view_features(extractor, Subset(images, features.ids[asked]))
        retrieval = view_retrieval(views, features.values, asked[places])
        rank, similarity = rankme(features.values[order[:_RANKED]]), mean_similarity(features.values)
        table = Table(box=None, padding=(0, 2), show_header=False)
        table.add_row(f"own image nearest of {count:,} images", f"{retrieval.top1:.2f} %", style="bold")
        table.add_row("own image among the five nearest", f"{retrieval.top5:.2f} %")
        table.add_row(f"RankMe, of {min(width, count)} at most", f"{rank:.1f}")
        table.add_row("mean similarity of two images", f"{similarity:.3f}")
        result = extractor.result(
            "views",
            retrieval.top1,
            setting="top-1",
            changes={"queries": (self.queries, OwnViews.queries)},
            metrics={**retrieval._asdict(), "rankme": rank, "mean_similarity": similarity},
            data=images,
            settings={"queries": len(places), "seed": extractor.seed},
        )
        title = extractor.title("Without labels", unit="")
        title += f": views of {len(places):,} images of {images.name}"
        return Report(results=(result,), title=title, table=table)


def view_features(extractor: Extractor, images: ImageSet) -> tuple[Tensor, Tensor]:
    """Features (M, D) of an augmented view of each image that can be read, and which images these are.

    The views are the same for every encoder, so that figures compare: crop, flip and colour; no blur.
    """
    backbone, interpolation = extractor.encoder.backbone, extractor.encoder.transform.interpolation
    size = min(_BATCH, len(images))
    loader = extractor.view_loader(images, size, scale=(0.4, 1.0), interpolation=interpolation)
    features, ids = [], []
    with closing(loader), frozen(backbone), progress_bar(f"{images.name}: views", len(images)) as advance:
        for batch in loader.views(0, torch.arange(len(images)).split(_BATCH)):
            with torch.inference_mode():
                features.append(encode(backbone, batch.views[0]).float().cpu())
            ids.append(batch.ids.cpu())
            advance(len(batch.ids))
    return torch.cat(features), torch.cat(ids)
