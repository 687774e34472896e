"""What sits on the encoder during pretraining: DINO's head, SimSiam's projector and predictor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Prototypes(nn.Module):
    """A bias-free linear layer with weight norm: row k of the weight is g_k * v_k / |v_k|.

    The names weight_v and weight_g are those of torch's weight norm, so that DINO's checkpoints fit.
    """

    def __init__(self, in_dim: int, out_dim: int, *, frozen_gain: bool) -> None:
        super().__init__()
        self.weight_v = nn.Linear(in_dim, out_dim, bias=False).weight  # torch's own init
        self.weight_g = nn.Parameter(torch.ones(out_dim, 1), requires_grad=not frozen_gain)

    def forward(self, x: Tensor) -> Tensor:
        v, g = self.weight_v, self.weight_g
        if v.is_meta:  # where torch 2.6 has no gradient of the operation below
            return F.linear(x, v * (g / v.norm(dim=1, keepdim=True)))
        # As torch's own weight norm does it: in two passes over the weights, where plain operations take ten.
        return F.linear(x, torch._weight_norm(v, g, 0))  # (B, out_dim)


class DinoHead(nn.Module):
    """in -> hidden -> hidden -> bottleneck with GELU between, L2-normalised, then the prototypes; no BN."""

    def __init__(
        self, in_dim: int, out_dim: int, *, hidden_dim: int, bottleneck_dim: int, norm_last_layer: bool
    ) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(in_dim, hidden_dim),
            nn.GELU(),
            nn.Linear(hidden_dim, hidden_dim),
            nn.GELU(),
            nn.Linear(hidden_dim, bottleneck_dim),
        )
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.last_layer = Prototypes(bottleneck_dim, out_dim, frozen_gain=norm_last_layer)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, out_dim) of features (B, in_dim)."""
        x = self.mlp(x).float()  # the norm and its epsilon need float32 under autocast
        return self.last_layer(F.normalize(x, dim=1))


class Projector(nn.Sequential):
    """SimSiam's three-layer projector, BN after every layer; the last BN has no affine part.

    The last bias is frozen: the BN behind it takes any constant off again.
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        last = nn.Linear(dim, dim)
        last.bias.requires_grad_(False)
        super().__init__(
            nn.Linear(in_dim, dim, bias=False),
            nn.BatchNorm1d(dim),
            nn.ReLU(inplace=True),
            nn.Linear(dim, dim, bias=False),
            nn.BatchNorm1d(dim),
            nn.ReLU(inplace=True),
            last,
            nn.BatchNorm1d(dim, affine=False),
        )


class Predictor(nn.Sequential):
    """SimSiam's bottleneck predictor: dim -> hidden -> dim, BN on the hidden layer only."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__(
            nn.Linear(dim, hidden_dim, bias=False),
            nn.BatchNorm1d(hidden_dim),
            nn.ReLU(inplace=True),
            nn.Linear(hidden_dim, dim),
        )
