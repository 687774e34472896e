"""What an evaluation is, built in or your own (docs/extending.md): it gets an `Extractor` and returns a `Report`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import torch
from rich.console import Console, RenderableType
from rich.text import Text
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.data import ImageSet, PairLoader, as_images, describe, worker_count
from adasim.dist.devices import pick_device
from adasim.dist.processes import ALONE, Distributed
from adasim.eval.encoder import Encoder, open_encoder
from adasim.eval.features import MAX_UNREADABLE, FeatureKind, Features, cached_features, weights_hash
from adasim.eval.results import Result, append_result
from adasim.eval.splits import Source, Split, match_test_labels, open_source, open_split, require_labels
from adasim.models import Backbone
from adasim.models.transform import SMALL, EvalTransform
from adasim.options import LinearOptions, Options, SegmentationOptions, Sources, with_options
from adasim.registry import EVALUATIONS
from adasim.util import terminal
from adasim.util.errors import UserError, suggest
from adasim.util.terminal import few

Opened = TypeVar("Opened", ImageSet, Split)
Say = Callable[[str], None]
"""Takes a sentence for a person; the command line prints it."""


@dataclass(kw_only=True)
class Evaluation:
    """A measurement of a frozen encoder; its fields are its options.

    The docstring is the help of `adasim eval NAME --help`, its first line what `adasim eval` says; those under the
    fields explain the options.
    """

    named_size: ClassVar[int | None] = None
    """Side in pixels of what an encoder sees that is known by a model's name; its own by default."""

    def run(self, extractor: Extractor) -> Report:
        """Measure `extractor.encoder`. Print nothing: what a person should know goes to `extractor.say`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of one evaluation. `print(report)` shows what `adasim eval` does."""

    results: tuple[Result, ...]  # of each data set, with all figures: what a run's results.jsonl keeps
    title: str | Text
    table: RenderableType
    sentences: tuple[str | Text, ...] = ()  # below the table
    said: tuple[str, ...] = ()  # what was said on the way: which images were found, left out or held out

    @property
    def value(self) -> float:
        """The main figure; where there are several data sets, their mean."""
        return sum(result.value for result in self.results) / len(self.results)

    @property
    def metrics(self) -> dict[str, Any]:
        """All figures of the first result, which is the only one except for few-shot on several data sets."""
        return self.results[0].metrics

    def show(self, console: Console) -> None:
        """Title, table and sentences."""
        console.print(self.title, soft_wrap=True)
        console.print(self.table)
        for sentence in self.sentences:
            console.print(sentence, soft_wrap=True)

    def __str__(self) -> str:
        console = terminal.console(color_system=None)
        with console.capture() as shown:
            for sentence in self.said:
                console.print(sentence, soft_wrap=True)
            self.show(console)
        return shown.get().rstrip("\n")


