"""NNCLR: InfoNCE whose positive is the nearest neighbour of a view in a queue of embeddings (Dwibedi et al., 2021).

Unlike self-distillation it pushes other images away, so that wrong positives cannot make all features equal. With
`queue_size=0` the positive is the other view itself: plain InfoNCE, on whatever pairs the policy makes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adasim.config import ModelConfig, OptimConfig
from adasim.dist.collectives import Exchange, gather_with_gradient
from adasim.methods.base import EncodedView, Step, decay_groups
from adasim.methods.simsiam import Siamese
from adasim.options import NnclrSettings
from adasim.registry import METHODS


@METHODS.register("nnclr")
class Nnclr(Siamese):
    """InfoNCE between each view's prediction and the other's neighbour in a first-in, first-out queue of embeddings.

    The queue is the same on all ranks. It begins with random directions, and moves after sound steps only.
    """

    Settings = NnclrSettings
    queue: Tensor
    place: Tensor

    def __init__(self, model: ModelConfig, config: NnclrSettings, image_size: int, channels: int = 3) -> None:
        super().__init__(model, config, image_size, channels)
        # (Q, D')
        self.register_buffer("queue", F.normalize(torch.randn(config.queue_size, config.proj_dim), dim=1))
        self.register_buffer("place", torch.tensor(0))  # of the oldest embedding
        self._next: Tensor | None = None  # embeddings that wait until the step is known to be sound

    def loss(self, views: list[EncodedView], epoch: int) -> Step:
        """1/2 [InfoNCE(NN(z1), p2) + InfoNCE(NN(z2), p1)], over the images of all ranks."""
        first, second = views
        z1, z2 = (F.normalize(view.target.float(), dim=1) for view in views)  # (B, D')
        loss = 0.5 * (self._info_nce(z1, second.output) + self._info_nce(z2, first.output))
        if len(self.queue):
            earlier = [self._next] if self.continues_step and self._next is not None else []
            self._next = torch.cat([*earlier, gather_with_gradient(z1.detach())])
        return self.step(loss, views)

    def _info_nce(self, z: Tensor, prediction: Tensor) -> Tensor:
        """Mean over i of -log softmax over k of NN(z_i) . p_k / temperature, at k = i."""
        predictions = gather_with_gradient(F.normalize(prediction.float(), dim=1))  # (B of all ranks, D')
        # NN(z_i): the most similar row of the queue.
        positives = self.queue[(z.detach() @ self.queue.T).argmax(dim=1)] if len(self.queue) else z
        logits = positives @ predictions.T / self.config.temperature
        own = torch.arange(len(z), device=z.device) + Exchange().rank * len(z)
        return F.cross_entropy(logits, own)

    @torch.no_grad()
    def after_step(self, step: int, total_steps: int) -> None:
        """Let the newest embeddings take the oldest ones' places."""
        if self._next is None:
            return
        new = self._next[-len(self.queue) :]
        places = (self.place + torch.arange(len(new), device=new.device)) % len(self.queue)
        self.queue[places] = new
        self.place.copy_((self.place + len(new)) % len(self.queue))
        self._next = None

    def param_groups(self, optim: OptimConfig) -> list[dict[str, Any]]:
        return decay_groups(self.named_parameters(), optim)
