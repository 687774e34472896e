"""The pair policy `confident`: other images as partners only where the match is most certain. Ours, not the paper's.

Images are compared by running-mean features (`MeanFeatures`): s_ij is their centred cosine. In epoch e, the share
q(e) of images that are most similar to their nearest other one have a partner: that one, or one drawn among the
nearest few that are at least as similar as the least similar of those pairs. All others have standard pairs:
partners are of the right class more often the fewer are used (docs/results.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from adasim.neighbors.memory import NeighborMemory
from adasim.neighbors.pairs import PairContext, PairPolicy
from adasim.registry import PAIRS
from adasim.settings import ConfidentSettings
from adasim.util.errors import UserError
from adasim.util.seeding import uniform


@PAIRS.register("confident")
@dataclass
class Confident(PairPolicy):
    """One of the nearest other images for those that are most similar to theirs, otherwise a standard pair."""

    Settings = ConfidentSettings
    draws_from_memory = True
    reads_lists = False  # once an epoch it looks all images up by their means instead
    follows_total = ("share of confident pairs",)
    memory: NeighborMemory
    settings: ConfidentSettings
    epochs: int
    seed: int = 0
    _found: tuple[int, Tensor] | None = field(default=None, init=False)  # epoch, its partners

    @classmethod
    def build(cls, context: PairContext) -> Self:
        assert context.memory is not None
        return cls(context.memory, context.settings or ConfidentSettings(), context.epochs, context.seed)

    @classmethod
    def check(cls, config: Any) -> None:
        start = config.pair_settings.start
        if start >= max(2, config.epochs):  # a single epoch has standard pairs anyway
            raise UserError(
                f"confident.start={start} leaves none of the {config.epochs} epochs with partners. "
                f"Lower --confident.start or raise --epochs."
            )

    @classmethod
    def window(cls, neighbors: Any) -> int:
        return 1

    @classmethod
    def memory_options(cls, settings: Any) -> dict[str, Any]:
        return {"mean_decay": settings.decay}

    def share(self, epoch: int) -> float:
        """q(e)."""
        settings = self.settings
        if epoch < settings.start:
            return 0.0
        way = (epoch - settings.start) / max(self.epochs - 1 - settings.start, 1)
        end = settings.share if settings.share_end is None else settings.share_end
        return settings.share + (end - settings.share) * min(way, 1.0)

    def partners(self, epoch: int, ids: Tensor | None = None) -> Tensor:
        if self._found is None or self._found[0] != epoch:  # the means change between epochs alone
            self._found = epoch, self._partners(epoch)
        partners = self._found[1]
        return partners.clone() if ids is None else partners[ids]

    def _partners(self, epoch: int) -> Tensor:
        means = self.memory.means
        assert means is not None
        share = self.share(epoch)
        if share == 0:
            return torch.arange(self.memory.num_images)
        others, similarities = means.nearest_others(self.settings.partners)
        everyone = torch.arange(len(others))
        u = uniform(self.seed, "partner", epoch, everyone)[:, 0]
        return surest(others, similarities, share, u)


def surest(others: Tensor, similarities: Tensor, share: float, u: Tensor) -> Tensor:
    """(N,): a partner for the `share` of images that are most similar to their nearest other one, else the image.

    Of equally similar ones the smaller ids come first.

    Args:
        others: (N, P), the nearest others of each image, best first.
        similarities: (N, P), to them.
        share: of the images.
        u: (N,), uniform in [0, 1): which of the others that are similar enough is drawn.
    """
    partners = torch.arange(len(others))
    chosen = similarities[:, 0].argsort(descending=True, stable=True)[: round(share * len(others))]
    chosen = chosen[similarities[chosen, 0] > -torch.inf]  # an image without a match has no partner
    if len(chosen):
        enough = similarities[chosen] >= similarities[chosen[-1], 0]  # (n, P); the first of each is
        drawn = (u[chosen] * enough.sum(1)).long()
        partners[chosen] = others[chosen, drawn]
    return partners
