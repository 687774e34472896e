"""`adasim eval linear`: a linear layer on frozen features at the published rate, or at one chosen by a sweep.

The published protocols report the best epoch on the test images. A sweep looks at them once, at its end: it chooses
its rate on held-out training images, and reports the last epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from rich.table import Table
from timm.models import VisionTransformer
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.data import ImageSet, PairLoader, Subset
from adasim.eval.evaluation import Evaluation, Extractor, Report, pick_mode, with_changes
from adasim.eval.features import FeatureKind, encode, frozen
from adasim.eval.probe import (
    Batches,
    LinearProtocol,
    LinearResult,
    linear_probe,
    linear_probe_stream,
    linear_protocol,
)
from adasim.eval.splits import hold_out
from adasim.models import EvalTransform
from adasim.options import SWEEP, LinearOptions
from adasim.registry import EVALUATIONS, METHODS
from adasim.util.errors import UserError
from adasim.util.fields import Range

FALLBACK = "dino"
"""The protocol of encoders whose method is not known."""
_ENCODED = 64
"""Images encoded at a time: the same ones, and so the same bits, where each rank's part is a multiple."""
_SMALL_TRAINING_SET = 100_000  # below it, a published batch of 1024 or 4096 makes too few steps


@EVALUATIONS.register("linear")
@dataclass(kw_only=True)
class Linear(LinearOptions, Evaluation):
    """Measures what its options, in adasim/options.py, ask for."""

    def run(self, extractor: Extractor) -> Report:
        encoder = extractor.encoder
        mode = "quick" if pick_mode(self.quick, self.augmented, extractor.small) else "augmented"
        protocol = protocol_of(extractor) if self.protocol == "auto" else self.protocol
        published = linear_protocol(protocol, self.optimizer)
        rates = self._rates(published, is_vit=isinstance(encoder.backbone.net, VisionTransformer))
        split = extractor.open_split(self)
        transform = encoder.transform.bilinear() if published.bilinear else encoder.transform
        features = extractor.split_features(split, transform, published.features)
        train, labels = features.train.values, features.train_labels
        small = len(labels) < _SMALL_TRAINING_SET
        usual = min(256, len(labels)) if small else published.batch_size
        batch_size = self.batch_size or usual
        Range(extractor.ranks.world).check("batch_size", batch_size)

        def probe(rows: Tensor, test: Tensor, test_labels: Tensor, rates: Sequence[float]) -> LinearResult:
            """Heads trained on these rows of the training images, and scored on `test` after every epoch."""
            settings: dict[str, Any] = {
                "rates": rates,
                "epochs": self.epochs,
                "batch_size": batch_size if len(rows) == len(labels) else min(batch_size, len(rows)),
                "protocol": protocol,
                "optimizer": self.optimizer,
                "seed": extractor.seed,
            }
            if mode == "quick":
                return linear_probe(train[rows], labels[rows], test, test_labels, **settings)
            images = Subset(split.train, features.train.ids[rows])
            views = linear_views(transform, self.flip)
            batches = augmented_batches(
                extractor, images, labels[rows], views, published.features, settings["batch_size"]
            )
            classes, there = len(split.train.classes), test.to(extractor.device)
            return linear_probe_stream(batches, there, test_labels, num_classes=classes, **settings)

        tried = None
        if len(rates) > 1:
            rest, held = hold_out(labels, len(labels), extractor.seed, "Name one rate: --rates RATE.")
            extractor.say(
                f"A sweep of {len(rates)} rates: they are scored on {len(held):,} of the {len(labels):,} training "
                f"images, which are held out, and the best one then learns from all."
            )
            tried = probe(rest, train[held], labels[held], rates)
            rates = (tried.last.rate,)
        result = probe(torch.arange(len(labels)), features.test.values, features.test_labels, rates)
        best, last = result.best, result.last
        metrics: dict[str, Any] = {"rate": last.rate, "top1_last": last.top1, "top5_last": last.top5}
        if tried is not None:
            choice = "swept rate"
            held_out = [score.top1 for score in tried.last_epochs()]
            metrics |= {"rates": list(tried.rates), "held_out_top1_by_rate": held_out}
        else:
            choice = "published rate" if self.rates is None else f"rate={last.rate:g}"
            metrics |= {"top1_best": best.top1, "top5_best": best.top5, "best_epoch": best.epoch}
        line = extractor.result(
            "linear",
            best.top1 if tried is None else last.top1,
            setting=with_changes(
                f"{protocol}, {mode}, {choice}",
                epochs=(len(result.top1), published.epochs),
                batch=(batch_size, usual),
                optimizer=(published.optimizer, linear_protocol(protocol).optimizer),
                flip=(self.flip, LinearOptions.flip),
                rates=(SWEEP if tried is None else tried.rates, SWEEP),
                size=(encoder.transform.size, encoder.usual_size),
            ),
            metrics=metrics,
            data=split,
            settings={
                "protocol": protocol,
                "mode": mode,
                "optimizer": published.optimizer,
                "flip": self.flip,
                "rate": choice,
                "epochs": len(result.top1),
                "batch_size": batch_size,
                "size": encoder.transform.size,
            },
        )
        title = extractor.title(f"Linear ({protocol}, {mode}, {choice})", split)
        sentences = _sentences(tried, last.rate, is_published=self.rates is None, small=small)
        return Report(results=(line,), title=title, table=_table(result, tried), sentences=sentences)

    def _rates(self, published: LinearProtocol, is_vit: bool) -> tuple[float, ...]:
        """The one rate to train at, or those to choose from."""
        if not self.sweep:
            return self.rates or (published.published_rate(is_vit),)
        if self.rates is not None and len(self.rates) < 2:
            raise UserError("--sweep chooses between rates: name several with --rates, or none for its own.")
        return self.rates or SWEEP


