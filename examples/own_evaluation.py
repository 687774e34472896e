"""An evaluation of one's own: RankMe, the effective rank of the features (Garrido et al., 2023).

adasim eval --plugin examples/own_evaluation.py rankme runs/photos
"""

from dataclasses import dataclass

import torch
from rich.table import Table

from adasim.eval import Evaluation, Extractor, Report
from adasim.registry import EVALUATIONS


@EVALUATIONS.register("rankme")
@dataclass(kw_only=True)
class RankMe(Evaluation):
    """Effective rank of the features: how many directions they use. Needs no labels."""

    data: str | None = None
    """The images; the run's own by default."""
    images: int = 25_000
    """How many of them at most."""

    def run(self, extractor: Extractor) -> Report:
        images = extractor.open_images(self.data)
        features = extractor.features(images).values[: self.images]  # (n, D)
        sizes = torch.linalg.svdvals(features.double())
        shares = sizes / sizes.sum()
        rank = float(torch.special.entr(shares).sum().exp())  # exp of the shares' entropy

        table = Table("images", "width", "effective rank", box=None, padding=(0, 2))
        table.add_row(f"{len(features):,}", str(features.shape[1]), f"{rank:.1f}")
        result = extractor.result("rankme", rank, setting=f"{len(features)} images", data=images)
        return Report(results=(result,), title=extractor.title("RankMe", unit=""), table=table)
