"""Patch features with masks, batch after batch, for linear segmentation (docs/evaluation.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from timm.models import VisionTransformer
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from adasim.data import ImageSet
from adasim.data.masks import IGNORE, blank, require_same_size
from adasim.data.pool import read_batches
from adasim.dist.devices import image_layout
from adasim.dist.processes import ALONE, Distributed
from adasim.eval.features import frozen, require_finite, require_size
from adasim.models import Backbone
from adasim.models.transform import EvalTransform
from adasim.util import seeding
from adasim.util.errors import UserError
from adasim.util.terminal import progress_bar

Things = TypeVar("Things", Tensor, Sequence[Tensor])
MaskBatches = Iterable[tuple[Tensor, Tensor]]
"""(B, D, h, w) patch features and their (B, H, W) masks, batch after batch."""
HELD_BYTES = 2 * 1024**3
"""Patch features up to this size are made once and held; larger ones are made anew for every epoch."""


class PatchFeatures:
    """The patch features of images, and their masks, as `linear_segmentation` asks for them.

    Images are squashed to `size`; masks too, unless they are smaller arrays, which are scored as they are.

    Args:
        images: with masks.
        ids: which of them.
        transform: whose normalisation applies.
        n_blocks: of a ViT, how many of the last blocks; a convolutional net has its last feature map.
        ignore: ids that become `IGNORE`.
        flip: how often an augmented image is mirrored.
        ranks: the processes that share the images: each trains on its rows of a batch, and is tested on its batches.
    """

    def __init__(
        self,
        backbone: Backbone,
        images: ImageSet,
        ids: Tensor,
        transform: EvalTransform,
        *,
        size: int,
        n_blocks: int,
        batch_size: int,
        device: torch.device | str = "cpu",
        workers: int = 0,
        seed: int = 0,
        ignore: Sequence[int] = (),
        flip: float = 0.5,
        ranks: Distributed = ALONE,
    ) -> None:
        self.backbone = backbone.to(device)
        self.n_blocks = n_blocks if isinstance(backbone.net, VisionTransformer) else 1
        self.device, self.seed, self.batch_size = torch.device(device), seed, batch_size
        self._ids, self._transform, self._workers = ids, transform, workers
        array = images.as_array()
        self._images, self._ignore, self._size, self._flip = images, ignore, size, flip
        self._side = size if array is None else min(size, max(array.shape[-2:]))
        self._held: tuple[Tensor, Tensor] | None = None
        self.ranks = ranks
        require_size(self.backbone, size)
        black = torch.zeros(1, 3, size, size, dtype=torch.uint8, device=self.device)
        patches = self._patches(transform.normalise(black))
        self._shape = patches.shape[1:]
        self.dim, self.bytes = patches.shape[1], patches.numel() * 4 * len(ids)

    def hold(self, share: bool = False) -> bool:
        """Make this process's features now and keep them, if all of them fit; with `share`, all processes have all.
        Epochs then differ in their order alone."""
        if self._held is None and self.bytes <= HELD_BYTES:
            mine, shown = self._batches(), self.ranks.is_main
            with progress_bar(f"{self._images.name}: patch features", sum(map(len, mine)), shown) as advance:
                made = list(counted(self._make(mine or [self._ids[:0]], None), advance))
            features, masks = map(torch.cat, zip(*made, strict=True))
            if share:
                counts = self.ranks.gather(len(features))
                features, masks = (self.ranks.gather_rows(part, counts) for part in (features, masks))
            self._held = features, masks
        return self._held is not None

    def shuffled(self, epoch: int) -> MaskBatches:
        """This process's rows of the batches of a training epoch, which may be none: from what is held and shared, or
        from freshly augmented images."""
        order = seeding.permutation(self.seed, "segmentation order", epoch, len(self._ids))
        batches = [split_over(self.ranks, rows) for rows in order.split(self.batch_size)]
        if self._held is None:
            return self._make([self._ids[rows] for rows in batches], epoch)
        features, masks = self._held
        return ((features[rows], masks[rows]) for rows in batches)

    def in_order(self) -> MaskBatches:
        """This process's batches of the images as they are."""
        if self._held is None:
            return self._make(self._batches(), None)
        features, masks = self._held
        return zip(features.split(self.batch_size), masks.split(self.batch_size), strict=True)

    def _batches(self) -> Sequence[Tensor]:
        return split_over(self.ranks, self._ids.split(self.batch_size))

    def _make(self, batches: Sequence[Tensor], epoch: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        shapes = [(3, self._size, self._size), (self._side, self._side)]
        for numbers, (pixels, masks), failed in read_batches(self._load, batches, shapes, self._workers):
            if not len(numbers):
                yield torch.empty(0, *self._shape, device=self.device), masks.to(self.device)
                continue
            for problem in failed.values():
                raise UserError(f"An image or mask cannot be read: {problem}. Repair or remove it.")
            views, masks = self._transform.normalise(pixels.to(self.device)), masks.to(self.device)
            if epoch is not None:
                views, masks = warp(views, masks, self.seed, epoch, numbers, self._flip)
            patches = self._patches(views)
            require_finite(patches, self.backbone)
            yield patches, masks

    def _patches(self, views: Tensor) -> Tensor:
        """(B, n_blocks * D, h, w)."""
        with frozen(self.backbone), torch.no_grad():
            blocks = self.backbone.tokens(
                views.contiguous(memory_format=image_layout(views.device)), self.n_blocks
            )
            return torch.cat([patches for _, patches in blocks], dim=1).float()

    def _load(self, i: int) -> tuple[Tensor, Tensor]:
        """Image i and its mask, uint8 (3, size, size) and uint8 (side, side)."""
        picture = self._images.load(i)
        mask = require_same_size(picture, self._images.mask(i), self._images.where(i))
        mask = blank(mask, self._ignore)
        cubic, nearest = InterpolationMode.BICUBIC, InterpolationMode.NEAREST_EXACT
        if list(picture.shape[-2:]) != [self._size] * 2:
            picture = TF.resize(picture, [self._size] * 2, interpolation=cubic, antialias=True)
        if list(mask.shape) != [self._side] * 2:
            mask = TF.resize(mask[None], [self._side] * 2, interpolation=nearest)[0]
        return picture, mask


def split_over(ranks: Distributed, things: Things) -> Things:
    """This process's share of things, in order, of which every process has about as many."""
    count, world = len(things), ranks.world
    return things[ranks.rank * count // world : (ranks.rank + 1) * count // world]


def counted(batches: MaskBatches, advance: Callable[[int], None]) -> MaskBatches:
    """The same batches; each is counted once it was used."""
    for features, masks in batches:
        yield features, masks
        advance(len(masks))


def warp(
    views: Tensor, masks: Tensor, seed: int, epoch: int, ids: Tensor, flip: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Flip with that probability, turn by up to 5 degrees, scale by 0.75 to 1.25: images and masks alike.

    What comes in from outside the image has the mean colour and is ignored; the published pipeline labels it 0.
    """
    u = seeding.uniform(seed, "segmentation view", epoch, ids.cpu(), 3).float().to(views.device)
    mirror = torch.where(u[:, 0] < flip, -1.0, 1.0)
    angle = math.radians(5) * (2 * u[:, 1] - 1)
    zoom = 1 / (0.75 + 0.5 * u[:, 2])
    zero = torch.zeros_like(angle)
    rows = [mirror * zoom * angle.cos(), -zoom * angle.sin(), zero]
    rows += [mirror * zoom * angle.sin(), zoom * angle.cos(), zero]
    theta = torch.stack(rows, dim=1).view(-1, 2, 3)
    H, W = masks.shape[-2:]
    view_grid = F.affine_grid(theta, list(views.shape), align_corners=False)
    mask_grid = F.affine_grid(theta, [len(masks), 1, H, W], align_corners=False)
    views = F.grid_sample(views, view_grid, align_corners=False)
    shifted = masks[:, None].float() - IGNORE  # outside is 0, and so becomes the ignored id
    moved = F.grid_sample(shifted, mask_grid, mode="nearest", align_corners=False)[:, 0] + IGNORE
    return views, moved.round().to(masks.dtype)