def _table(result: LinearResult, tried: LinearResult | None) -> Table:
    """What a sweep tried, on held-out images; then the rate on the test images, the figure to report in bold."""
    rows = [("held out", score, "") for score in tried.last_epochs()] if tried else []
    rows += [("test, last epoch", result.last, "bold")] if tried else []
    rows += (
        [] if tried else [("test, best epoch", result.best, "bold"), ("test, last epoch", result.last, "")]
    )
    table = Table("images", box=None, padding=(0, 2))
    for heading in ("rate", "epoch", "top-1", "top-5"):
        table.add_column(heading, justify="right")
    for images, score, style in rows:
        figures = (f"{score.rate:g}", str(score.epoch), f"{score.top1:.2f}", f"{score.top5:.2f}")
        table.add_row(images, *figures, style=style)
    return table


def _sentences(
    tried: LinearResult | None, rate: float, *, is_published: bool, small: bool
) -> tuple[str, ...]:
    """Whose rate it is, and what was chosen on which images."""
    if tried is not None:
        chosen = (
            f"The rate, {rate:g} per 256 images, was chosen on held-out training images, and nothing on the test "
            f"images."
        )
        edge = "It is at the edge of the sweep: try further --rates."
        return (chosen, edge) if rate in (min(tried.rates), max(tried.rates)) else (chosen,)
    whose = "the published one" if is_published else "that of --rates"
    said = (
        f"The rate, {rate:g} per 256 images, is {whose}. The best epoch is as published: on the test images."
    )
    hint = (
        f"A published rate is made for a million images, and often too low for fewer than {_SMALL_TRAINING_SET:,}: "
        f"--sweep chooses one on held-out training images."
    )
    return (said, hint) if small and is_published else (said,)


def linear_views(transform: EvalTransform, flip: float) -> ViewsConfig:
    """The views that a linear layer learns from: random crops of 8% to 100% of the area, bilinear, some mirrored."""
    return ViewsConfig(
        interpolation="bilinear",  # as both papers' linear protocols
        size=transform.size,
        scale=(0.08, 1.0),
        flip=flip,
        color=0.0,
        blur=0.0,
        solarize=0.0,
        reduced_jpeg=False,  # as published
        mean=transform.mean,
        std=transform.std,
    )


def augmented_batches(
    extractor: Extractor,
    images: ImageSet,
    labels: Tensor,
    views: ViewsConfig,
    kind: FeatureKind,
    batch_size: int,
) -> Callable[[int], Batches]:
    """A function from an epoch to its batches of features (B, D) and labels (B,).

    The images left over at an epoch's end are dropped; each epoch leaves others. Each rank reads and encodes its part
    of a batch, and all of them get the whole: every one then takes the step that one process alone would take.
    """
    device, ranks = extractor.device, extractor.ranks
    backbone = extractor.encoder.backbone.to(device)
    loader = PairLoader(
        images,
        views,
        batch_size=batch_size,
        seed=extractor.seed,
        workers=extractor.workers,
        device=device,
        rank=ranks.rank,
        world=ranks.world,
    )
    ends = [rank * batch_size // ranks.world for rank in range(ranks.world + 1)]
    counts = [end - start for start, end in pairwise(ends)]

    def batches(epoch: int) -> Batches:
        for batch in loader.views(epoch, loader.batches(epoch)):
            with frozen(backbone), torch.no_grad():
                made = [encode(backbone, some, kind).float() for some in batch.views[0].split(_ENCODED)]
            features = ranks.gather_rows(torch.cat(made), counts)
            yield features, labels[ranks.gather_rows(batch.ids, counts).cpu()]

    return batches


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
