"""From what a person names to images, their features and their supports: a run, an encoder, or features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.data import ImageSet, PairLoader, describe
from adasim.errors import UserError
from adasim.eval.encoders import open_encoder
from adasim.eval.extractor import Extractor
from adasim.eval.features import encode, frozen, progress_bar
from adasim.eval.options import Flag
from adasim.explore.collection import Collection, collect, open_collection, open_test
from adasim.explore.support import Support, support_of_features, support_of_memory, with_more
from adasim.models import Backbone
from adasim.models.transforms import EvalTransform
from adasim.neighbors import NeighborMemory
from adasim.ranks.devices import pick_device
from adasim.run import Run, load_run
from adasim.terminal import printable

Say = Callable[[str], None]
"""Takes a sentence for a person."""
TAU = 0.2
"""Temperature of p_win where nobody says another: the paper's."""
_BATCH = 256


@dataclass(kw_only=True)
class Options:
    """How images are looked at."""

    passes: int = 10
    """w: augmented passes over the images, where an encoder and no run says who resembles whom."""
    k: int = 10
    """K: neighbours of each image in a pass."""
    tau: float | None = None
    """Temperature of p_win; a run's own by default, else 0.2."""
    size: int | None = None
    """Side in pixels of what the encoder sees; its own by default."""
    random_weights: Flag = False
    """Use an untrained model of that name."""
    device: str = "auto"
    """Where the encoder runs: auto, cpu, cuda, ..."""
    workers: int = 2
    """Processes that read images from files."""
    no_cache: Flag = False
    """Make features anew and keep none."""
    seed: int = 0
    """Random seed of the augmented passes."""

    def __post_init__(self) -> None:
        for name in ("passes", "k"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name}={getattr(self, name)} must be at least 1.")
        if self.tau is not None and not self.tau > 0:
            raise UserError(f"--tau={self.tau} must be above 0. The paper uses 0.2.")

    @property
    def frozen_tau(self) -> float:
        """Temperature where no run has one of its own."""
        return self.tau or TAU


@dataclass
class Opened:
    """Images, what an encoder makes of them, and in words where that comes from."""

    collection: Collection
    support: Support
    features: Tensor
    """(N, D), one centred view each; NaN for images that cannot be read."""
    origin: str
    windowed: bool = True
    """Whether the support comes from several views of an image, so that an image may miss itself."""
    remembered: int | None = None
    """How many images, the first ones, could become anybody's neighbour; None: all. A run's memory knows its training
    images alone."""


def open_run(path: str | Path, options: Options, say: Say, *, images: ImageSet | None = None) -> Opened:
    """A run: supports from its neighbour memory, features from its encoder. Its test images come along.

    Args:
        images: the training images, for a run that they were handed over to in Python.
    """
    run = load_run(path)
    source = run.config.data.source
    train = run.images() if images is None else images
    say(describe(train, unused=False))
    require_same(run, train, f"adasim explore --backbone {run.path} --data {source}")
    test = open_test(source, size=run.config.views.size) if images is None else None
    if test is not None:
        say(describe(test, unused=False))
    collection = collect([train] if test is None else [train, test])
    extractor = _extractor(str(path), options, say)
    features = _features(extractor, collection)
    memory = run.memory if run.keeps_neighbours else None
    if memory is None or memory.epochs == 0:
        say(
            f"{path} keeps no neighbours: they are found by {options.passes} augmented passes of its encoder."
        )
        support = _passes(extractor, collection, options)
        return Opened(collection, support, features, f"the encoder of the run {Path(path).resolve().name}")
    tau = options.tau or run.config.neighbors.tau or TAU
    support = support_of_memory(memory, tau)
    if test is not None:
        support = with_more(support, features, tau)
    origin = origin_in_words(memory, tau, Path(path).resolve().name)
    return Opened(collection, support, features, origin, remembered=len(train))


def origin_in_words(memory: NeighborMemory, tau: float, name: str) -> str:
    """Where the p_win of a run comes from; `name` is the run's."""
    count = min(memory.window, memory.epochs)
    epochs = "the last epoch" if count == 1 else f"the last {count} epochs"
    return f"{epochs} of the run {name} (K = {memory.k}, tau = {tau:g})"


def open_backbone(model: str, data: str, options: Options, say: Say) -> Opened:
    """Any frozen encoder: p_win from w augmented passes over the images."""
    extractor = _extractor(model, options, say)
    collection = _open_data(data, extractor.encoder.transform.size, say)
    features = _features(extractor, collection)
    support = _passes(extractor, collection, options)
    name, k, tau = extractor.encoder.name, options.k, options.frozen_tau
    origin = f"{options.passes} augmented passes of {name} (K = {k}, tau = {tau:g})"
    return Opened(collection, support, features, origin)


def open_features(file: Path, data: str, options: Options, say: Say) -> Opened:
    """Features that somebody else made: one comparison of every image with every other."""
    collection = _open_data(data, options.size or 32, say)
    features, files = read_features(file)
    if len(features) != len(collection):
        raise UserError(
            f"{file} has {len(features):,} features and {data} {len(collection):,} images. One row per image is "
            f"needed, in the order of the images: training images first, then test images, each by name."
        )
    for row, (known, name) in enumerate(zip(map(printable, files), collection.names, strict=False)):
        if known.rpartition("/")[2] != name.rpartition("/")[2]:
            raise UserError(
                f"Row {row:,} of {file} is of {known}, and image {row:,} of {data} is {name}: these are features of "
                f"other images. Make them anew, or restore the images."
            )
    support = support_of_features(features, options.k, options.frozen_tau)
    return Opened(collection, support, features, f"features from {file.name}", windowed=False)


