"""MeanFeatures: a running mean of each image's features over epochs, and each image's nearest other images by it.

One epoch's feature of an image is that of one random view. Their mean over epochs says more surely who is alike, and
needs one row per image, whatever the number of epochs:

    m_i <- decay m_i + (1 - decay) z_i     at the end of an epoch that showed image i; the first time, m_i = z_i
    s_ij = cos(m_i - c, m_j - c)     with c the mean of all m

c takes off what all images have in common. The rows are kept on the grid of 2^-24, on which a sum in fp64 is exact
in any order (for fewer than 2^29 images): so c, and with it every match, does not depend on how processes share them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from adasim.dist.collectives import Exchange
from adasim.neighbors.search import merge, search
from adasim.neighbors.window import on_grid

_BLOCK = 4096  # rows looked up, or centred, at once


class MeanFeatures:
    """The running means of some images' features; of all N, or of this process's share of them.

    Args:
        num_images: N.
        rows: the images held here.
        dim: D, the width of the features.
        decay: weight of the mean so far, between 0 and 1; 0 keeps the newest feature alone.
        device: of the means.
    """

    def __init__(
        self, num_images: int, rows: range, dim: int, decay: float, device: torch.device | str = "cpu"
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must be at least 0 and below 1")
        self.num_images, self.rows, self.decay = num_images, rows, decay
        self.values = torch.zeros(len(rows), dim, device=device)  # a row of zeros: not seen yet
        self.exchange: Exchange | None = None
        """With the processes that hold the other rows, if there are any."""

    @torch.no_grad()
    def update(self, features: Tensor, visited: Tensor) -> None:
        """At the end of an epoch: features (n, D) of the rows held here, and which of them the epoch showed (n,)."""
        for places in visited.nonzero()[:, 0].to(self.values.device).split(_BLOCK):
            old, new = self.values[places], features[places].float()
            mixed = on_grid(old * self.decay + new * (1 - self.decay))
            self.values[places] = torch.where(_seen(old)[:, None], mixed, new)

    @torch.no_grad()
    def nearest_others(self, count: int = 1) -> tuple[Tensor, Tensor]:
        """For all N images the nearest other ones (N, count) int64, best first, and their centred cosines.

        In place of those that are missing, as for an image that was never seen, stands the image itself with -inf.
        Both on the CPU. Where processes share the images, all must call.
        """
        unit, seen = self._centred()
        rows = unit if len(seen) == len(unit) else unit[seen]  # (S, D)
        shares = self._shares()
        others = torch.arange(self.num_images)[:, None].repeat(1, count)
        similarities = torch.full((self.num_images, count), -torch.inf)
        for start in range(0, max(map(len, shares)), _BLOCK):
            asked = [share[start : start + _BLOCK] for share in shares]
            best = self._best(
                unit[start : start + _BLOCK], rows, seen, length=max(map(len, asked)), count=count + 1
            )
            for images, scores, ids in zip(asked, *best, strict=True):
                own = torch.arange(images.start, images.stop)[:, None]
                scores, ids = scores[: len(own)], ids[: len(own)]
                order = (ids == own).byte().argsort(dim=1, stable=True)[:, :count]  # all but the image itself
                ids, scores = ids.gather(1, order), scores.gather(1, order)
                others[own[:, 0]] = torch.where(ids >= 0, ids, own)
                similarities[own[:, 0]] = torch.where(ids >= 0, scores, -torch.inf)
        return others, similarities

    def _best(
        self, queries: Tensor, rows: Tensor, seen: Tensor, length: int, count: int
    ) -> tuple[Tensor, Tensor]:
        """The best of all processes' rows for each process's queries, at most `length`: (R, length, count) each."""
        if self._others is not None:
            padding = queries.new_full((length - len(queries), queries.shape[1]), torch.nan)
            queries = self._others.gather(torch.cat([queries, padding])).to(rows.device)  # (R length, D)
        similarities, found = search(queries, rows, count, row_norm=1 + 1e-3)
        ids = torch.full_like(found, -1)
        ids[found >= 0] = seen[found[found >= 0]] + self.rows.start
        if self._others is not None:
            lists = torch.stack([similarities.view(torch.int32), ids.int()], 1)  # (R length, 2, count)
            lists = self._others.gather(lists[None]).permute(1, 2, 0, 3).flatten(2)  # (R length, 2, R count)
            similarities, ids = merge(lists[:, 0].contiguous().view(torch.float32), lists[:, 1].long(), count)
        return similarities.cpu().view(-1, length, count), ids.cpu().view(-1, length, count)

    def _centred(self) -> tuple[Tensor, Tensor]:
        """Unit-norm rows (n, D) of the means less the mean of all processes' rows; which of them were seen (S,).

        A row that was not seen is NaN.
        """
        seen = _seen(self.values).nonzero()[:, 0]
        count = torch.tensor([len(seen)], device=seen.device)
        total = torch.zeros(1, self.values.shape[1], dtype=torch.float64, device=self.values.device)
        for part in self.values.split(_BLOCK):
            total += part.double().sum(0)
        if self._others is not None:
            total, count = (self._others.gather(x).sum(0, keepdim=True).to(x.device) for x in (total, count))
        centre = total / count.clamp(min=1)
        unit = torch.full_like(self.values, torch.nan)
        for places in seen.split(_BLOCK):
            unit[places] = on_grid(F.normalize(self.values[places].double() - centre, dim=1).float())
        return unit, seen

    def _shares(self) -> list[range]:
        """The images that each process holds."""
        if self._others is None:
            return [self.rows]
        firsts, counts = self._others.counts(self.rows.start), self._others.counts(len(self.rows))
        return [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]

    @property
    def _others(self) -> Exchange | None:
        """The exchange, if there is anybody to exchange with."""
        return None if self.exchange is None or self.exchange.world == 1 else self.exchange


def _seen(rows: Tensor) -> Tensor:
    return (rows != 0).any(1)
