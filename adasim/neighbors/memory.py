"""NeighborMemory: the feature cache, the history of top-K lists, and the partners drawn from them.

memory = NeighborMemory(num_images, dim, window=10, k=3)
for epoch in range(epochs):
    partners = memory.draw_partners(epoch, tau=0.2, seed=0)   # (N,): whose view is view 2 of image i
    for ids in batches:
        ...                                                   # views of ids and of partners[ids], a step
        memory.observe(ids, features_of_view_1)
    memory.end_epoch()
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import index
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from adasim.dist.devices import to_device
from adasim.neighbors.arguments import Ids, checked_ids
from adasim.neighbors.arithmetic import exact_device
from adasim.neighbors.history import ListHistory
from adasim.neighbors.means import MeanFeatures
from adasim.neighbors.quantized import QuantizedRows
from adasim.neighbors.search import search
from adasim.neighbors.window import on_grid

_INT8_FROM = 1 << 24  # elements of the cache from which an int8 copy pays


class NeighborMemory(ListHistory):
    """One feature per image, and each image's nearest neighbours over the last epochs.

    Args:
        num_images: N; ids run from 0 to N-1.
        dim: D, the width of the features.
        window: w, how many epochs of lists are averaged.
        k: K, the length of a list and, with support="topk", of the distribution.
        support: "topk", the K best of the window's union, as in the released code; "union", all of it, as
            printed in the paper.
        timing: "previous", the window is the w epochs before the current one, as in the released code;
            "current", it includes the current epoch (the paper's Algorithm 1), so an image's partner can be
            drawn once it has been observed.
        dtype: of the cache; by default fp16 on an accelerator and fp32 on a CPU.
        device: of the cache; a device without fp64 (Apple's mps) leaves it on the CPU. The history stays in
            main memory.
        rows: the images whose features and lists are held here, all by default; `ShardedMemory` gives each
            process its own. Neighbours are then found, and partners drawn, among and for these alone.
        mean_decay: keep a running mean of each image's features too, with this decay per epoch (`MeanFeatures`).
        lists: whether neighbours are looked up at all. Without, an image's list holds the image alone, k must be 1,
            and an observation costs next to nothing: for policies that need the means alone.

    >>> memory = NeighborMemory(num_images=4, dim=2, window=1, k=2)
    >>> features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    >>> for epoch in range(2):
    ...     _ = memory.observe(torch.arange(4), features)
    ...     memory.end_epoch()
    >>> memory.distribution(torch.tensor([0]), tau=0.2)[0]
    tensor([[0, 1]])
    """

    def __init__(
        self,
        num_images: int,
        dim: int,
        window: int,
        k: int,
        *,
        support: Literal["topk", "union"] = "topk",
        timing: Literal["previous", "current"] = "previous",
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rows: range | None = None,
        mean_decay: float | None = None,
        lists: bool = True,
    ) -> None:
        dim = index(dim)
        if dim < 1:
            raise ValueError(f"dim={dim} must be at least 1")
        if not lists and k != 1:
            raise ValueError(f"k={k} must be 1 in a memory without lists")
        super().__init__(num_images, window, k, support=support, timing=timing, rows=rows)
        self.dim, self.lists = dim, lists
        device = exact_device(device)
        dtype = dtype or (torch.float32 if device.type == "cpu" else torch.float16)
        self.cache = torch.zeros(len(self.rows), dim, dtype=dtype, device=device)
        self.means: MeanFeatures | None = None
        if mean_decay is not None:
            self.means = MeanFeatures(self.num_images, self.rows, dim, mean_decay, device)
        self._quantized: QuantizedRows | None = None

    def __repr__(self) -> str:
        cache = f"{str(self.cache.dtype).removeprefix('torch.')} cache on {self.cache.device}"
        held = (
            "" if len(self.rows) == self.num_images else f", images {self.rows.start} to {self.rows.stop - 1}"
        )
        return (
            f"{type(self).__name__}(num_images={self.num_images}, dim={self.dim}, window={self.window}, "
            f"k={self.k}: {self.epochs} epochs finished, {cache}{held})"
        )

    def to(self, device: torch.device | str) -> Self:
        """Move the cache to a device (the CPU, if that has no fp64); the history stays in main memory."""
        self.cache = self.cache.to(exact_device(device))
        if self.means is not None:
            self.means.values = self.means.values.to(self.cache.device)
        self._quantized = None
        self._refresh_int8()
        return self

    # ---- the epoch ----

    @torch.no_grad()
    def observe(self, ids: Ids, features: Tensor) -> tuple[Tensor, Tensor]:
        """Look up the neighbours of a batch in the cache, then write the batch into it.

        The order is what makes the gate work: image i is compared with its own row of the epoch before.

        Args:
            ids: (B,) image ids: a tensor of any integer type, an array or a list. If one stands twice, its
                last place counts.
            features: (B, D), the encoder's features of view 1; they are L2-normalised here. A row that is not
                finite is skipped: it changes neither cache nor lists.

        Returns:
            similarities (B, K) fp32 and neighbours (B, K) int64, best first.
        """
        ids, queries = self._prepare(ids, features)
        similarities, neighbours = self._lookup(queries) if self.lists else itself(ids, queries)
        self._write(ids, queries, similarities, neighbours)
        return similarities, neighbours

    def end_epoch(self) -> None:
        """Let this epoch's lists join the window, and its features the means, if they are kept.

        An image that was not observed adds an empty list.

        Raises:
            RuntimeError: nothing was observed since the last call.
        """
        if self.means is not None and self._observing:
            self.means.update(self.cache, self.current_ids[:, 0] >= 0)
        super().end_epoch()
        self._refresh_int8()

    # ---- state ----

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, as tensors that share memory with this object."""
        means = {} if self.means is None else {"means": self.means.values}
        return means | {"cache": self.cache} | super().state_dict()

    def load_parts(self, parts: Iterable[tuple[int, dict[str, Tensor]]]) -> None:
        """As `ListHistory.load_parts`; cache and means are part of the states, too."""
        super().load_parts(parts)
        self._refresh_int8()

    # ---- parts ----

    def _prepare(self, ids: Ids, features: Tensor) -> tuple[Tensor, Tensor]:
        """Ids, and unit-norm queries on the grid, fp32; a row that is not finite becomes NaN throughout."""
        ids = checked_ids(ids, self.num_images)
        features = torch.as_tensor(features)
        if features.shape != (len(ids), self.dim):
            raise ValueError(f"features must be ({len(ids)}, {self.dim}), got {tuple(features.shape)}")
        features = features.detach().to(self.cache.device, torch.float32)
        # Nearly always no row is to be skipped.
        if features.device.type == "cpu" and math.isfinite(features.sum()):
            # As F.normalize does it.
            norms = torch.linalg.vector_norm(features, dim=1, keepdim=True).clamp_(min=1e-12)
            return ids, on_grid(features / norms)
        valid = torch.isfinite(features).all(1, keepdim=True)
        queries = F.normalize(torch.where(valid, features, 0.0), dim=1)
        return ids, torch.where(valid, on_grid(queries), torch.nan)

    def _lookup(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Similarities and image ids of the K best rows held here; a NaN query finds nothing."""
        similarities, places = search(
            queries, self.cache, self.k, quantized=self._quantized, row_norm=1 + 1e-3
        )
        first = self.rows.start
        return similarities, torch.where(places >= 0, places + first, -1) if first else places

    def _write(self, ids: Tensor, queries: Tensor, similarities: Tensor, neighbours: Tensor) -> None:
        """Keep features and lists of the images held here."""
        skipped = torch.isnan(queries[:, 0])
        # The lists are kept in main memory: what decides who is written goes there with them, in one transfer.
        ids, skipped, similarities, neighbours = _on_cpu(ids, skipped, similarities, neighbours)
        batch = self._to_write(ids, skipped)
        places = self._places(ids[batch])
        self._keep_lists(places, neighbours[batch], similarities[batch])
        if isinstance(batch, slice):
            places = to_device(places, self.cache.device)
        else:
            batch, places = to_device(torch.stack([batch, places]), self.cache.device)
        written = queries[batch].to(self.cache.dtype)
        self.cache[places] = written
        if self._quantized is not None and len(written):
            self._quantized.write(places, written)

    def _to_write(self, ids: Tensor, skipped: Tensor) -> slice | Tensor:
        """Which of a batch to keep: finite ones of images held here; of one that stands twice, the last."""
        if len(ids):
            ascending = np.sort(ids.numpy())
            held = ascending[0] >= self.rows.start and ascending[-1] < self.rows.stop
            distinct = not (ascending[1:] == ascending[:-1]).any()
            if held and distinct and not skipped.any():
                return slice(None)  # all, as nearly always where there is one process
        kept = (ids >= self.rows.start) & (ids < self.rows.stop) & ~skipped
        batch = kept.nonzero()[:, 0]
        return batch[_last_occurrence(ids[batch])]

    def _refresh_int8(self) -> None:
        """Give a CPU's search an int8 copy of the cache. It can always be rebuilt, so it is not part of the state."""
        few = self.cache.numel() < _INT8_FROM or self.epochs == 0
        if self.cache.device.type != "cpu" or few or not self.lists:
            return
        if self._quantized is None:
            self._quantized = QuantizedRows(self.cache)
        else:
            self._quantized.refresh(self.cache)


def itself(ids: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Lists that hold the image alone."""
    return torch.ones(len(ids), 1, device=queries.device), ids[:, None].to(queries.device)


def _on_cpu(ids: Tensor, skipped: Tensor, similarities: Tensor, neighbours: Tensor) -> tuple[Tensor, ...]:
    """The same tensors on the CPU; where they are on a device, Python waits for it once."""
    if similarities.device.type == "cpu":
        return ids.cpu(), skipped, similarities, neighbours
    there = [skipped[:, None].int(), similarities.view(torch.int32), neighbours.int()]
    if ids.device.type != "cpu":
        there.append(ids[:, None].int())
    k = similarities.shape[1]
    words = torch.cat(there, 1).cpu()  # (B, 2 K + 1 or + 2)
    ids = ids if ids.device.type == "cpu" else words[:, -1].long()
    similarities = words[:, 1 : k + 1].contiguous().view(torch.float32)
    return ids, words[:, 0].bool(), similarities, words[:, k + 1 : 2 * k + 1].long()


def _last_occurrence(ids: Tensor) -> Tensor:
    """Positions of each distinct id's last place."""
    order = ids.argsort(stable=True)
    ordered = ids[order]
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return order[last]