@dataclass
class Extractor:
    """Opens images and makes their features by one encoder, on a device and with a cache."""

    encoder: Encoder
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    workers: int = 2
    cached: bool = True
    seed: int = 0
    say: Say = lambda sentence: None
    exclude: Path | None = None  # a file of verdicts: the images that it rejects are left out
    ranks: Distributed = ALONE  # the processes that measure together; all of them make the same calls

    def __post_init__(self) -> None:
        self.encoder.backbone.to(self.device)

    @property
    def small(self) -> bool:
        """Whether images are so small that quick modes are the default."""
        return self.encoder.transform.size <= SMALL

    def open_images(self, source: Source | None, split: str = "train") -> ImageSet:
        """The images of that name, or the run's own; says what was found."""
        source = self.encoder.own_source() if source is None else source
        if source is None:
            raise UserError("Which images? Name them with --data.")
        size = self.encoder.transform.size
        images = self._on_all(lambda: open_source(source, size=size, split=split, exclude=self.exclude))
        self.say(describe(images))
        return images

    def open_split(self, sources: Sources, *, masks: bool = False) -> Split:
        """Training and test images as asked for, or the run's own; says what was found and how it was divided."""
        named = (sources.data, sources.train, sources.test)
        if sources.data is None and sources.train is None:
            named = (self.encoder.own_source(), None, sources.test)
        size = self.encoder.transform.size
        split = self._on_all(
            lambda: open_split(*named, size=size, seed=self.seed, masks=masks, exclude=self.exclude)
        )
        for sentence in split.sentences():
            self.say(sentence)
        return split

    def _on_all(self, work: Callable[[], Opened]) -> Opened:
        """What each process opens, however long it takes; other images in another process are refused."""
        opened = self.ranks.run_with_heartbeat(work)
        assert opened is not None
        if self.ranks.world > 1:
            mark = self.ranks.run_with_heartbeat(opened.fingerprint)
            self.ranks.require_same({"fingerprint of the images": mark})
        return opened

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
        features = cached_features(
            self.encoder.features_folder if self.cached else None,
            self.encoder.backbone,
            images,
            transform or self.encoder.transform,
            kind=kind,
            max_unreadable=max_unreadable,
            ranks=self.ranks,
            device=self.device,
            batch_size=256 if self.small else 64,
            workers=self.workers,
        )
        if features.unreadable:
            some = few(features.unreadable.values())
            self.say(f"{len(features.unreadable)} images cannot be read and are left out: {some}")
        return features

    def split_features(
        self, split: Split, transform: EvalTransform | None = None, kind: FeatureKind = "pooled"
    ) -> tuple[Features, Tensor, Features, Tensor]:
        """Training features and labels, test features and labels, in one numbering of the classes.

        One pass where both are parts of one data set.
        """
        whole = self.features(split.train, transform, kind)
        other = whole if split.test is split.train else self.features(split.test, transform, kind)
        train, test = whole.of(split.train_ids), other.of(split.test_ids)
        train_labels = require_labels(split.train)[train.ids]
        test_labels = match_test_labels(split, require_labels(split.test)[test.ids], train_labels)
        return train, train_labels, test, test_labels

    def view_loader(
        self, images: ImageSet, batch_size: int, ranks: Distributed = ALONE, **views: Any
    ) -> PairLoader:
        """Makes augmented views of images for the encoder, by default without blur or solarisation.

        Args:
            ranks: the processes that share every batch.
            views: fields of `ViewsConfig`.
        """
        transform = self.encoder.transform
        plain = ViewsConfig(
            size=transform.size, mean=transform.mean, std=transform.std, blur=0.0, solarize=0.0
        )
        return PairLoader(
            images,
            replace(plain, reduced_jpeg=False, **views),
            batch_size=batch_size,
            seed=self.seed,
            workers=self.workers,
            device=self.device,
            rank=ranks.rank,
            world=ranks.world,
        )

    def result(
        self,
        protocol: str,
        value: float,
        *,
        setting: str = "",
        changes: dict[str, tuple[Any, Any]] | None = None,
        data: ImageSet | Split | dict[str, Any],
        metrics: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> Result:
        """A result of this encoder, for a `Report`; the arguments are those of `Result`.

        `changes` are further settings as {name: (chosen, usual)}. The setting in words names those that are not as
        usual, so that their figures have a column of their own (`dino, quick, epochs=1`). The size of the view is
        one of them.
        """
        encoder = self.encoder
        changes = {**(changes or {})}
        changes.setdefault("size", (encoder.transform.size, encoder.usual_size))
        unusual = {name: chosen for name, (chosen, usual) in changes.items() if chosen != usual}
        words = [f"{name.removesuffix('_size')}={_words(chosen)}" for name, chosen in unusual.items()]
        if isinstance(data, ImageSet):
            data = {"name": data.name, "fingerprint": data.fingerprint(), "images": len(data)}
        elif isinstance(data, Split):
            counts = {"train_images": len(data.train_ids), "test_images": len(data.test_ids)}
            data = {"name": data.name, "fingerprint": data.fingerprint(), **counts}
        model = {"name": encoder.name, "origin": encoder.origin, "weights": weights_hash(encoder.backbone)}
        return Result(
            protocol=protocol,
            setting=", ".join(filter(None, [setting, *words])),
            value=value,
            metrics={protocol: value} if metrics is None else metrics,
            data=data,
            model=model if encoder.epoch is None else model | {"epoch": encoder.epoch},
            settings={name: chosen for name, (chosen, _) in changes.items()} | (settings or {}),
        )

    def title(self, what: str, split: Split | None = None, unit: str = "in percent") -> Text:
        """A heading for a table: what was measured, of which encoder, on which images."""
        text = f" of {self.encoder.name} ({self.encoder.origin})"
        if split is not None:
            train, test = len(split.train_ids), len(split.test_ids)
            text += f" on {split.name}: {train:,} training and {test:,} test images"
        return Text.assemble(("\n" + what, "bold"), text, f", {unit}" if unit else "")

    def keep(self, results: Iterable[Result], file: Path | None = None) -> None:
        """Append results to `file`, or to the run's results.jsonl if the encoder belongs to a run; once."""
        file = file or self.encoder.results_file
        if file is not None and self.ranks.is_main:
            for result in results:
                append_result(file, result, str(self.device))


def open_extractor(
    model: str | Path | Backbone,
    options: Options,
    *,
    named_size: int | None = None,
    say: Say,
    ranks: Distributed | None = None,
) -> Extractor:
    """The encoder of that name or path, or one that is loaded already, on its device.

    Args:
        named_size: side in pixels for a model of timm's or adasim's, unless `options.size` says.
        say: what the first rank says.
        ranks: the processes that measure together, on their devices; this one alone by default.
    """
    where = None if ranks is None else ranks.device
    ranks = ranks or ALONE
    say = say if ranks.is_main else lambda sentence: None
    with ranks.raise_on_all():
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
        device=encoder.backbone.device if loaded else where or pick_device(options.device),
        workers=worker_count(options.workers),
        cached=not options.no_cache,
        seed=options.seed,
        say=say,
        exclude=options.exclude,
        ranks=ranks,
    )


