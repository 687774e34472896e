"""`similar`: the images of a folder that an encoder finds most similar to one image, and a sheet of them."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from adasim.data import ImageSet, ImagesLike, Unreadable
from adasim.data.sources import file_name
from adasim.eval.evaluation import Extractor, Say, open_extractor
from adasim.eval.features import encode, frozen, require_finite
from adasim.models import Backbone
from adasim.neighbors import search
from adasim.options import Options
from adasim.tools.embed import source
from adasim.tools.sheet import INK, Sheet, load_readable, plain_look
from adasim.util.errors import UserError
from adasim.util.files import atomic_write
from adasim.util.rgb import decode, to_tensor
from adasim.util.terminal import shortened


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
    workers: int | Literal["auto"] = "auto",
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
    features = extractor.features(images, max_unreadable=1.0)
    rows = normalize(features.values, dim=1)  # (n, D)
    wanted = normalize(_feature(extractor, query), dim=1)  # (1, D)
    scores, places = (answer[0] for answer in search(wanted, rows, min(k + 1, len(rows))))
    ids: list[int] = []
    values: list[float] = []
    for place, score in zip(places.tolist(), scores.tolist(), strict=True):
        i = int(features.ids[place])
        itself = isinstance(image, str | Path) and _same_file(images.where(i), image)
        if place >= 0 and not itself and len(ids) < k:
            ids.append(i)
            values.append(score)
    return Similar([file_name(images, i) for i in ids], values, ids, query, images)


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


# ---- the picture ----

_QUIET, _ACCENT = "#75757a", "#2f6fab"
_CELL, _CAPTION, _GAP, _MARGIN = 1.6, 0.42, 0.16, 0.28  # inches
_LETTERS = 24  # of a file's name


def contact_sheet(path: Path, answer: Similar, title: str) -> None:
    """Write a PNG, whole or not at all: the image asked for, and beside it the nearest ones with their scores.

    Args:
        title: names the image asked for.
    """
    columns = min(5, max(1, len(answer)))
    rows = max(2, math.ceil(len(answer) / columns))  # beside the query, which is two cells high
    large = 2 * _CELL + _CAPTION + _GAP
    pitch_x, pitch_y = _CELL + _GAP, _CELL + _CAPTION + _GAP
    left = _MARGIN + large + 2 * _GAP  # of the answers
    with plain_look():
        sheet = Sheet(left + columns * pitch_x - _GAP + _MARGIN, rows * pitch_y - _GAP + 2 * _MARGIN)

        def cell(pixels: Tensor | None, x: float, y: float, side: float, words: str, name: str) -> None:
            """A square with two lines below it."""
            sheet.image(pixels, x, y, side, _QUIET)
            colour = _ACCENT if side == large else INK
            sheet.text(x, y + side + 0.07, words, size=8, color=colour, weight="bold")
            sheet.text(x, y + side + 0.22, name, size=6.5, color=_QUIET)

        cell(answer.query, _MARGIN, _MARGIN, large, "your image", shortened(title, 2 * _LETTERS))
        for place, (i, score, name) in enumerate(zip(answer.ids, answer.scores, answer.files, strict=True)):
            row, column = divmod(place, columns)
            x, y = left + column * pitch_x, _MARGIN + row * pitch_y
            words = f"{place + 1}.  {score:.3f}"
            cell(load_readable(answer.images, i), x, y, _CELL, words, shortened(name, _LETTERS))
    atomic_write(path, sheet.render())
