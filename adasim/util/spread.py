"""How far features spread over the sphere, and how many directions they use: what a collapse takes away."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_EPSILON = 1e-7  # as published


def feature_spread(features: Tensor) -> Tensor:
    """Deviation of the L2-normalised features (B, D) over the batch, averaged over dimensions, times sqrt(D).

    About 1 when features fill the sphere, 0 when all are equal (collapse).
    """
    unit = F.normalize(features.detach().float(), dim=1)
    return unit.std(dim=0, correction=0).mean() * features.shape[1] ** 0.5


def rankme(features: Tensor) -> float:
    """RankMe (Garrido et al., 2023, equation 1): how many directions the features (N, D) use, between 1 and D.

    The exponential of the entropy of the singular values, which are divided by their sum first. If all features are
    zero, no direction counts as one.

    >>> round(rankme(torch.eye(4)), 2)
    4.0
    """
    values = torch.linalg.svdvals(features.detach().cpu().double())
    total = values.sum()
    if not total > 0:
        return 1.0
    p = values / total + _EPSILON
    return float(torch.exp(-(p * p.log()).sum()))
