"""From an encoder and a data set's name to features: what every evaluation begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from torch import Tensor

from adasim.data import ImageSet, describe
from adasim.data.sources.found import few
from adasim.dist.devices import pick_device
from adasim.eval.encoders import Encoder, open_encoder
from adasim.eval.features import MAX_UNREADABLE, FeatureCache, FeatureKind, Features, weights_hash
from adasim.eval.results import Result, append_result
from adasim.eval.splits import Source, Split, match_test_labels, open_source, open_split, require_labels
from adasim.models import Backbone
from adasim.models.transforms import SMALL, EvalTransform
from adasim.options import Options, Sources
from adasim.util.errors import UserError
from adasim.util.fields import at_least

Say = Callable[[str], None]
"""Takes a sentence for a person; the command line prints it."""


@dataclass
class SplitFeatures:
    """The training and test features of a split, with labels in one numbering."""

    train: Features
    test: Features
    train_labels: Tensor
    test_labels: Tensor


@dataclass
class Extractor:
    """Opens images and makes their features by one encoder, on a device and with a cache."""

    encoder: Encoder
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    workers: int = 2
    cached: bool = True
    seed: int = 0
    say: Say = lambda sentence: None
    exclude: Path | None = None
    """A file of verdicts: the images that it rejects are left out."""

    def __post_init__(self) -> None:
        at_least("workers", self.workers, 0)
        self._cache = FeatureCache(self.encoder.features_folder if self.cached else None)

    @property
    def small(self) -> bool:
        """Whether images are so small that quick modes are the default."""
        return self.encoder.transform.size <= SMALL

    def open_images(self, source: Source | None, split: str = "train") -> ImageSet:
        """The images of that name, or the run's own; says what was found."""
        source = self.encoder.own_source() if source is None else source
        if source is None:
            raise UserError("Which images? Name them with --data.")
        images = open_source(source, size=self.encoder.transform.size, split=split, exclude=self.exclude)
        self.say(describe(images))
        return images

    def open_split(self, sources: Sources, *, masks: bool = False) -> Split:
        """Training and test images as asked for, or the run's own; says what was found and how it was divided."""
        data = sources.data
        if data is None and sources.train is None:
            data = self.encoder.own_source()
        size = self.encoder.transform.size
        split = open_split(
            data, sources.train, sources.test, size=size, seed=self.seed, masks=masks, exclude=self.exclude
        )
        for sentence in split.sentences():
            self.say(sentence)
        return split

    def features(
        self,
        images: ImageSet,
        transform: EvalTransform | None = None,
        kind: FeatureKind = "pooled",
        *,
        max_unreadable: float = MAX_UNREADABLE,
    ) -> Features:
        """Features of the readable images; the others are named once.

        Args:
            transform: what is done to an image first; the encoder's own by default.
            max_unreadable: the share of unreadable images above which they are refused.
        """
        found = self._cache.features(
            self.encoder.backbone,
            images,
            transform or self.encoder.transform,
            kind=kind,
            device=self.device,
            batch_size=256 if self.small else 64,
            workers=self.workers,
            max_unreadable=max_unreadable,
        )
        if found.unreadable:
            some = few(found.unreadable.values())
            self.say(f"{len(found.unreadable)} images cannot be read and are left out: {some}")
        return found

    def split_features(
        self, split: Split, transform: EvalTransform | None = None, kind: FeatureKind = "pooled"
    ) -> SplitFeatures:
        """Features of both sides of a split; one pass where both are parts of one data set."""
        require_labels(split.train), require_labels(split.test)
        whole = self.features(split.train, transform, kind)
        other = whole if split.test is split.train else self.features(split.test, transform, kind)
        train, test = whole.of(split.train_ids), other.of(split.test_ids)
        assert train.labels is not None
        assert test.labels is not None
        return SplitFeatures(train, test, train.labels, match_test_labels(split, test.labels, train.labels))

    def result(
        self,
        protocol: str,
        value: float,
        *,
        setting: str = "",
        data: ImageSet | Split | dict[str, Any],
        metrics: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> Result:
        """A result of this encoder, for a `Report`; the arguments are those of `Result`."""
        if isinstance(data, ImageSet):
            data = {"name": data.name, "fingerprint": data.fingerprint(), "images": len(data)}
        model = {
            "name": self.encoder.name,
            "origin": self.encoder.origin,
            "weights": weights_hash(self.encoder.backbone),
        }
        return Result(
            protocol=protocol,
            setting=setting,
            value=value,
            metrics={protocol: value} if metrics is None else metrics,
            data=data.facts() if isinstance(data, Split) else data,
            model=model,
            settings={"size": self.encoder.transform.size} if settings is None else settings,
        )

    def title(self, what: str, split: Split | None = None, unit: str = "in percent") -> Text:
        """A heading for a table: what was measured, of which encoder, on which images."""
        text = f" of {self.encoder.name} ({self.encoder.origin})"
        if split is not None:
            text += (
                f" on {split.name}: {len(split.train_ids):,} training and {len(split.test_ids):,} test images"
            )
        return Text.assemble(("\n" + what, "bold"), text, f", {unit}" if unit else "")

    def keep(self, results: Iterable[Result], file: Path | None = None) -> None:
        """Append results to `file`, or to the run's results.jsonl if the encoder belongs to a run."""
        file = file or self.encoder.results_file
        if file is not None:
            for result in results:
                append_result(file, result, str(self.device))


def open_extractor(
    model: str | Path | Backbone, options: Options, *, named_size: int | None = None, say: Say
) -> Extractor:
    """The encoder of that name or path, or one that is loaded already, on its device.

    Args:
        named_size: side in pixels for a model of timm's or adasim's, unless `options.size` says.
    """
    encoder = open_encoder(
        model, random_weights=options.random_weights, size=options.size, named_size=named_size
    )
    if options.random_weights:
        say(f"{encoder.name} has random weights: these figures are those of an untrained encoder.")
    if encoder.note:
        say(encoder.note)
    loaded = isinstance(model, Backbone) and options.device == "auto"  # stays where it is
    return Extractor(
        encoder,
        device=encoder.backbone.device if loaded else pick_device(options.device),
        workers=options.workers,
        cached=not options.no_cache,
        seed=options.seed,
        say=say,
        exclude=options.exclude,
    )
