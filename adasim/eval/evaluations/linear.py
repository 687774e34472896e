"""`adasim eval linear`"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from adasim.data import Subset
from adasim.eval.augmented import augmented_batches
from adasim.eval.evaluations.base import Evaluation, pick_mode, with_changes
from adasim.eval.extractor import Extractor, SplitFeatures
from adasim.eval.protocols.linear import (
    LinearProtocol,
    LinearResult,
    linear_probe,
    linear_probe_stream,
    linear_protocol,
)
from adasim.eval.report import Report
from adasim.eval.splits import Split
from adasim.models.transforms import EvalTransform
from adasim.options import SWEEP, LinearOptions
from adasim.registry import EVALUATIONS, METHODS
from adasim.util.fields import at_least

FALLBACK = "dino"
"""The protocol of encoders whose method is not known."""

_SMALL_TRAINING_SET = 100_000  # below it, a published batch of 1024 or 4096 makes too few steps


@EVALUATIONS.register("linear")
@dataclass(kw_only=True)
class Linear(LinearOptions, Evaluation):
    """Measures what its options, in adasim/options.py, ask for."""

    def run(self, extractor: Extractor) -> Report:
        if self.batch_size is not None:
            at_least("batch_size", self.batch_size, 1)
        quick = pick_mode(self.quick, self.augmented, extractor.small)
        protocol = protocol_of(extractor) if self.protocol == "auto" else self.protocol
        published = linear_protocol(protocol)
        split = extractor.open_split(self)
        result = self._probe(extractor, split, protocol, published, quick)
        mode = "quick" if quick else "augmented"
        sentences: list[str | Text] = [
            Text.assemble(
                "Best epoch of the best rate, as published: ",
                (f"{result.best.top1:.2f}", "bold"),
                f" (top-5 {result.best.top5:.2f})   last epoch: ",
                (f"{result.last.top1:.2f}", "bold"),
                f" (top-5 {result.last.top5:.2f})   (both chosen on the test images)",
            )
        ]
        if result.further_rates():
            sentences.append(
                f"The best rate, {result.best.rate:g}, is still at the sweep's edge: try further --rates."
            )
        usual = usual_batch(published, len(split.train_ids))
        epochs, batch_size = len(result.top1), self.batch_size or usual
        size = extractor.encoder.transform.size
        line = extractor.result(
            "linear",
            result.best.top1,
            setting=with_changes(
                f"{protocol}, {mode}",
                epochs=(epochs, published.epochs),
                batch=(batch_size, usual),
                rates=(tuple(self.rates), SWEEP),
                size=(size, extractor.encoder.usual_size),
            ),
            metrics=_metrics(result),
            data=split,
            settings={
                "protocol": protocol,
                "mode": mode,
                "epochs": epochs,
                "batch_size": batch_size,
                "size": size,
            },
        )
        return Report(
            results=(line,),
            title=extractor.title(f"Linear ({protocol}, {mode})", split),
            table=_table(result),
            sentences=tuple(sentences),
        )

    def _probe(
        self, extractor: Extractor, split: Split, protocol: str, published: LinearProtocol, quick: bool
    ) -> LinearResult:
        """A linear layer on cached features (quick) or on freshly augmented images, for all rates at once.

        Where the best rate is at the sweep's edge, the next rates beyond it are trained too, in one go: with an
        encoder in the loop several rates cost no more than one.
        """
        transform = extractor.encoder.transform
        transform = transform.bilinear() if published.bilinear else transform
        found = extractor.split_features(split, transform, published.features)
        batch_size = self.batch_size
        if batch_size is None:
            batch_size = usual_batch(published, len(found.train_labels))
        options: dict[str, Any] = {
            "epochs": self.epochs,
            "batch_size": batch_size,
            "protocol": protocol,
            "seed": extractor.seed,
        }
        probe = (
            _cached_probe(found)
            if quick
            else _augmented_probe(extractor, split, found, transform, published, batch_size)
        )
        result = probe(rates=self.rates, **options)
        further = result.further_rates()
        if further:
            tried = ", ".join(f"{rate:g}" for rate in further)
            extractor.say(
                f"The best rate, {result.best.rate:g}, is at the edge of the sweep, which goes on with {tried}, as "
                f"far as they are better."
            )
            result = result.going_on(probe(rates=further, **options))
        return result


def protocol_of(extractor: Extractor) -> str:
    """The linear protocol that the method of the encoder's run names."""
    method = extractor.encoder.method
    if method is None:
        return FALLBACK
    if method not in METHODS:
        extractor.say(
            f"The method {method} of this run is not known here, so the linear protocol is that of {FALLBACK}. "
            f"Load its file with --plugin, or choose with --protocol."
        )
        return FALLBACK
    return str(METHODS[method].linear_protocol)


def usual_batch(published: LinearProtocol, train_images: int) -> int:
    """The published batch for large training sets; 256 for small ones, where it would make too few steps."""
    return published.batch_size if train_images >= _SMALL_TRAINING_SET else min(256, train_images)


def _cached_probe(found: SplitFeatures) -> Callable[..., LinearResult]:
    sets = (found.train.values, found.train_labels, found.test.values, found.test_labels)
    return partial(linear_probe, *sets)


def _augmented_probe(
    extractor: Extractor,
    split: Split,
    found: SplitFeatures,
    transform: EvalTransform,
    published: LinearProtocol,
    batch_size: int,
) -> Callable[..., LinearResult]:
    batches = augmented_batches(
        extractor.encoder.backbone,
        Subset(split.train, found.train.ids),
        found.train_labels,
        transform,
        kind=published.features,
        batch_size=batch_size,
        device=extractor.device,
        workers=extractor.workers,
        seed=extractor.seed,
    )
    test = (found.test.values, found.test_labels)
    return partial(linear_probe_stream, batches, *test, num_classes=len(split.train.classes))


def _table(result: LinearResult) -> Table:
    table = Table(box=None, padding=(0, 2))
    for heading in ("rate", "best top-1", "top-5", "epoch", "last top-1", "top-5"):
        table.add_column(heading, justify="right")
    for best, last in zip(result.best_epochs(), result.last_epochs(), strict=True):
        chosen = best.rate == result.best.rate
        cells = [f"{best.rate:g}", f"{best.top1:.2f}", f"{best.top5:.2f}", str(best.epoch)]
        table.add_row(*cells, f"{last.top1:.2f}", f"{last.top5:.2f}", style="bold" if chosen else "")
    return table


def _metrics(result: LinearResult) -> dict[str, Any]:
    return {
        "top1_best": result.best.top1,
        "top5_best": result.best.top5,
        "best_rate": result.best.rate,
        "best_epoch": result.best.epoch,
        "top1_last": result.last.top1,
        "top5_last": result.last.top5,
        "last_rate": result.last.rate,
        "rates": list(result.rates),
        "top1_best_by_rate": [score.top1 for score in result.best_epochs()],
        "top1_last_by_rate": [score.top1 for score in result.last_epochs()],
    }
