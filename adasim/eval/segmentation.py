"""`adasim eval segmentation`: a 1x1 convolution on frozen patch features, scored by mean intersection over union."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from adasim.data.masks import class_names, count_classes
from adasim.dist.collectives import mean_over_ranks
from adasim.dist.processes import ALONE, Distributed
from adasim.eval.evaluation import Evaluation, Extractor, Report, pick_mode, with_changes
from adasim.eval.iou import Confusion, MeanIou, check_masks
from adasim.eval.patches import MaskBatches, PatchFeatures, counted
from adasim.eval.splits import Split
from adasim.eval.tensors import check_positive
from adasim.options import SegmentationOptions
from adasim.registry import EVALUATIONS
from adasim.util import seeding
from adasim.util.errors import UserError
from adasim.util.terminal import progress_bar

SEGMENTATION_SIZE = 2
"""Segmentation looks at images twice the side of the encoder's own: 448 for 224, as published."""
_LOGITS = 1 << 25  # upsampled logits held at a time: 128 MB


@dataclass(frozen=True)
class SegmentationResult:
    """The test score after every epoch."""

    epochs: tuple[MeanIou, ...]

    @property
    def best(self) -> MeanIou:
        """The best epoch: how the paper reports."""
        return max(self.epochs, key=lambda score: score.miou)

    @property
    def last(self) -> MeanIou:
        """The last epoch: no choice made by looking at the test set."""
        return self.epochs[-1]


