"""Pairs that join the images which AdaSim joins, with other partners: what is a partner worth?

`control:partner=random` takes any other image, `right` any other of the same class, `only-right` keeps AdaSim's own
partner where it is of the same class and `only-wrong` where it is not (else a standard pair), `any-right` takes any
image of the class where AdaSim's own partner is right. `nearest` and `farthest` narrow a class down to a part of it,
by similarity: 0 and 0.1 are its nearest tenth. `share` joins that share of images, drawn anew each epoch, instead of
those that AdaSim joins. All but `random` and `two-steps` need labels: they serve diagnosis alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal, Self

import torch
from torch import Tensor

from adasim.neighbors import NeighborMemory, PairContext, PairPolicy
from adasim.registry import PAIRS
from adasim.util.seeding import uniform

Partner = Literal["random", "right", "only-right", "only-wrong", "any-right", "two-steps"]


@dataclass
class ControlSettings:
    partner: Partner = "right"
    nearest: float = 0.0
    farthest: float = 1.0
    share: float | None = None


@PAIRS.register("control")
@dataclass
class Control(PairPolicy):
    """The images that AdaSim joins, with partners by another rule."""

    Settings = ControlSettings
    draws_from_memory = True
    needs_labels = True
    memory: NeighborMemory
    labels: Tensor  # (N,)
    settings: ControlSettings
    tau: float
    seed: int

    @classmethod
    def build(cls, context: PairContext) -> Self:
        assert context.memory is not None
        assert context.labels is not None
        own = context.settings or ControlSettings()
        return cls(context.memory, context.labels, own, context.neighbors.tau, context.seed)

    def partners(self, epoch: int, ids: Tensor | None = None) -> Tensor:
        rule, everyone = self.settings.partner, torch.arange(len(self.labels))
        drawn = self.memory.draw_partners(epoch, self.tau, self.seed)  # AdaSim's own
        joined = drawn != everyone
        if self.settings.share is not None:
            chosen = uniform(self.seed, "control-share", epoch, everyone)[:, 0] < self.settings.share
            joined = chosen & (epoch >= self.memory.window)
        right = self.labels[drawn] == self.labels
        u = uniform(self.seed, "control", epoch, everyone)[:, 0]
        if rule == "random":
            others = (everyone + 1 + (u * (len(everyone) - 1)).long()) % len(everyone)
        elif rule in ("right", "any-right"):
            others = self.of_the_class(u)
        elif rule == "two-steps" and bool(joined.any()):
            others = self.next_of(drawn)
        else:
            others = drawn
        if rule in ("only-right", "any-right"):
            joined &= right
        elif rule == "only-wrong":
            joined &= ~right
        partners = torch.where(joined, others, everyone)
        return partners if ids is None else partners[ids]

    def next_of(self, drawn: Tensor) -> Tensor:
        """(N,): the best match of each image's partner that is neither of the two; the partner where it has none."""
        everyone = torch.arange(len(drawn))
        theirs = self.memory.distribution(everyone, self.tau)[0][drawn]  # (N, S), best first
        new = (theirs != everyone[:, None]) & (theirs != drawn[:, None]) & (theirs >= 0)
        best = theirs.gather(1, new.float().argmax(1, keepdim=True))[:, 0]
        return torch.where(new.any(1), best, drawn)

    def of_the_class(self, u: Tensor) -> Tensor:
        """(N,): another image of the same class, from the part of it that the settings name; u (N,) draws."""
        partners = torch.arange(len(self.labels))
        for label in self.labels.unique():
            members = (self.labels == label).nonzero()[:, 0]  # (n,)
            count = len(members) - 1
            if count == 0:
                continue
            features = self.memory.features(members).float()
            similar = (features @ features.T).fill_diagonal_(-torch.inf)
            order = similar.argsort(1, descending=True)[:, :count]  # (n, n - 1), nearest first
            first = int(self.settings.nearest * count)
            last = max(first + 1, ceil(self.settings.farthest * count))
            place = first + (u[members] * (last - first)).long()
            partners[members] = members[order.gather(1, place[:, None])[:, 0]]
        return partners
