"""From what a person names to images, their features and their supports: a run, an encoder, or features."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from adasim.api import Run, load_run
from adasim.config import ViewsConfig
from adasim.data import ImageSet, PairLoader, describe, leave_out, open_images, relabel
from adasim.eval.evaluation import Extractor, Say, open_extractor
from adasim.eval.features import encode, frozen
from adasim.explore.collection import Collection, collect, given_features
from adasim.explore.support import (
    NEAREST,
    WIDTH,
    Nearest,
    Support,
    nearest_others,
    support_of_features,
    support_of_memory,
    with_more,
)
from adasim.neighbors import NeighborMemory
from adasim.options import TAU, ExploreOptions, Options, refuse_unused
from adasim.registry import is_path
from adasim.util.errors import MissingSplitError, UserError
from adasim.util.terminal import progress_bar

_BATCH = 256


@dataclass
class Opened:
    """Images, what an encoder makes of them, and in words where that comes from."""

    collection: Collection
    support: Support
    features: Tensor
    """(N, D), one centred view each; NaN for images that cannot be read. Empty for a gallery, which needs none."""
    origin: str
    windowed: bool = True
    """Whether the support comes from several views of an image, so that an image may miss itself."""
    remembered: int | None = None
    """How many images, the first ones, could become anybody's neighbour; None: all. A run's memory knows its training
    images alone."""
    nearest: Nearest | None = None
    """By these features, if they are known already."""


def open_run(
    path: str | Path,
    options: ExploreOptions,
    say: Say,
    *,
    data: str | None = None,
    images: ImageSet | None = None,
) -> Opened:
    """A run: supports from its neighbour memory, features from its encoder. Its test images come along.

    Args:
        data: where the run's images are now, if they moved; other images are refused.
        images: the training images, for a run that they were handed over to in Python.
    """
    run = load_run(path)
    memory = run.read_memory(say) if run.keeps_neighbours else None
    if memory is not None and not memory.epochs:
        memory = None
    if memory is not None:
        refuse_unused(options, ("passes", "k"), path)
    train = own_images(run, data, images, "explore", memory)
    test = None
    if images is None:
        source, size = data or run.config.data.source, run.config.views.size
        test = open_test(source, size=size, exclude=run.config.data.exclude, say=say)
        test = None if test is None else relabel(test, run.config.data.labels)
    collection = _collected(train, test, say)
    extractor = _extractor(str(path), options, say)
    features = _features(extractor, collection)
    nearest = find_nearest(features)
    if memory is None:
        say(
            f"{path} keeps no neighbours: they are found by {options.passes} augmented passes of its encoder."
        )
        support = augmented_support(extractor, collection.sets, options)
        origin = f"the encoder of the run {Path(path).resolve().name}"
        return Opened(collection, support, features, origin, nearest=nearest)
    tau = options.tau or run.config.neighbors.tau or TAU
    support = support_of_memory(memory, tau)
    if test is not None:
        support = with_more(support, nearest, tau)
    origin = origin_in_words(memory, tau, Path(path).resolve().name)
    return Opened(collection, support, features, origin, remembered=len(train), nearest=nearest)


def origin_in_words(memory: NeighborMemory, tau: float, name: str) -> str:
    """Where the p_win of a run comes from; `name` is the run's."""
    count = min(memory.window, memory.epochs)
    epochs = "the last epoch" if count == 1 else f"the last {count} epochs"
    return f"{epochs} of the run {name} (K = {memory.k}, tau = {tau:g})"


def open_backbone(model: str, data: str, options: ExploreOptions, say: Say) -> Opened:
    """Any frozen encoder: p_win from w augmented passes over the images."""
    extractor = _extractor(model, options, say)
    collection = open_collection(data, size=extractor.encoder.transform.size, say=say)
    features = _features(extractor, collection)
    support = augmented_support(extractor, collection.sets, options)
    name, k, tau = extractor.encoder.name, options.k, options.frozen_tau
    origin = f"{options.passes} augmented passes of {name} (K = {k}, tau = {tau:g})"
    return Opened(collection, support, features, origin)


def open_features(file: Path, data: str, options: ExploreOptions, say: Say) -> Opened:
    """Features that somebody else made: one comparison of every image with every other."""
    collection = open_collection(data, size=options.size or 32, say=say)
    features = given_features(file, collection, data, say)
    nearest = find_nearest(features, options.k)
    support = support_of_features(nearest, options.k, options.frozen_tau)
    return Opened(collection, support, features, f"features from {file.name}", False, nearest=nearest)


def find_nearest(features: Tensor, at_least: int = 0) -> Nearest:
    """The nearest others of every image, with a progress bar."""
    with progress_bar("neighbours", len(features)) as advance:
        return nearest_others(features, max(NEAREST, at_least), advance)


