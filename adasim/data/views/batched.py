"""Views of whole batches, on any device: from images in memory, or from crops that loader processes have cut."""

from __future__ import annotations

import torch
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.data.views.colours import finish
from adasim.data.views.crops import crop_batch
from adasim.data.views.parameters import CropDraws, ViewSettings, draw_changes, view_uniforms


class BatchedViews:
    """Makes the views that a `ViewsConfig` describes: a pure function of the pixels and of the view's name, which is
    (seed, view, epoch, id).

    >>> views, ids = BatchedViews(ViewsConfig(size=32)), torch.arange(5)
    >>> tuple(views(torch.zeros(5, 3, 48, 64, dtype=torch.uint8), view=1, seed=0, epoch=0, ids=ids).shape)
    (5, 3, 32, 32)
    """

    def __init__(self, config: ViewsConfig) -> None:
        self.count = 2 + config.local_crops
        self.settings = {view: ViewSettings.of(config, view) for view in range(1, self.count + 1)}
        self._mean = torch.tensor(config.mean)[:, None, None]
        self._std = torch.tensor(config.std)[:, None, None]

    def __call__(self, images: Tensor, view: int, seed: int, epoch: int, ids: Tensor) -> Tensor:
        """View number `view` of images uint8 (B, C, H, W): float32 (B, 3, S, S)."""
        settings = self.settings[view]
        B, _, H, W = images.shape
        uniforms = view_uniforms(seed, view, epoch, ids.cpu())
        changes = draw_changes(settings, uniforms)
        boxes = CropDraws.of(settings, uniforms).boxes(torch.full((B,), H), torch.full((B,), W))
        crops = crop_batch(images, settings, boxes, changes.flip)
        return finish(crops, settings, changes, self._mean, self._std, flipped=True)

    def of_crops(self, crops: Tensor, view: int, seed: int, epoch: int, ids: Tensor) -> Tensor:
        """The same from crops uint8 (B, 3, S, S) that are cut already; they are used up."""
        settings = self.settings[view]
        changes = draw_changes(settings, view_uniforms(seed, view, epoch, ids.cpu()))
        return finish(crops, settings, changes, self._mean, self._std)
