"""`similar`: the images of a folder that an encoder finds most similar to one image."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from adasim.data import ImageSet, ImagesLike, Unreadable
from adasim.data.sources.decode import decode
from adasim.data.sources.excluded import file_name
from adasim.eval.evaluation import Extractor, Say, open_extractor
from adasim.eval.features import encode, frozen, require_finite
from adasim.models import Backbone
from adasim.neighbors import search
from adasim.options import Options
from adasim.tools.embed import source
from adasim.util.errors import UserError
from adasim.util.rgb import to_tensor


@dataclass(frozen=True)
class Similar:
    """The nearest images, best first."""

    files: list[str]
    """Where each is, from the folder on."""
    scores: list[float]
    """Cosine similarity to the image asked for: 1 is the same direction."""
    ids: list[int]
    """Numbers of the images in the data set."""
    query: Tensor = field(repr=False)
    """The image asked for, uint8 (3, H, W)."""
    images: ImageSet = field(repr=False)

    def __len__(self) -> int:
        return len(self.files)


def similar(
    model: str | Path | Backbone,
    image: str | Path | Image.Image | Tensor,
    among: ImagesLike | Path,
    k: int = 10,
    *,
    split: str = "train",
    size: int | None = None,
    device: str = "auto",
    workers: int = 2,
    exclude: str | Path | None = None,
    cache: bool = True,
    say: Say = lambda sentence: None,
) -> Similar:
    """The `k` images most similar to `image`, by cosine similarity of features; exact, ties by order of files.

    If `image` is itself a file of `among`, it is not among the answers. The features of `among` are those of
    `adasim.embed`, kept from an earlier call or made now.

    Args:
        model: what the command line calls MODEL (docs/use.md), or an encoder that is loaded.
        image: a file, a PIL image, or uint8 (3, H, W).
        among: the images to search, as for `adasim.embed`; the other arguments are those, too.

    >>> found = similar("runs/photos", "cat.jpg", "photos/", k=5)        # doctest: +SKIP
    >>> found.files, found.scores                                         # doctest: +SKIP
    """
    if k < 1:
        raise UserError(f"k={k} must be at least 1.")
    query = _read(image)
    verdicts = None if exclude is None else Path(exclude)
    options = Options(size=size, device=device, workers=workers, exclude=verdicts, no_cache=not cache)
    extractor = open_extractor(model, options, say=say)
    images = extractor.open_images(source(among), split)
    found = extractor.features(images, max_unreadable=1.0)
    rows = normalize(found.values, dim=1)  # (n, D)
    wanted = normalize(_feature(extractor, query), dim=1)  # (1, D)
    scores, places = (answer[0] for answer in search(wanted, rows, min(k + 1, len(rows))))
    answers = [
        (int(found.ids[place]), score)
        for place, score in zip(places, scores.tolist(), strict=True)
        if place >= 0
    ]
    if isinstance(image, str | Path):
        answers = [(i, score) for i, score in answers if not _same_file(images.where(i), image)]
    answers = answers[:k]
    ids = [i for i, _ in answers]
    return Similar([file_name(images, i) for i in ids], [score for _, score in answers], ids, query, images)


def _read(image: Any) -> Tensor:
    """Any form of the image as uint8 (3, H, W)."""
    if isinstance(image, Image.Image):
        return to_tensor(image)
    if isinstance(image, Tensor):
        return image
    try:
        return decode(str(image))
    except Unreadable as error:
        raise UserError(f"{image} cannot be read: {error.reason}. Name an image file.") from None


def _feature(extractor: Extractor, query: Tensor) -> Tensor:
    """The query's feature (1, D)."""
    backbone = extractor.encoder.backbone
    with frozen(backbone), torch.inference_mode():
        view = extractor.encoder.transform(query)[None].to(extractor.device)
        feature = encode(backbone.to(extractor.device), view).float().cpu()
    require_finite(feature, backbone)
    return feature


def _same_file(one: str, other: str | Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
