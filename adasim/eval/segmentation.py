"""`adasim eval segmentation`: a 1x1 convolution on frozen patch features, scored by mean intersection over union."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from rich.table import Column, Table
from timm.models import VisionTransformer
from torch import Tensor, nn
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from adasim.data import ImageSet
from adasim.data.masks import IGNORE, blank, class_names, count_classes, require_same_size
from adasim.data.pool import read_batches
from adasim.dist.collectives import mean_over_ranks
from adasim.dist.devices import image_layout
from adasim.dist.processes import ALONE, Distributed
from adasim.eval.evaluation import Evaluation, Extractor, Report, pick_quick
from adasim.eval.features import check_positive, finite_rows, frozen, require_finite, require_size, some_ids
from adasim.options import SegmentationOptions
from adasim.registry import EVALUATIONS
from adasim.util import seeding
from adasim.util.errors import UserError
from adasim.util.terminal import progress_bar

Things = TypeVar("Things", Tensor, Sequence[Tensor])
MaskBatches = Iterable[tuple[Tensor, Tensor]]
"""(B, D, h, w) patch features and their (B, H, W) masks, batch after batch."""
HELD_BYTES = 2 * 1024**3
"""Patch features up to this size are made once and held; larger ones are made anew for every epoch."""
_ENLARGED = 2  # images are looked at at twice the side of the encoder's own: 448 for 224, as published
_LOGITS = 1 << 25  # upsampled logits held at a time: 128 MB

# ---- the score ----


class MeanIou(NamedTuple):
    """Intersection over union in percent, from counts over all pixels of all images."""

    miou: float  # mean over all classes; one that is in no mask and no prediction counts 0, as published
    miou_present: float  # mean without such absent classes
    iou: tuple[float, ...]  # of each class; 0 of an absent one


def miou(predictions: Tensor, targets: Tensor, num_classes: int, ignore: int = 255) -> MeanIou:
    """Mean intersection over union of class ids, both of shape (images, H, W) or any other equal shape."""
    if predictions.shape != targets.shape:
        raise UserError(
            f"The predictions have shape {tuple(predictions.shape)} and the masks {tuple(targets.shape)}. Resize one "
            f"to the other before they are compared."
        )
    check_masks(targets, num_classes, ignore)
    return mean_iou(count_pixels(predictions, targets, num_classes, ignore))


def count_pixels(predictions: Tensor, targets: Tensor, num_classes: int, ignore: int = 255) -> Tensor:
    """(C, C): how many pixels of a true class (row) are predicted to be of a class (column)."""
    scored = targets != ignore
    guess, truth = predictions[scored].to(torch.int64), targets[scored].to(torch.int64)
    if len(guess) and not 0 <= int(guess.min()) <= int(guess.max()) < num_classes:
        raise UserError(f"The predictions hold ids outside 0 to {num_classes - 1}. Raise num_classes.")
    counts = torch.bincount(truth * num_classes + guess, minlength=num_classes**2)
    return counts.view(num_classes, num_classes).cpu()


def mean_iou(counts: Tensor, left_out: Sequence[int] = ()) -> MeanIou:
    """IoU = tp / (tp + fp + fn) of each class, and its means, without the ids `left_out`, which are no classes."""
    both = counts.diagonal()  # tp
    either = counts.sum(dim=0) + counts.sum(dim=1) - both  # tp + fp + fn
    if not either.any():
        raise UserError("Every pixel of the masks is ignored, so there is nothing to score.")
    iou = 100 * both.double() / either.clamp(min=1)
    scored = torch.ones(len(counts), dtype=torch.bool)
    scored[[i for i in left_out if 0 <= i < len(counts)]] = False
    present = scored & (either > 0)
    return MeanIou(float(iou[scored].mean()), float(iou[present].mean()), tuple(iou.tolist()))


def check_masks(masks: Tensor, num_classes: int, ignore: int) -> None:
    """Refuse masks with other ids than 0..num_classes-1 and `ignore`."""
    check_positive(num_classes=num_classes)
    if masks.is_floating_point() or masks.dtype == torch.bool:
        raise UserError(f"The masks hold {masks.dtype}; give whole numbers, one id per class.")
    unknown = masks[((masks < 0) | (masks >= num_classes)) & (masks != ignore)].unique().tolist()
    if unknown:
        raise UserError(
            f"The masks hold {some_ids(unknown)}; this data set has classes 0 to {num_classes - 1}, "
            f"and {ignore} for pixels to ignore. Remap the masks or raise num_classes."
        )


# ---- the layer ----


def logits_of_few(head: nn.Conv2d, features: Tensor, masks: Tensor) -> MaskBatches:
    """Logits (b, C, H, W), upsampled bilinearly to the masks, and their masks (b, H, W), of a few images at a time:
    those of a whole batch at 448 pixels would take a gigabyte."""
    size = tuple(masks.shape[1:])
    step = max(1, _LOGITS // (head.out_channels * math.prod(size)))
    for some, truth in zip(features.split(step), masks.split(step), strict=True):
        if len(truth):
            yield F.interpolate(head(some), size=size, mode="bilinear", align_corners=False), truth


def add_gradient(head: nn.Conv2d, features: Tensor, masks: Tensor, ignore: int, ranks: Distributed) -> bool:
    """Add the gradient of the mean cross-entropy over the labelled pixels of all ranks; False if there are none."""
    [labelled] = ranks.all_mean(int((masks != ignore).sum()))
    if not labelled:
        return False
    for logits, truth in logits_of_few(head, features, masks.to(torch.int64)):
        loss = F.cross_entropy(logits, truth, ignore_index=ignore, reduction="sum")
        (loss / labelled).backward()
    for parameter in head.parameters() if ranks.world > 1 else ():
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = mean_over_ranks(mine)
    return True


def linear_segmentation(
    epoch_batches: Callable[[int], MaskBatches],
    test_batches: Callable[[], MaskBatches],
    *,
    dim: int,
    num_classes: int,
    epochs: int = 60,
    lr: float = 0.1,
    ignore: int = 255,
    left_out: Sequence[int] = (),
    seed: int = 0,
    device: torch.device | str = "cpu",
    ranks: Distributed = ALONE,
) -> list[MeanIou]:
    """Train a 1x1 convolution by Adam at a constant rate; the scores on the test set after every epoch.

    Args:
        epoch_batches: gives the training batches of an epoch (from 0), so that each may be augmented anew.
        test_batches: gives the test batches, the same ones at every call.
        dim: channels of the patch features.
        lr: 0.1, as in the pipeline that matches the paper's results.
        ignore: the id of pixels that neither train nor count.
        left_out: ids that no mask shows and that are no classes: they are not part of the mean.
        ranks: processes of which each has its rows of every training batch, or none of them, and its part of the test
            batches.
    """
    check_positive(dim=dim, num_classes=num_classes, epochs=epochs, lr=lr)
    with seeding.seeded(seeding.key(seed, "segmentation head")):
        head = nn.Conv2d(dim, num_classes, kernel_size=1).to(device)
    optimizer = torch.optim.Adam(head.parameters(), lr=lr)

    def checked(batches: MaskBatches) -> MaskBatches:
        for features, masks in batches:
            if (features.ndim, *features.shape[:2], masks.ndim) != (4, len(masks), dim, 3):
                raise UserError(
                    f"A segmentation batch has features {tuple(features.shape)} and masks {tuple(masks.shape)}; "
                    f"give (images, {dim}, rows, columns) and (images, height, width)."
                )
            if len(features) and not finite_rows(features).all():
                raise UserError(
                    "The patch features hold a NaN or infinite value. Extract them again in fp32."
                )
            check_masks(masks, num_classes, ignore)
            yield features.to(device, torch.float32), masks.to(device)

    scores = []
    for epoch in range(epochs):
        for features, masks in checked(epoch_batches(epoch)):
            optimizer.zero_grad()
            # A batch of ignored pixels alone makes no step.
            if add_gradient(head, features, masks, ignore, ranks):
                optimizer.step()
        counts = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        with torch.no_grad():
            for features, masks in checked(test_batches()):
                for logits, truth in logits_of_few(head, features, masks):
                    counts += count_pixels(logits.argmax(dim=1), truth, num_classes, ignore)
        scores.append(mean_iou(torch.stack(ranks.gather(counts)).sum(0), left_out))
    return scores


# ---- its inputs ----


@dataclass
class PatchFeatures:
    """The patch features of images, and their masks, as `linear_segmentation` asks for them.

    Images are squashed to `size`; masks too, unless they are smaller arrays, which are scored as they are. Several
    processes share the images: each trains on its rows of a batch, and is tested on its batches.
    """

    extractor: Extractor
    images: ImageSet
    """With masks."""
    ids: Tensor
    """Which of them."""
    _: KW_ONLY
    size: int
    blocks: int
    """Of a ViT, how many of the last blocks; a convolutional net has its last feature map."""
    batch_size: int
    ignore: Sequence[int] = ()
    """Ids that become `IGNORE`."""
    flip: float = 0.5
    """How often an augmented image is mirrored."""

    def __post_init__(self) -> None:
        self.ranks, self.device = self.extractor.ranks, self.extractor.device
        self.backbone = self.extractor.encoder.backbone
        array = self.images.as_array()
        self.mask_size = self.size if array is None else min(self.size, max(array.shape[-2:]))
        self.workers = 0 if array is not None else self.extractor.workers
        self._held: tuple[Tensor, Tensor] | None = None
        require_size(self.backbone, self.size)
        black = torch.zeros(1, 3, self.size, self.size, device=self.device)
        self.shape = self._patches(black).shape[1:]  # (D, h, w)
        self.bytes = self.shape.numel() * 4 * len(self.ids)

    def hold(self, share: bool = False) -> bool:
        """Make this process's features now and keep them, if all of them fit; with `share`, all processes have all.
        Epochs then differ in their order alone."""
        if self.bytes > HELD_BYTES:
            return False
        batches, is_main = self._batches(), self.ranks.is_main
        with progress_bar(f"{self.images.name}: patch features", sum(map(len, batches)), is_main) as bar:
            made = list(counted(self._make(batches or [self.ids[:0]], None), bar))
        features, masks = map(torch.cat, zip(*made, strict=True))
        if share:
            counts = self.ranks.gather(len(features))
            features, masks = (self.ranks.gather_rows(part, counts) for part in (features, masks))
        self._held = features, masks
        return True

    def shuffled(self, epoch: int) -> MaskBatches:
        """This process's rows of the batches of a training epoch, which may be none: from what is held and shared, or
        from freshly augmented images."""
        order = seeding.permutation(self.extractor.seed, "segmentation order", epoch, len(self.ids))
        batches = [_share(self.ranks, rows) for rows in order.split(self.batch_size)]
        if self._held is None:
            return self._make([self.ids[rows] for rows in batches], epoch)
        features, masks = self._held
        return ((features[rows], masks[rows]) for rows in batches)

    def in_order(self) -> MaskBatches:
        """This process's batches of the images as they are."""
        if self._held is None:
            return self._make(self._batches(), None)
        features, masks = self._held
        return zip(features.split(self.batch_size), masks.split(self.batch_size), strict=True)

    def _batches(self) -> Sequence[Tensor]:
        return _share(self.ranks, self.ids.split(self.batch_size))

    def _make(self, batches: Sequence[Tensor], epoch: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Features and masks of these images, warped as in that epoch if there is one."""
        shapes = [(3, self.size, self.size), (self.mask_size, self.mask_size)]
        for numbers, (pixels, masks), failed in read_batches(self._load, batches, shapes, self.workers):
            masks = masks.to(self.device)
            if not len(numbers):
                yield torch.empty(0, *self.shape, device=self.device), masks
                continue
            for problem in failed.values():
                raise UserError(f"An image or mask cannot be read: {problem}. Repair or remove it.")
            views = self.extractor.encoder.transform.normalise(pixels.to(self.device))
            if epoch is not None:
                views, masks = warp(views, masks, self.extractor.seed, epoch, numbers, self.flip)
            patches = self._patches(views)
            require_finite(patches, self.backbone)
            yield patches, masks

    def _patches(self, views: Tensor) -> Tensor:
        """(B, blocks * D, h, w)."""
        views = views.contiguous(memory_format=image_layout(views.device))
        with frozen(self.backbone), torch.no_grad():
            is_vit = isinstance(self.backbone.net, VisionTransformer)
            blocks = self.backbone.tokens(views, self.blocks if is_vit else 1)
            return torch.cat([patches for _, patches in blocks], dim=1).float()

    def _load(self, i: int) -> tuple[Tensor, Tensor]:
        """Image i and its mask, uint8 (3, size, size) and uint8 (mask_size, mask_size)."""
        picture = self.images.load(i)
        mask = blank(require_same_size(picture, self.images.mask(i), self.images.where(i)), self.ignore)
        sides, mask_sides = [self.size] * 2, [self.mask_size] * 2  # what has these already stays as it is
        picture = TF.resize(picture, sides, interpolation=InterpolationMode.BICUBIC, antialias=True)
        mask = TF.resize(mask[None], mask_sides, interpolation=InterpolationMode.NEAREST_EXACT)[0]
        return picture, mask


def _share(ranks: Distributed, things: Things) -> Things:
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

    def moved(images: Tensor, mode: str) -> Tensor:
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, mode=mode, align_corners=False)

    shifted = masks[:, None].float() - IGNORE  # outside is 0, and so becomes the ignored id
    turned = moved(shifted, "nearest")[:, 0] + IGNORE
    return moved(views, "bilinear"), turned.round().to(masks.dtype)


# ---- the evaluation ----


class _Training(NamedTuple):
    epochs: int
    batch_size: int
    lr: float


# Ten epochs at the published rate of 0.1 end anywhere within two points; at a tenth of it they settle.
_QUICK = _Training(epochs=10, batch_size=64, lr=0.01)
_PUBLISHED = _Training(epochs=60, batch_size=16, lr=0.1)


@EVALUATIONS.register("segmentation")
@dataclass(kw_only=True)
class Segmentation(SegmentationOptions, Evaluation):
    """Measures what its options, in adasim/options.py, ask for."""

    named_size: ClassVar[int | None] = 224 * _ENLARGED

    def run(self, extractor: Extractor) -> Report:
        quick = pick_quick(self, extractor)
        mode, usual = ("quick", _QUICK) if quick else ("augmented", _PUBLISHED)
        lr = usual.lr if self.lr is None else self.lr
        training = _Training(self.epochs or usual.epochs, self.batch_size or usual.batch_size, lr)
        encoder, ranks = extractor.encoder, extractor.ranks
        usual_size = encoder.usual_size * (1 if encoder.named else _ENLARGED)
        size = encoder.transform.size if encoder.resized else usual_size

        split = extractor.open_split(self, masks=True)
        count = partial(count_classes, split.train, self.classes, self.ignore)
        classes = ranks.run_with_heartbeat(count if ranks.is_main else None)  # one reads all masks
        classes = ranks.share(classes)
        assert classes is not None
        patches = partial(PatchFeatures, extractor, size=size, blocks=self.blocks, flip=self.flip)
        train, test = (
            patches(images, ids, batch_size=training.batch_size, ignore=self.ignore)
            for images, ids in ((split.train, split.train_ids), (split.test, split.test_ids))
        )
        if quick and not train.hold(share=True):
            raise UserError(
                f"--quick would hold {train.bytes / 1e9:.0f} GB of patch features. Use --augmented, or a smaller "
                f"--size or --blocks."
            )
        test.hold()
        total = training.epochs * (len(split.train_ids) + len(split.test_ids)) // ranks.world
        with progress_bar(f"{split.name}: {training.epochs} epochs", total, ranks.is_main) as bar:
            scores = linear_segmentation(
                lambda epoch: counted(train.shuffled(epoch), bar),
                lambda: counted(test.in_order(), bar),
                dim=train.shape[0],
                num_classes=classes,
                epochs=training.epochs,
                lr=training.lr,
                left_out=self.ignore,
                seed=extractor.seed,
                device=extractor.device,
                ranks=ranks,
            )
        best, last = max(scores, key=lambda score: score.miou), scores[-1]  # the paper reports the best
        line = extractor.result(
            "segmentation",
            best.miou,
            setting=f"mIoU, {mode}" + "".join(f", ignore {i}" for i in sorted(set(self.ignore))),
            changes={
                "blocks": (self.blocks, Segmentation.blocks),
                "epochs": (training.epochs, usual.epochs),
                "batch_size": (training.batch_size, usual.batch_size),
                "lr": (training.lr, usual.lr),
                "flip": (self.flip, Segmentation.flip),
                "size": (size, usual_size),
            },
            metrics={
                "miou_best": best.miou,
                "miou_last": last.miou,
                "miou_present_best": best.miou_present,
                "iou_best": list(best.iou),
            },
            data=split,
            settings={"classes": classes, "ignore": list(self.ignore), "mode": mode},
        )
        columns = (Column(heading, justify="right") for heading in ("best epoch", "last epoch"))
        table = Table("IoU", *columns, box=None, padding=(0, 2))
        table.add_row("mean", f"{best.miou:.2f}", f"{last.miou:.2f}", style="bold")
        table.add_row("mean of the classes present", f"{best.miou_present:.2f}", f"{last.miou_present:.2f}")
        for i, name in enumerate(class_names(split.train, classes)):
            if i not in self.ignore:
                table.add_row(f"  {name}", f"{best.iou[i]:.2f}", f"{last.iou[i]:.2f}")
        title = extractor.title(f"Linear segmentation ({mode})", split)
        return Report(results=(line,), title=title, table=table)
