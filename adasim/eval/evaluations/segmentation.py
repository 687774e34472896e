"""`adasim eval segmentation`"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from rich.table import Table

from adasim.data.sources.masks import class_names, count_classes
from adasim.eval.dense import PatchFeatures
from adasim.eval.evaluations.base import Evaluation, pick_mode, with_changes
from adasim.eval.extractor import Extractor
from adasim.eval.features import progress_bar
from adasim.eval.protocols.segmentation import MaskBatches, SegmentationResult, linear_segmentation
from adasim.eval.report import Report
from adasim.eval.splits import Split
from adasim.options import SegmentationOptions
from adasim.registry import EVALUATIONS
from adasim.util.errors import UserError
from adasim.util.fields import at_least

SEGMENTATION_SIZE = 2
"""Segmentation looks at images twice the side of the encoder's own: 448 for 224, as published."""


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
        for name in ("epochs", "batch_size", "blocks"):
            if (value := getattr(self, name)) is not None:
                at_least(name, value, 1)
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
        num_classes = count_classes(split.train, self.classes, self.ignore)
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
            )
            for images, ids in ((split.train, split.train_ids), (split.test, split.test_ids))
        )
        if quick and not train.hold():
            raise UserError(
                f"--quick would hold {train.bytes / 1e9:.0f} GB of patch features. Use --augmented, or a smaller "
                f"--size or --blocks."
            )
        test.hold()
        total = training.epochs * (len(split.train_ids) + len(split.test_ids))
        with progress_bar(f"{split.name}: {training.epochs} epochs", total) as advance:
            return linear_segmentation(
                lambda epoch: _counted(train.shuffled(epoch), advance),
                lambda: _counted(test.in_order(), advance),
                dim=train.dim,
                num_classes=num_classes,
                epochs=training.epochs,
                lr=training.lr,
                left_out=self.ignore,
                seed=extractor.seed,
                device=extractor.device,
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


def _counted(batches: MaskBatches, advance: Callable[[int], None]) -> MaskBatches:
    """The same batches; each is counted once it was used."""
    for features, masks in batches:
        yield features, masks
        advance(len(masks))
