"""`adasim eval views`"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.data import ImageSet, PairLoader, Subset
from adasim.eval.evaluation import Evaluation, Extractor, Report, with_changes
from adasim.eval.features import encode, frozen, progress_bar
from adasim.eval.protocols.unlabelled import near_duplicates, view_retrieval
from adasim.models.transform import EvalTransform
from adasim.options import ViewsOptions
from adasim.registry import EVALUATIONS
from adasim.util import seeding
from adasim.util.fields import at_least, between
from adasim.util.spread import rankme

_RANKED = 25_600  # images that RankMe looks at, as in the paper
_COMPARED = 20_000  # images among which all pairs are looked at
_BATCH = 64


@EVALUATIONS.register("views")
@dataclass(kw_only=True)
class OwnViews(ViewsOptions, Evaluation):
    """Measures what its options, in adasim/options.py, ask for."""

    def run(self, extractor: Extractor) -> Report:
        at_least("queries", self.queries, 1)
        between("duplicate", self.duplicate, -1, 1)
        images = extractor.open_images(self.data)
        found = extractor.features(images)
        order = seeding.permutation(extractor.seed, "views", 0, len(found.ids))
        views, rows = self._views(extractor, images, found.ids, order)
        retrieval = view_retrieval(views, found.values, rows)
        rank = rankme(found.values[order[:_RANKED]])
        compared = order[:_COMPARED].sort().values
        alike = near_duplicates(found.values[compared], self.duplicate)
        width = found.values.shape[1]
        table = Table(box=None, padding=(0, 2), show_header=False)
        among = f"{len(found.ids):,} images"
        table.add_row(f"own image nearest of {among}", f"{retrieval.top1:.2f} %", style="bold")
        table.add_row("own image among the five nearest", f"{retrieval.top5:.2f} %")
        table.add_row(f"RankMe, of {min(width, len(found.ids))} at most", f"{rank:.1f}")
        table.add_row(
            f"near duplicates: pairs of similarity {self.duplicate:g} and above", f"{alike.pairs:,}"
        )
        table.add_row("mean similarity of two images", f"{alike.mean:.3f}")
        encoder = extractor.encoder
        result = extractor.result(
            "views",
            retrieval.top1,
            setting=with_changes(
                "top-1",
                queries=(self.queries, OwnViews.queries),
                size=(encoder.transform.size, encoder.usual_size),
            ),
            metrics={
                "top1": retrieval.top1,
                "top5": retrieval.top5,
                "rankme": rank,
                "duplicate_pairs": alike.pairs,
                "mean_similarity": alike.mean,
            },
            data=images,
            settings={
                "queries": len(rows),
                "duplicate": self.duplicate,
                "size": encoder.transform.size,
                "seed": extractor.seed,
            },
        )
        sentences = [
            f"Nearly alike ({similarity:.4f}): {images.where(int(found.ids[compared[i]]))} and "
            f"{images.where(int(found.ids[compared[j]]))}"
            for i, j, similarity in alike.nearest
        ]
        title = (
            extractor.title("Without labels", unit="") + f": views of {len(rows):,} images of {images.name}"
        )
        return Report(results=(result,), title=title, table=table, sentences=tuple(sentences))

    def _views(
        self, extractor: Extractor, images: ImageSet, ids: Tensor, order: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Features (M, D) of one view each of M readable images, and which rows of `ids` these are."""
        chosen = order[: self.queries]
        backbone = extractor.encoder.backbone
        backbone.to(extractor.device)
        loader = PairLoader(
            Subset(images, ids[chosen]),
            _augmentation(extractor.encoder.transform),
            batch_size=min(_BATCH, len(chosen)),
            seed=extractor.seed,
            workers=extractor.workers,
            device=extractor.device,
        )
        features, rows = [], []
        try:
            with frozen(backbone), progress_bar(f"{images.name}: views", len(chosen)) as advance:
                for batch in loader.views(0, torch.arange(len(chosen)).split(_BATCH)):
                    with torch.inference_mode():
                        features.append(encode(backbone, batch.views[0]).float().cpu())
                    rows.append(chosen[batch.ids.cpu()])
                    advance(len(batch.ids))
        finally:
            loader.close()
        return torch.cat(features), torch.cat(rows)


def _augmentation(transform: EvalTransform) -> ViewsConfig:
    """The same for every encoder, so that figures compare: crop, flip and colour; no blur."""
    return ViewsConfig(
        size=transform.size,
        scale=(0.4, 1.0),
        blur=0.0,
        solarize=0.0,
        reduced_jpeg=False,
        interpolation=transform.interpolation,
        mean=transform.mean,
        std=transform.std,
    )
