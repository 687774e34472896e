"""Pair policies: who is whose partner in an epoch. View 1 shows the image, view 2 its partner.

A policy answers one question, `partners(epoch, ids=None)`: one image id per image (or per given id), as a pure
function of the memory and of (seed, epoch, id). One of your own is one file (docs/extending.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from adasim.neighbors.memory import NeighborMemory
from adasim.options import NearestSettings
from adasim.registry import PAIRS
from adasim.util.errors import UserError
from adasim.util.seeding import permutation, uniform


@dataclass(frozen=True)
class PairContext:
    """What a run offers to its pair policy."""

    num_images: int
    epochs: int
    seed: int
    neighbors: Any  # the run's `NeighborsConfig`: window, k, tau and the rest
    memory: NeighborMemory | None = None  # there for a policy that draws from it
    labels: Tensor | None = None  # (N,), if the images have any; only an oracle may look
    settings: Any = None  # the policy's own settings, of its class `Settings`, if it has one


class PairPolicy(ABC):
    """Who is whose partner."""

    Settings: ClassVar[type[Any] | None] = None
    """A dataclass of the policy's own settings, each with a default, if it has any."""
    draws_from_memory: ClassVar[bool] = False
    """Whether the run must keep a neighbour memory for it."""
    needs_labels: ClassVar[bool] = False
    latent: bool = False
    """Whether a partner is met as its cached feature, the target of both views, and not as an image in view 2."""
    follows_total: ClassVar[tuple[str, ...]] = ()
    """In words, what of the policy follows a schedule over the whole run."""

    @classmethod
    @abstractmethod
    def build(cls, context: PairContext) -> Self:
        """The policy of a run."""

    @classmethod
    def check(cls, config: Any) -> None:
        """Refuse what this policy cannot do, with a `UserError`; `config` is the run's `Config`."""
        return

    @classmethod
    def window(cls, neighbors: Any) -> int:
        """How many epochs of lists the memory keeps for it; `neighbors` is the run's `NeighborsConfig`."""
        return neighbors.window

    @abstractmethod
    def partners(self, epoch: int, ids: Tensor | None = None) -> Tensor:
        """Partner ids, int64, of all images or of `ids`."""


@PAIRS.register("standard")
@dataclass
class Standard(PairPolicy):
    """Two views of one image."""

    num_images: int

    @classmethod
    def build(cls, context: PairContext) -> Self:
        return cls(context.num_images)

    def partners(self, epoch: int, ids: Tensor | None = None) -> Tensor:
        return torch.arange(self.num_images) if ids is None else ids.clone()


@PAIRS.register("nearest")
@dataclass
class Nearest(PairPolicy):
    """+NN: always the best match other than the image itself, from the first finished epoch on."""

    Settings = NearestSettings
    draws_from_memory = True
    memory: NeighborMemory
    latent: bool = False

    @classmethod
    def build(cls, context: PairContext) -> Self:
        assert context.memory is not None
        return cls(context.memory, (context.settings or NearestSettings()).space == "latent")

    @classmethod
    def check(cls, config: Any) -> None:
        if config.neighbors.k < 2:
            raise UserError(
                "pairs=nearest needs neighbors.k of at least 2: a list may hold the image itself."
            )

    @classmethod
    def window(cls, neighbors: Any) -> int:
        return 1

    def partners(self, epoch: int, ids: Tensor | None = None) -> Tensor:
        return self.memory.nearest_other(ids)


@PAIRS.register("adasim")
@dataclass
class AdaSim(PairPolicy):
    """j* ~ p_win if the image's best match over the window is itself, otherwise a standard pair."""

    draws_from_memory = True
    memory: NeighborMemory
    tau: float
    seed: int

    @classmethod
    def build(cls, context: PairContext) -> Self:
        assert context.memory is not None
        return cls(context.memory, context.neighbors.tau, context.seed)

    @classmethod
    def check(cls, config: Any) -> None:
        window = config.neighbors.window
        if window >= max(2, config.epochs):  # of a single epoch all pairs are standard, with any window
            raise UserError(
                f"neighbors.window={window} needs at least {window + 1} epochs; this run has {config.epochs}. "
                f"Lower --neighbors.window or raise --epochs."
            )

    def partners(self, epoch: int, ids: Tensor | None = None) -> Tensor:
        return self.memory.draw_partners(epoch, self.tau, self.seed, ids)


