"""The four evaluations of one encoder, from images to figures: what `adasim eval` does between words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from adasim.data import ImageSet, describe, open_images
from adasim.data.sources.found import few
from adasim.data.sources.masks import count_classes, open_masked
from adasim.errors import UserError
from adasim.eval.augmented import augmented_batches
from adasim.eval.dense import PatchFeatures
from adasim.eval.encoders import Subject
from adasim.eval.features import FeatureCache, Features, What, progress_bar, weights_hash
from adasim.eval.protocols.fewshot import FewShotAccuracy, fewshot_accuracy
from adasim.eval.protocols.knn import KnnAccuracy, knn_accuracy
from adasim.eval.protocols.linear import PROTOCOLS, SWEEP, LinearResult, linear_probe, linear_probe_stream
from adasim.eval.protocols.segmentation import MaskBatches, SegmentationResult, linear_segmentation
from adasim.eval.splits import (
    Split,
    Subset,
    data_name,
    hold_out,
    match_classes,
    match_test_labels,
    require_labels,
)
from adasim.models.transforms import SMALL, EvalTransform

_SMALL_TRAINING_SET = 100_000  # below it, a published batch of 1024 or 4096 makes too few steps


class _Segmentation(NamedTuple):
    epochs: int
    batch_size: int
    lr: float


# Ten epochs at the published rate of 0.1 end anywhere within two points; at a tenth of it they settle.
_QUICK_SEGMENTATION = _Segmentation(epochs=10, batch_size=64, lr=0.01)
_PUBLISHED_SEGMENTATION = _Segmentation(epochs=60, batch_size=16, lr=0.1)


@dataclass
class Measured:
    """The training and test features of a split, with labels in one numbering."""

    train: Features
    test: Features
    train_labels: Tensor
    test_labels: Tensor


@dataclass
class Bench:
    """An encoder on the bench."""

    subject: Subject
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    workers: int = 2
    cached: bool = True
    seed: int = 0
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self._cache = FeatureCache(self.subject.features_folder if self.cached else None)

    @property
    def small(self) -> bool:
        """Desk scale, where quick modes are the default."""
        return self.subject.transform.size <= SMALL

    def describe_model(self) -> dict[str, str]:
        """For a line of results."""
        return {
            "name": self.subject.name,
            "origin": self.subject.origin,
            "weights": weights_hash(self.subject.backbone),
        }

    def features(self, images: ImageSet, transform: EvalTransform, what: What = "pooled") -> Features:
        """Features of the readable images; the others are named once."""
        found = self._cache.features(
            self.subject.backbone,
            images,
            transform,
            what=what,
            device=self.device,
            batch_size=256 if self.small else 64,
            workers=self.workers,
        )
        if found.unreadable:
            some = few(found.unreadable.values())
            self.say(f"{len(found.unreadable)} images cannot be read and are left out: {some}")
        return found

    def measure(self, split: Split, transform: EvalTransform, what: What = "pooled") -> Measured:
        """Features of both sides of a split; one pass where both are parts of one data set."""
        require_labels(split.train), require_labels(split.test)
        whole = self.features(split.train, transform, what)
        other = whole if split.test is split.train else self.features(split.test, transform, what)
        train, test = _rows(whole, split.train_ids), _rows(other, split.test_ids)
        assert train.labels is not None
        assert test.labels is not None
        return Measured(train, test, train.labels, match_test_labels(split, test.labels, train.labels))

    def knn(self, split: Split, ks: Sequence[int] | None = None) -> dict[int, KnnAccuracy]:
        """k-NN accuracy for several k; of the published 10, 20, 100 and 200, those the training set allows."""
        found = self.measure(split, self.subject.transform)
        if ks is None:
            ks = [k for k in (10, 20, 100, 200) if k <= len(found.train_labels)] or [10]
        return knn_accuracy(
            found.train.values, found.train_labels, found.test.values, found.test_labels, k=ks
        )

    def linear(
        self,
        split: Split,
        *,
        protocol: Literal["dino", "simsiam"],
        quick: bool,
        rates: Sequence[float] = SWEEP,
        epochs: int | None = None,
        batch_size: int | None = None,
    ) -> LinearResult:
        """A linear layer on cached features (quick) or on freshly augmented images, for all rates at once.

        Where the best rate is at the sweep's edge, the next rates beyond it are trained too, in one go: with an
        encoder in the loop several rates cost no more than one.
        """
        transform = self.subject.transform if protocol == "dino" else self.subject.transform.bilinear()
        what: What = "linear-dino" if protocol == "dino" else "pooled"
        found = self.measure(split, transform, what)
        if batch_size is None:
            batch_size = linear_batch(protocol, len(found.train_labels))
        options: dict[str, Any] = {"batch_size": batch_size, "protocol": protocol, "seed": self.seed}
        probe = (
            self._cached_probe(found)
            if quick
            else self._augmented_probe(split, found, transform, what, batch_size)
        )
        result = probe(rates=rates, epochs=epochs, **options)
        further = result.further_rates()
        if further:
            tried = ", ".join(f"{rate:g}" for rate in further)
            self.say(
                f"The best rate, {result.best.rate:g}, is at the edge of the sweep, which goes on with {tried}, as "
                f"far as they are better."
            )
            result = result.going_on(probe(rates=further, epochs=epochs, **options))
        return result

    def _cached_probe(self, found: Measured) -> Callable[..., LinearResult]:
        sets = (found.train.values, found.train_labels, found.test.values, found.test_labels)
        return partial(linear_probe, *sets)

    def _augmented_probe(
        self, split: Split, found: Measured, transform: EvalTransform, what: What, batch_size: int
    ) -> Callable[..., LinearResult]:
        batches = augmented_batches(
            self.subject.backbone,
            Subset(split.train, found.train.ids),
            found.train_labels,
            transform,
            what=what,
            batch_size=batch_size,
            device=self.device,
            workers=self.workers,
            seed=self.seed,
        )
        test = (found.test.values, found.test_labels)
        return partial(linear_probe_stream, batches, *test, num_classes=len(split.train.classes))

    def fewshot(
        self, source: str, *, ways: int, shots: int, queries: int, episodes: int, per_class: bool
    ) -> tuple[FewShotAccuracy, dict[str, str | int]]:
        """Few-shot accuracy on all splits of a data set together, and what the data set was."""
        size = self.subject.transform.size
        splits = [open_images(source, size=size)]
        with suppress(UserError):  # not divided: all of it is there already
            splits.append(open_images(source, size=size, split="test"))
        for images in splits:
            self.say(describe(images, unused=False))
        classes = sorted({name for images in splits for name in images.classes})
        values, labels, fingerprints = [], [], []
        for images in splits:
            require_labels(images)
            found = self.features(images, self.subject.transform.for_fewshot())
            assert found.labels is not None
            values.append(found.values)
            labels.append(match_classes(found.labels, images.classes, classes))
            fingerprints.append(images.fingerprint())
        pool = torch.cat(values)
        accuracy = fewshot_accuracy(
            pool,
            torch.cat(labels),
            ways,
            shots,
            queries,
            episodes,
            self.seed,
            class_names=classes,
            per_class=per_class,
        )
        name = data_name(source) + (" (per class)" if per_class else "")
        return accuracy, {"name": name, "fingerprint": "+".join(fingerprints), "images": len(pool)}

    def segmentation(
        self,
        split: Split,
        *,
        size: int,
        n_blocks: int,
        quick: bool,
        num_classes: int | None = None,
        ignore: Sequence[int] = (),
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
    ) -> tuple[SegmentationResult, int]:
        """A 1x1 convolution on patch features, held (quick) or of freshly warped images; and how many classes.

        Pixels of the ids `ignore` neither train nor count, as those of 255.
        """
        usual = _QUICK_SEGMENTATION if quick else _PUBLISHED_SEGMENTATION
        epochs = epochs or usual.epochs
        num_classes = count_classes(split.train, num_classes, ignore)
        train, test = (
            PatchFeatures(
                self.subject.backbone,
                images,
                ids,
                self.subject.transform,
                size=size,
                n_blocks=n_blocks,
                batch_size=batch_size or usual.batch_size,
                device=self.device,
                workers=0 if images.as_array() is not None else self.workers,
                seed=self.seed,
                ignore=ignore,
            )
            for images, ids in ((split.train, split.train_ids), (split.test, split.test_ids))
        )
        if quick and not train.hold():
            raise UserError(
                f"--quick would hold {train.bytes / 1e9:.0f} GB of patch features. Use --augmented, or a smaller "
                f"--size or --blocks."
            )
        test.hold()
        total = epochs * (len(split.train_ids) + len(split.test_ids))
        with progress_bar(f"{split.name}: {epochs} epochs", total) as advance:
            result = linear_segmentation(
                lambda epoch: _counted(train.shuffled(epoch), advance),
                lambda: _counted(test.in_order(), advance),
                dim=train.dim,
                num_classes=num_classes,
                epochs=epochs,
                lr=usual.lr if lr is None else lr,
                left_out=ignore,
                seed=self.seed,
                device=self.device,
            )
        return result, num_classes


def _counted(batches: MaskBatches, advance: Callable[[int], None]) -> MaskBatches:
    """The same batches; each is counted once it was used."""
    for features, masks in batches:
        yield features, masks
        advance(len(masks))


def linear_batch(protocol: str, train_images: int) -> int:
    """The published batch for large training sets; 256 for small ones, where it would make too few steps."""
    return PROTOCOLS[protocol].batch_size if train_images >= _SMALL_TRAINING_SET else min(256, train_images)


def open_masked_split(
    data: str | None, train: str | None, test: str | None, *, size: int, seed: int = 0
) -> Split:
    """As `open_split`, for images with masks."""
    source = train if train is not None else data
    if source is None:
        raise UserError("Which images and masks? Name them with --data, or with --train and --test.")
    images = open_masked(source, size=size, split="train")
    name = data_name(source)
    if test is not None:
        held = _open_masked_test(test, size)
        name = f"{name} to {data_name(test)}"
    else:
        try:
            held = open_masked(source, size=size, split="test")
        except UserError as error:
            train_ids, test_ids = hold_out(None, len(images), seed)
            note = f"{error} Here {len(test_ids)} of the {len(images)} images are held out at random as test images."
            return Split(name, images, images, train_ids, test_ids, note)
    return Split(name, images, held, torch.arange(len(images)), torch.arange(len(held)))


def _open_masked_test(source: str, size: int) -> ImageSet:
    try:
        return open_masked(source, size=size, split="test")
    except UserError:
        return open_masked(source, size=size, split="train")


def _rows(features: Features, ids: Tensor) -> Features:
    """The features of some images."""
    kept = torch.isin(features.ids, ids)
    if kept.all():
        return features
    labels = None if features.labels is None else features.labels[kept]
    return Features(features.values[kept], features.ids[kept], labels, features.unreadable)