def read_features(file: Path) -> tuple[Tensor, list[str]]:
    """The two-dimensional array `features` (or the only one that there is) of an .npz or .npy file; and which image
    each row is of, if an array `files` of names says so, as `adasim embed` writes it."""
    try:
        found: Any = np.load(file, allow_pickle=False)
        if isinstance(found, np.ndarray):
            arrays = {"features": found}
        else:
            with found:
                arrays = {name: found[name] for name in found.files}
    except Exception as error:  # a damaged archive raises nearly anything
        reason = getattr(error, "strerror", None) or "it is no .npz file of plain arrays"
        raise UserError(f"{file} cannot be read: {reason}.") from None
    tables = {name: array for name, array in arrays.items() if array.ndim == 2 and array.dtype.kind in "fiu"}
    name = "features" if "features" in tables else next(iter(tables), "")
    if not name or (name != "features" and len(tables) > 1):
        held = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "nothing"
        raise UserError(
            f"{file} holds {held}. Features are needed as an array (images, width) named features."
        )
    features, files = tables[name], arrays.get("files", np.empty(0))
    named = files.dtype.kind == "U" and files.shape == features.shape[:1]
    return torch.from_numpy(np.ascontiguousarray(features, dtype=np.float32)), files.tolist() if named else []


def augmented_support(
    backbone: Backbone,
    sets: list[ImageSet],
    transform: EvalTransform,
    *,
    passes: int,
    k: int,
    tau: float,
    seed: int = 0,
    device: torch.device | str = "cpu",
    workers: int = 0,
) -> Support:
    """p_win of a frozen encoder: each pass sees a fresh view of every image, and looks it up among those of the pass
    before, as a training epoch does.
    """
    views = ViewsConfig(
        size=transform.size,
        scale=(0.4, 1.0),
        color=0.5,
        blur=0.0,
        solarize=0.0,
        mean=transform.mean,
        std=transform.std,
    )
    loaders = [
        PairLoader(images, views, batch_size=1, seed=seed, workers=workers, device=device) for images in sets
    ]
    backbone.to(device)
    count = sum(map(len, sets))
    memory: NeighborMemory | None = None
    try:
        with progress_bar("augmented passes", (passes + 1) * count) as advance, frozen(backbone):
            for epoch in range(passes + 1):  # the first one has nothing to look into
                first = 0
                for images, loader in zip(sets, loaders, strict=True):
                    for ids in torch.arange(len(images)).split(_BATCH):
                        pixels = loader.fetch(epoch, ids, ids).result()
                        with torch.no_grad():
                            found = encode(backbone, pixels).float().cpu()
                        # What stands in for an image that cannot be read says nothing about it.
                        found[torch.tensor([i in loader.quarantined for i in ids.tolist()])] = torch.nan
                        memory = memory or NeighborMemory(count, found.shape[1], passes, min(k + 1, count))
                        memory.observe(ids + first, found)
                        advance(len(ids))
                    first += len(images)
                assert memory is not None
                memory.end_epoch()
    finally:
        for loader in loaders:
            loader.close()
    assert memory is not None
    return support_of_memory(memory, tau)


def _passes(extractor: Extractor, collection: Collection, options: Options) -> Support:
    return augmented_support(
        extractor.encoder.backbone,
        collection.sets,
        extractor.encoder.transform,
        passes=options.passes,
        k=options.k,
        tau=options.frozen_tau,
        seed=options.seed,
        device=extractor.device,
        workers=options.workers,
    )


def _extractor(model: str, options: Options, say: Say) -> Extractor:
    encoder = open_encoder(model, random_weights=options.random_weights, size=options.size)
    if encoder.note:
        say(encoder.note)
    return Extractor(
        encoder,
        device=pick_device(options.device),
        workers=options.workers,
        cached=not options.no_cache,
        seed=options.seed,
        say=say,
    )


def _features(extractor: Extractor, collection: Collection) -> Tensor:
    """(N, D): one centred view of every image; NaN where it cannot be read."""
    parts = []
    for images in collection.sets:
        found = extractor.features(images)
        rows = torch.full((len(images), found.values.shape[1]), torch.nan)
        rows[found.ids] = found.values
        parts.append(rows)
    return torch.cat(parts)


def _open_data(data: str, size: int, say: Say) -> Collection:
    collection = open_collection(data, size=size)
    for images in collection.sets:
        say(describe(images, unused=False))
    return collection


def require_same(run: Run, images: ImageSet, otherwise: str) -> None:
    """Neighbours are numbers of images: with other images they would be wrong ones. `otherwise` is the command that
    looks at other images."""
    known = run.data_fingerprint
    if known is not None and known != images.fingerprint():
        raise UserError(
            f"The images are not those that {run.path} was trained on, and its neighbours would be wrong ones. "
            f"Restore them, or look at these with: {otherwise}"
        )