class LinearSegmenter(nn.Module):
    """One 1x1 convolution with bias, D to C channels; its logits are upsampled bilinearly to the masks."""

    def __init__(self, dim: int, num_classes: int, seed: int = 0) -> None:
        super().__init__()
        with seeding.seeded(seeding.key(seed, "segmentation head")):
            self.head = nn.Conv2d(dim, num_classes, kernel_size=1)

    def forward(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """(B, D, h, w) features to (B, C, H, W) logits."""
        return F.interpolate(self.head(features), size=size, mode="bilinear", align_corners=False)

    @torch.no_grad()
    def predict(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """The likeliest class of each pixel, (B, H, W) int64."""
        parts = features.split(self._images_at_a_time(size))
        return torch.cat([self(part, size).argmax(dim=1) for part in parts])

    def backward(
        self, features: Tensor, masks: Tensor, ignore: int = 255, ranks: Distributed = ALONE
    ) -> bool:
        """Add the gradient of the mean cross-entropy over the labelled pixels of all ranks; False if there are none.

        A few images at a time: the upsampled logits of a whole batch at 448 pixels would take a gigabyte.
        """
        masks = masks.to(torch.int64)
        [labelled] = ranks.all_mean(int((masks != ignore).sum()))
        if not labelled:
            return False
        size = (masks.shape[1], masks.shape[2])
        step = self._images_at_a_time(size)
        for some_features, some_masks in zip(features.split(step), masks.split(step), strict=True):
            if len(some_masks):
                logits = self(some_features, size)
                loss = F.cross_entropy(logits, some_masks, ignore_index=ignore, reduction="sum")
                (loss / labelled).backward()
        for parameter in self.parameters() if ranks.world > 1 else ():
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = mean_over_ranks(mine)
        return True

    def _images_at_a_time(self, size: tuple[int, int]) -> int:
        return max(1, _LOGITS // (self.head.out_channels * size[0] * size[1]))


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
) -> SegmentationResult:
    """Train a `LinearSegmenter` by Adam at a constant rate, and score it on the test set after every epoch.

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
    model = LinearSegmenter(dim, num_classes, seed).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    scores = []
    for epoch in range(epochs):
        for features, masks in epoch_batches(epoch):
            features, masks = _checked(features, masks, dim, num_classes, ignore, device)
            optimizer.zero_grad()
            # A batch of ignored pixels alone makes no step.
            if model.backward(features, masks, ignore, ranks):
                optimizer.step()
        confusion = Confusion(num_classes, ignore, left_out)
        for features, masks in test_batches():
            features, masks = _checked(features, masks, dim, num_classes, ignore, device)
            if len(masks):
                confusion.add(model.predict(features, (masks.shape[1], masks.shape[2])), masks)
        confusion.counts = torch.stack(ranks.gather(confusion.counts)).sum(0)
        scores.append(confusion.result())
    return SegmentationResult(tuple(scores))


def _checked(
    features: Tensor,
    masks: Tensor,
    dim: int,
    num_classes: int,
    ignore: int,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """A batch on the device in fp32, or a UserError."""
    if features.ndim != 4 or features.shape[1] != dim or masks.ndim != 3 or len(masks) != len(features):
        raise UserError(
            f"A segmentation batch has features {tuple(features.shape)} and masks {tuple(masks.shape)}; "
            f"give (images, {dim}, rows, columns) and (images, height, width)."
        )
    if not torch.isfinite(features).all():
        raise UserError("The patch features hold a NaN or infinite value. Extract them again in fp32.")
    masks = check_masks(masks, num_classes, ignore)
    return features.to(device, torch.float32), masks.to(device)


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

    named_size: ClassVar[int | None] = 224 * SEGMENTATION_SIZE

    def run(self, extractor: Extractor) -> Report:
        quick = pick_mode(self.quick, self.augmented, extractor.small)
        encoder = extractor.encoder
        usual_size = encoder.usual_size * (1 if encoder.named else SEGMENTATION_SIZE)
        size = encoder.transform.size if encoder.resized else usual_size
        usual = _QUICK if quick else _PUBLISHED
        training = _Training(
            self.epochs or usual.epochs,
            self.batch_size or usual.batch_size,
            usual.lr if self.lr is None else self.lr,
        )
        split = extractor.open_split(self, masks=True)
        ranks = extractor.ranks  # one reads the masks for all
        count = partial(count_classes, split.train, self.classes, self.ignore)
        num_classes = ranks.share(ranks.run_with_heartbeat(count if ranks.is_main else None))
        assert num_classes is not None
        result = self._train(extractor, split, size, num_classes, training, quick)
        mode = "quick" if quick else "augmented"
        left_out = "".join(f", ignore {i}" for i in sorted(set(self.ignore)))
        line = extractor.result(
            "segmentation",
            result.best.miou,
            setting=with_changes(
                f"mIoU, {mode}{left_out}",
                blocks=(self.blocks, Segmentation.blocks),
                epochs=(training.epochs, usual.epochs),
                batch=(training.batch_size, usual.batch_size),
                lr=(training.lr, usual.lr),
                flip=(self.flip, Segmentation.flip),
                size=(size, usual_size),
            ),
            metrics={
                "miou_best": result.best.miou,
                "miou_last": result.last.miou,
                "miou_present_best": result.best.miou_present,
                "iou_best": list(result.best.iou),
            },
            data=split,
            settings={
                "classes": num_classes,
                "ignore": list(self.ignore),
                "blocks": self.blocks,
                **training._asdict(),
                "flip": self.flip,
                "size": size,
                "mode": mode,
            },
        )
        return Report(
            results=(line,),
            title=extractor.title(f"Linear segmentation ({mode})", split),
            table=self._table(result, class_names(split.train, num_classes)),
        )

    def _train(
        self,
        extractor: Extractor,
        split: Split,
        size: int,
        num_classes: int,
        training: _Training,
        quick: bool,
    ) -> SegmentationResult:
        """A 1x1 convolution on patch features, held (quick) or of freshly warped images."""
        train, test = (
            PatchFeatures(
                extractor.encoder.backbone,
                images,
                ids,
                extractor.encoder.transform,
                size=size,
                n_blocks=self.blocks,
                batch_size=training.batch_size,
                device=extractor.device,
                workers=0 if images.as_array() is not None else extractor.workers,
                seed=extractor.seed,
                ignore=self.ignore,
                flip=self.flip,
                ranks=extractor.ranks,
            )
            for images, ids in ((split.train, split.train_ids), (split.test, split.test_ids))
        )
        if quick and not train.hold(share=True):
            raise UserError(
                f"--quick would hold {train.bytes / 1e9:.0f} GB of patch features. Use --augmented, or a smaller "
                f"--size or --blocks."
            )
        test.hold()
        ranks = extractor.ranks
        total = training.epochs * (len(split.train_ids) + len(split.test_ids)) // ranks.world
        with progress_bar(f"{split.name}: {training.epochs} epochs", total, ranks.is_main) as advance:
            return linear_segmentation(
                lambda epoch: counted(train.shuffled(epoch), advance),
                lambda: counted(test.in_order(), advance),
                dim=train.dim,
                num_classes=num_classes,
                epochs=training.epochs,
                lr=training.lr,
                left_out=self.ignore,
                seed=extractor.seed,
                device=extractor.device,
                ranks=ranks,
            )

    def _table(self, result: SegmentationResult, names: list[str]) -> Table:
        table = Table("IoU", box=None, padding=(0, 2))
        for heading in ("best epoch", "last epoch"):
            table.add_column(heading, justify="right")
        scores = (result.best, result.last)
        table.add_row("mean", *(f"{score.miou:.2f}" for score in scores), style="bold")
        table.add_row("mean of the classes present", *(f"{score.miou_present:.2f}" for score in scores))
        for i, name in enumerate(names):
            if i not in self.ignore:
                table.add_row(f"  {name}", *(f"{score.iou[i]:.2f}" for score in scores))
        return table