@PAIRS.register("oracle")
@dataclass
class Oracle(PairPolicy):
    """With probability q a standard pair, otherwise a random image of the same class (itself allowed).

    q falls linearly from 1 in the first epoch to p in the last.
    """

    needs_labels = True
    follows_total = ("share of oracle pairs",)
    labels: Tensor  # (N,)
    epochs: int
    p: float
    seed: int

    @classmethod
    def build(cls, context: PairContext) -> Self:
        if context.labels is None:
            raise UserError("pairs=oracle needs labels.")
        return cls(context.labels, context.epochs, context.neighbors.oracle_p, context.seed)

    def __post_init__(self) -> None:
        require_all_labels("oracle", self.labels)

    def partners(self, epoch: int, ids: Tensor | None = None) -> Tensor:
        ids = torch.arange(len(self.labels)) if ids is None else ids
        q = 1 + (self.p - 1) * epoch / max(self.epochs - 1, 1)
        u = uniform(self.seed, "oracle", epoch, ids, 2)
        classes, by_class, sizes = self.labels[ids], self.labels.argsort(stable=True), self.labels.bincount()
        at = (sizes.cumsum(0) - sizes)[classes] + (
            u[:, 1] * sizes[classes]
        ).long()  # a place of the own class
        return torch.where(u[:, 0] < q, ids, by_class[at])


def require_all_labels(pairs: str, labels: Tensor) -> None:
    """Refuse labels (N,) of which some are missing, that is negative."""
    if missing := int((labels < 0).sum()):
        raise UserError(f"pairs={pairs} needs a label for each image, and {missing:,} have none.")


# ---- pairs for a training loop of your own ----


class PairSampler(Sampler[tuple[int, int]]):
    """(image id, partner id) of all images in a new random order for every epoch: for a `DataLoader` of your own.

    Partners are drawn when an epoch begins, in the process that trains, and travel to loader workers with the index.
    (A data set that held them would be copied into persistent workers once, and go stale.) Order and partners are a
    function of the seed and of the memory's state alone, so a loop that restores the memory goes on with the same
    epochs.

    Args:
        memory: whose partners to draw; `memory.epochs` is the epoch that comes next.
        tau: temperature of p_win; 0 means standard pairs.
        seed: random seed of order and partners.
        rank, world: this process takes every `world`-th image, all processes equally many.
    """

    def __init__(
        self, memory: NeighborMemory, tau: float, seed: int = 0, *, rank: int = 0, world: int = 1
    ) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} must be at least 0 and below world={world}")
        self.memory, self.tau, self.seed, self.rank, self.world = memory, tau, seed, rank, world

    def __len__(self) -> int:
        return self.memory.num_images // self.world

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = self.memory.epochs
        partners = self.memory.draw_partners(epoch, self.tau, self.seed)
        order = permutation(self.seed, "order", epoch, self.memory.num_images)
        mine = order[self.rank : len(self) * self.world : self.world]
        return zip(mine.tolist(), partners[mine].tolist(), strict=True)


class PairDataset(Dataset[tuple[int, Any, Any]]):
    """Turns an index (i, j) into (i, view 1 of image i, view 2 of image j); use it with a `PairSampler`.

    Args:
        images: any map-style data set; of items like (image, label) the first entry is the image.
        first: makes view 1 of an image.
        second: makes view 2; by default `first`.
    """

    def __init__(
        self, images: Any, first: Callable[[Any], Any], second: Callable[[Any], Any] | None = None
    ) -> None:
        self.images, self.first, self.second = images, first, second or first

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, pair: tuple[int, int]) -> tuple[int, Any, Any]:
        if not isinstance(pair, tuple):
            raise TypeError(f"PairDataset is indexed by (image, partner), got {pair!r}. Give a PairSampler.")
        i, j = pair
        image = self._image(i)
        partner = image if j == i else self._image(j)
        return i, self.first(image), self.second(partner)

    def _image(self, i: int) -> Any:
        item = self.images[i]
        return item[0] if isinstance(item, tuple | list) else item