def make_evaluation(name: str, options: dict[str, Any]) -> Any:
    """The evaluation `name` with options by their names; it has the fields of `Options` too.

    A single value stands for a tuple of one, and a path for its text. Where the command line takes the name of a data
    set, images of any make may stand (see `as_images`).
    """
    kind = with_options(EVALUATIONS[name])
    known = [field.name for field in fields(kind)]
    hints = get_type_hints(kind)
    values = {}
    for option, value in options.items():
        if option not in known:
            raise UserError(f"The evaluation {name} has no option {option!r}. {suggest(option, known)}")
        kinds = {get_origin(one) or one for one in (hints[option], *get_args(hints[option]))}
        if tuple in kinds and not isinstance(value, list | tuple | None):
            value = (value,)
        if Path in kinds and isinstance(value, str):
            value = Path(value)
        if option in ("data", "train", "test"):
            value = tuple(map(_images, value)) if tuple in kinds and value is not None else _images(value)
        values[option] = value
    return kind(**values)


def _images(source: Any) -> Source | None:
    if isinstance(source, str | Path):
        return str(source)
    return None if source is None else as_images(source)


def pick_quick(asked: LinearOptions | SegmentationOptions, extractor: Extractor) -> bool:
    """Whether to be quick: as asked, or up to `SMALL` pixels."""
    if asked.quick and asked.augmented:
        raise UserError(
            f"--quick and --augmented exclude each other; quick is the default up to {SMALL} pixels."
        )
    quick = asked.quick or (extractor.small and not asked.augmented)
    if quick and asked.flip != type(asked).flip:
        raise UserError(
            "--flip is for --augmented: the quick mode mirrors no image. Add the one, or drop the other."
        )
    return quick


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
