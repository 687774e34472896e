"""The map: a place in two dimensions for every image, so that images that look alike lie close together."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from adasim.explore.support import Nearest
from adasim.util.terminal import progress_bar

_FEW = 30  # below that many images principal components have to do
_NEIGHBOURS = 15
_STAGES = ((150, 12.0, 0.5), (350, 1.0, 0.8))  # steps, exaggeration of attraction, momentum
_REPORT = 25  # steps between two reports


def coordinates(features: Tensor, nearest: Nearest, seed: int = 0) -> Tensor:
    """(N, 2), NaN for images without features: t-SNE of the graph of nearest neighbours, from principal components.

    All 15 neighbours of an image attract it alike, which gives nearly the map of t-SNE's own weights (Böhm et al.,
    arXiv 2007.08902) without another search. One thread, so that the same images give the same map.
    """
    known = torch.isfinite(features).all(1).nonzero()[:, 0]
    start = _components(features[known])
    places = torch.full((len(features), 2), torch.nan)
    places[known] = (
        start if len(known) < _FEW else _tsne(start, nearest.ids[known, :_NEIGHBOURS], known, seed)
    )
    return places


def _components(features: Tensor) -> Tensor:
    """(n, 2): the two principal components of the L2-normalised rows."""
    rows = normalize(features.float(), dim=1)
    centred = rows - rows.mean(0)
    _, axes = torch.linalg.eigh(centred.T @ centred)  # ascending
    return pad(centred @ axes[:, -2:].flip(1), (0, 2 - min(2, features.shape[1])))


def _tsne(start: Tensor, neighbours: Tensor, known: Tensor, seed: int) -> Tensor:
    from openTSNE import TSNEEmbedding
    from openTSNE.affinity import PrecomputedAffinities
    from scipy.sparse import csr_matrix

    count = len(known)
    row_of = torch.full((int(known.max()) + 2,), -1)  # the last one is for padding, -1
    row_of[known] = torch.arange(count)
    to = row_of[neighbours]
    listed = to >= 0
    if not listed.any():
        return start
    rows = torch.arange(count)[:, None].expand_as(to)[listed]
    graph = csr_matrix((np.ones(len(rows)), (rows.numpy(), to[listed].numpy())), shape=(count, count))
    start = start - start.mean(0)
    embedding = TSNEEmbedding(
        (start / start[:, 0].std().clamp(min=1e-12) * 1e-4).double().numpy(),
        PrecomputedAffinities(graph + graph.T, normalize=True),
        negative_gradient_method="fft" if count > 3_000 else "bh",
        ints_in_interval=2,  # a coarser grid: half the time, and 28 instead of 29% of the neighbours stay neighbours
        random_state=seed,
        n_jobs=1,
    )
    with progress_bar("map", sum(steps for steps, _, _ in _STAGES)) as advance:
        for steps, exaggeration, momentum in _STAGES:
            for _ in range(steps // _REPORT):
                embedding.optimize(_REPORT, exaggeration=exaggeration, momentum=momentum, inplace=True)
                advance(_REPORT)
    return torch.from_numpy(np.asarray(embedding)).float()