def augmented_support(extractor: Extractor, sets: list[ImageSet], options: ExploreOptions) -> Support:
    """p_win of a frozen encoder: each pass sees a fresh view of every image, and looks it up among those of the pass
    before, as a training epoch does.
    """
    backbone, transform = extractor.encoder.backbone.to(extractor.device), extractor.encoder.transform
    views = ViewsConfig(size=transform.size, mean=transform.mean, std=transform.std)
    views = replace(views, scale=(0.4, 1.0), color=0.5, blur=0.0, solarize=0.0)
    load = partial(PairLoader, seed=options.seed, workers=extractor.workers, device=extractor.device)
    loaders = [
        load(images, views, batch_size=min(_BATCH, len(images)), max_unreadable=1.0) for images in sets
    ]
    passes, count = options.passes, sum(map(len, sets))
    memory: NeighborMemory | None = None
    try:
        with progress_bar("augmented passes", (passes + 1) * count) as advance, frozen(backbone):
            for epoch in range(passes + 1):  # the first one has nothing to look into
                first = 0
                for images, loader in zip(sets, loaders, strict=True):
                    for batch in loader.views(epoch, torch.arange(len(images)).split(_BATCH), (2,)):
                        ids = batch.ids.cpu()
                        with torch.no_grad():
                            features = encode(backbone, batch.views[0]).float().cpu()
                        # What stands in for an image that cannot be read says nothing about it.
                        features[torch.tensor([i in loader.quarantined for i in ids.tolist()])] = torch.nan
                        memory = memory or NeighborMemory(
                            count, features.shape[1], passes, min(options.k + 1, count)
                        )
                        memory.observe(ids + first, features)
                        advance(len(ids))
                    first += len(images)
                assert memory is not None
                memory.end_epoch()
    finally:
        for loader in loaders:
            loader.close()
    assert memory is not None
    return support_of_memory(memory, options.frozen_tau, width=max(WIDTH, options.k + 1))


def _extractor(model: str, asked: ExploreOptions, say: Say) -> Extractor:
    same = ("random_weights", "size", "device", "workers", "no_cache", "seed")
    return open_extractor(model, Options(**{name: getattr(asked, name) for name in same}), say=say)


def _features(extractor: Extractor, collection: Collection) -> Tensor:
    """(N, D): one centred view of every image; NaN where it cannot be read."""
    parts = []
    for images in collection.sets:
        features = extractor.features(images, max_unreadable=1.0)  # the page counts them
        rows = torch.full((len(images), features.values.shape[1]), torch.nan)
        rows[features.ids] = features.values
        parts.append(rows)
    return torch.cat(parts)


def open_collection(source: str, *, size: int, say: Say) -> Collection:
    """The images of a source, which `say` is told: its training and its test split, or all of them where it is not
    divided."""
    train, test = open_images(source, size=size), open_test(source, size=size, say=say)
    return _collected(train, test, say)


def open_test(source: str, *, size: int, exclude: str | None = None, say: Say) -> ImageSet | None:
    """The test images of a source, if it has any, without those that the verdicts in `exclude` reject; where they
    cannot be opened, `say` is told why."""
    try:
        return leave_out(open_images(source, size=size, split="test"), exclude)
    except MissingSplitError:
        return None
    except UserError as error:
        say(f"Without the test images: {error}")
        return None


def _collected(train: ImageSet, test: ImageSet | None, say: Say) -> Collection:
    """Both as one; says what images these are, and, once, what lies beside them and is not looked at."""
    more = [] if test is None else [test]
    say(describe(train, used=[images.split for images in more]))
    for images in more:
        say(describe(images, used=None))
    return collect([train, *more])


def own_images(
    run: Run, data: str | None, images: ImageSet | None, command: str, memory: NeighborMemory | None
) -> ImageSet:
    """The images that a run was trained on. Neighbours are numbers of images: others would give wrong ones, and are
    refused.

    Args:
        data: where they are now, if they moved.
        images: those that were handed over in Python.
        command: which command looks at them, for the sentence that refuses others.
        memory: which must know as many: a run may have no fingerprint of its images.
    """
    source, known = data or run.config.data.source, run.data_fingerprint
    gone = is_path(source) and os.path.isabs(source) and not os.path.exists(source)
    if images is None and data is None and gone:
        raise UserError(f"The images of {run.path} are not at {source}. Say where they are now with --data.")
    images = run.images(source=data) if images is None else images
    if known is not None and known != images.fingerprint():
        raise UserError(
            f"The images are not those that {run.path} was trained on, and its neighbours would be wrong ones. "
            f"Restore them, or look at these with: adasim {command} --backbone {run.path} --data {source}"
        )
    if memory is not None and len(images) != memory.num_images:
        raise UserError(
            f"{run.path} knows {memory.num_images:,} images, and {images.place or images.name} has {len(images):,}. "
            f"Name the images that it was trained on with --data."
        )
    return images
