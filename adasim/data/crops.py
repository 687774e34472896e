"""What is random about a view, and the crop that it shows.

One row of uniforms, a function of (seed, view, epoch, image id), becomes a crop and the changes of its colours. Crops
are cut from a batch in memory, on any device (`crop_batch`), or from one image after another in a loader process, as
8-bit pixels (`CropWorker`). Both take the same boxes, and agree up to the rounding of 8-bit pixels.

In memory, cropping and resizing are linear and separable, so each is one small matrix per image and axis: a crop is
rows @ image @ columns^T, for all images in one batched product. Of one image, torch resizes the 8-bit pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from adasim.config import ViewsConfig
from adasim.data.images import ImageSet
from adasim.data.pool import Failed
from adasim.dist.devices import to_device, without_autocast
from adasim.util import seeding
from adasim.util.errors import UserError
from adasim.util.rgb import Unreadable

_TRIES = 10  # torchvision's RandomResizedCrop gives up after as many
# How many uniforms each decision takes. "apply": jitter, grey, blur, solarise. One more changes all views of a seed.
_COLUMNS = {"shape": 2 * _TRIES, "place": 2, "flip": 1, "apply": 4, "jitter": 4, "order": 4, "sigma": 1}
UNIFORMS = sum(_COLUMNS.values())
RATIO = (3 / 4, 4 / 3)
SIGMA = (0.1, 2.0)
SOLARIZE_FROM = 128  # 8-bit levels from here up are inverted
_TABLE_SIDE = 32  # up to this side all resize matrices are kept: 2,048 of them, 8 MB for views of 32 pixels
_STAND_INS = 100

Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class ViewSettings:
    """The augmentation of one view: the configuration's probabilities and ranges times its strengths."""

    size: int
    scale: tuple[float, float]
    interpolation: Literal["bilinear", "bicubic"]
    jitter: tuple[float, float, float, float]
    """Ranges of brightness, contrast, saturation and hue."""
    flip_p: float
    jitter_p: float
    grey_p: float
    blur_p: float
    solarize_p: float

    @classmethod
    def of(cls, config: ViewsConfig, view: int) -> ViewSettings:
        """Views 1 and 2 are the global ones; from 3 on they are local crops."""
        local = view > 2
        brightness, contrast, saturation, hue = (config.color * s for s in config.jitter)
        return cls(
            size=config.local_side if local else config.size,
            scale=config.local_scale if local else config.scale,
            interpolation=config.interpolation,
            jitter=(brightness, contrast, saturation, hue),
            flip_p=config.flip,
            jitter_p=0.8 if config.color else 0.0,
            grey_p=0.2 * config.color,
            blur_p=config.blur_p[min(view, 3) - 1] * config.blur,
            solarize_p=0.0 if local else config.solarize_p[view - 1] * config.solarize,
        )

    @classmethod
    def of_all(cls, config: ViewsConfig) -> dict[int, ViewSettings]:
        return {view: cls.of(config, view) for view in range(1, 3 + config.local_crops)}


def view_uniforms(seed: int, view: int, epoch: int, ids: Tensor) -> Tensor:
    """What view number `view` of these images in this epoch is drawn from: float64 (B, UNIFORMS), a pure function of
    the arguments. The only place that says how a view's randomness is named."""
    return seeding.uniform(seed, f"view{view}", epoch, ids, UNIFORMS)


def _columns(uniforms: Tensor) -> dict[str, Tensor]:
    return dict(zip(_COLUMNS, uniforms.split(list(_COLUMNS.values()), dim=1), strict=True))


@dataclass(frozen=True)
class Changes:
    """What happens to B crops after they are cut, whatever size their images had; every field has B rows."""

    flip: Tensor
    jitter: Tensor
    """Whether the colours are jittered at all."""
    factors: Tensor
    """(B, 4): brightness, contrast and saturation factors, and the shift of hue in turns."""
    order: Tensor
    """(B, 4): which of the four comes first, second, third, fourth."""
    grey: Tensor
    blur: Tensor
    sigma: Tensor
    solarize: Tensor

    def __getitem__(self, rows: slice) -> Changes:
        return Changes(*(getattr(self, field.name)[rows] for field in fields(self)))


def draw_changes(settings: ViewSettings, uniforms: Tensor) -> Changes:
    """Decide what happens to B crops, from uniforms float64 (B, UNIFORMS); augment.py carries it out."""
    u = _columns(uniforms)
    jitter, grey, blur, solarize = u["apply"].unbind(1)
    ranges = torch.tensor(settings.jitter, dtype=torch.float64)
    neutral = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    return Changes(
        flip=u["flip"][:, 0] < settings.flip_p,
        jitter=jitter < settings.jitter_p,
        factors=neutral + ranges * (2 * u["jitter"] - 1),
        order=u["order"].argsort(1),
        grey=grey < settings.grey_p,
        blur=blur < settings.blur_p,
        sigma=SIGMA[0] + (SIGMA[1] - SIGMA[0]) * u["sigma"][:, 0],
        solarize=solarize < settings.solarize_p,
    )


class CropDraws:
    """What is random about B crops, before the sizes of their images are known.

    The rule is that of torchvision's RandomResizedCrop: the first of ten random shapes that fits, else the largest,
    centred. `boxes` applies it to a batch, `box` to one image: the same arithmetic, so the same pixels.
    """

    def __init__(self, settings: ViewSettings, uniforms: Tensor) -> None:
        u = _columns(uniforms)
        (least, most), (low, high) = settings.scale, (math.log(ratio) for ratio in RATIO)
        self.shares = least + (most - least) * u["shape"][:, :_TRIES]  # (B, tries), of the image's area
        self.ratios = (low + (high - low) * u["shape"][:, _TRIES:]).exp()  # (B, tries), width over height
        self.place = u["place"]  # (B, 2), between top and bottom, left and right

    def boxes(self, height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Top, left, height and width of each crop, int64 (B,), in images of one size."""
        H, W = torch.tensor([height, width], dtype=torch.float64)
        area = H * W * self.shares
        tall, wide = (area / self.ratios).sqrt().round(), (area * self.ratios).sqrt().round()  # (B, tries)
        fits = (tall > 0) & (tall <= H) & (wide > 0) & (wide <= W)
        first = fits.int().argmax(1, keepdim=True)
        none = ~fits.any(1, keepdim=True)
        h = torch.where(none, torch.minimum(H, (W / RATIO[0]).round()), tall.gather(1, first))
        w = torch.where(none, torch.minimum(W, (H * RATIO[1]).round()), wide.gather(1, first))
        top = torch.where(none, ((H - h) / 2).floor(), (self.place[:, :1] * (H - h + 1)).floor())
        left = torch.where(none, ((W - w) / 2).floor(), (self.place[:, 1:] * (W - w + 1)).floor())
        return top[:, 0].long(), left[:, 0].long(), h[:, 0].long(), w[:, 0].long()

    def box(self, row: int, H: int, W: int) -> tuple[int, int, int, int]:
        """Top, left, height and width of one crop: for a single image tensors would cost more than the numbers."""
        for share, ratio in zip(self.shares[row].tolist(), self.ratios[row].tolist(), strict=True):
            area = H * W * share
            h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < h <= H and 0 < w <= W:
                down, right = self.place[row].tolist()
                return math.floor(down * (H - h + 1)), math.floor(right * (W - w + 1)), h, w
        h, w = min(H, round(W / RATIO[0])), min(W, round(H * RATIO[1]))
        return (H - h) // 2, (W - w) // 2, h, w


# ---- from a batch in memory ----


def crop_batch(
    images: Tensor, settings: ViewSettings, boxes: tuple[Tensor, Tensor, Tensor, Tensor], flip: Tensor
) -> Tensor:
    """Crops of images uint8 (B, C, H, W), some flipped: float32 (B, C, S, S) in 0..1."""
    (H, W), (top, left, height, width) = images.shape[-2:], boxes
    rows = _resize_matrices(top, height, H, settings.size, settings.interpolation)
    columns = _resize_matrices(left, width, W, settings.size, settings.interpolation, flip)
    return apply_matrices(images.float().div_(255), rows, columns).clamp_(0, 1)


def apply_matrices(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows @ x @ columns^T for every image and channel, in fp32 also within a forward pass of less."""
    rows, columns = (to_device(m, x.device, torch.float32) for m in (rows, columns))
    B, C, H, W = x.shape
    with without_autocast(x.device):
        across = torch.bmm(x.reshape(B, C * H, W), columns.transpose(1, 2))  # (B, C*H, S)
        return torch.matmul(rows[:, None], across.view(B, C, H, -1))


def _resize_matrices(
    start: Tensor, length: Tensor, size_in: int, size_out: int, interpolation: str, flip: Tensor | None = None
) -> Tensor:
    """`resize_matrix`, upside down where `flip` says so; for small images, by looking up the few crops there can
    be."""
    if size_in <= _TABLE_SIDE:
        row = start * size_in + length - 1
        row = row if flip is None else row + size_in * size_in * flip
        return _resize_table(size_in, size_out, interpolation).index_select(0, row)
    matrix = resize_matrix(start, length, size_in, size_out, interpolation)
    return matrix if flip is None else torch.where(flip[:, None, None], matrix.flip(1), matrix)


@lru_cache(maxsize=8)
def _resize_table(size_in: int, size_out: int, interpolation: str) -> Tensor:
    """The matrices of all crops from size_in pixels: (start, length) is row start * size_in + length - 1; then the
    same ones upside down."""
    rows = torch.arange(size_in * size_in)
    matrix = resize_matrix(rows // size_in, rows % size_in + 1, size_in, size_out, interpolation)
    return torch.cat([matrix, matrix.flip(1)])


def resize_matrix(start: Tensor, length: Tensor, size_in: int, size_out: int, interpolation: str) -> Tensor:
    """(B, size_out, size_in): each row holds the weights with which one output pixel sums the input pixels.

    The antialiased filter of PIL and torch: a triangle (bilinear) or Keys' cubic with a = -1/2 (bicubic),
    stretched when shrinking, cut off at the crop's edges and made to sum to 1.
    """
    start, length = start.float()[:, None, None], length.float()[:, None, None]  # whole numbers: exact
    scale = length / size_out
    centre = (torch.arange(size_out)[:, None] + 0.5) * scale  # (B, size_out, 1): pixels from the crop's edge
    place = torch.arange(size_in) + 0.5 - start  # (B, 1, size_in)
    distance = ((place - centre) / scale.clamp(min=1)).abs()
    if interpolation == "bilinear":
        weights = (1 - distance).clamp(min=0)
    else:
        # Keys' two pieces in one: t^2 (t - 1) / 2 + s^2 (1 - 2 s), with t = max(2 - d, 0), s = max(1 - d, 0).
        t, s = (2 - distance).clamp_(min=0), (1 - distance).clamp_(min=0)
        weights = t * t * (t - 1) * 0.5 + s * s * (1 - 2 * s)
    weights = weights * ((place > 0) & (place < length))
    return weights / weights.sum(2, keepdim=True)


# ---- from one image after another ----


def first_readable(
    images: ImageSet, i: int, seed: int, load: Callable[[int], Loaded]
) -> tuple[Loaded, Failed]:
    """What `load` gives for image i or for the one that replaces it, and which images could not be read.

    The replacement depends on the seed and on i alone: the same for any number of workers, for a query and for a
    partner, before and after a resume.
    """
    failed: Failed = {}
    wanted = i
    for attempt in range(_STAND_INS):
        try:
            return load(wanted), failed
        except Unreadable as error:
            failed[wanted] = str(error)
            wanted = seeding.key(seed, "stand-in", i, attempt) % len(images)
    raise UserError(
        f"{_STAND_INS} images of {images.name} in a row cannot be read, the first being {failed[i]}. "
        f"Check the folder and its file system."
    )


class CropWorker:
    """What a loader process does for training: decode images and cut their crops. It has no state."""

    def __init__(self, images: ImageSet, views: ViewsConfig, seed: int) -> None:
        self._images, self._seed, self._reduced = images, seed, views.reduced_jpeg
        self.settings = ViewSettings.of_all(views)

    def __call__(
        self, asked: tuple[int, Sequence[int]], rows: Sequence[tuple[int, int]], out: list[Tensor]
    ) -> Failed:
        """Write crops into `out`, uint8 (B, 3, S, S) for each view; returns which images could not be read.

        Args:
            asked: the epoch, and the numbers of the views.
            rows: (query, partner) of each row. View 2 shows the partner, but is drawn under the query's id.
            out: one tensor for each view.
        """
        epoch, numbers = asked
        ids = torch.tensor([query for query, _ in rows])
        draws = [CropDraws(self.settings[v], view_uniforms(self._seed, v, epoch, ids)) for v in numbers]
        failed: Failed = {}
        for row, (query, partner) in enumerate(rows):
            shown: dict[int, list[int]] = {}  # of each image, which of the views show it
            for n, view in enumerate(numbers):
                shown.setdefault(partner if view == 2 else query, []).append(n)
            for i, places in shown.items():
                views = [(self.settings[numbers[n]], draws[n], out[n][row]) for n in places]
                failed |= self._cut(i, row, views)
        return failed

    def _cut(self, i: int, row: int, views: list[tuple[ViewSettings, CropDraws, Tensor]]) -> Failed:
        """Decode image i once, and write the crop that each of these views shows of it."""
        size = (0, 0)

        def smaller(H: int, W: int) -> int:
            nonlocal size
            size = (H, W)
            return reduction([(*draws.box(row, H, W)[2:], settings.size) for settings, draws, _ in views])

        def load(n: int) -> tuple[Tensor, int]:
            return self._images.load_reduced(n, smaller) if self._reduced else (self._images.load(n), 1)

        (pixels, scale), failed = first_readable(self._images, i, self._seed, load)
        if scale == 1:
            for settings, draws, out in views:
                out.copy_(crop_image(pixels, settings, draws.box(row, *pixels.shape[-2:])))
        else:
            picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
            for settings, draws, out in views:
                out.copy_(crop_reduced(picture, scale, settings, draws.box(row, *size)))
        return failed


def crop_image(image: Tensor, settings: ViewSettings, box: tuple[int, int, int, int]) -> Tensor:
    """One crop of an image uint8 (3, H, W), by its top, left, height and width: uint8 (3, S, S)."""
    top, left, height, width = box
    part = image[None, :, top : top + height, left : left + width]
    size = (settings.size, settings.size)
    return F.interpolate(part, size=size, mode=settings.interpolation, antialias=True)[0]


def crop_reduced(
    image: Image.Image, scale: int, settings: ViewSettings, box: tuple[int, int, int, int]
) -> Tensor:
    """The same from an image that was decoded at 1/scale of its size. The box is in pixels of the full size, and need
    not begin or end at a whole pixel of the reduced one: that PIL can do, and torch cannot."""
    top, left, height, width = (side / scale for side in box)
    part, mode = (left, top, left + width, top + height), Image.Resampling[settings.interpolation.upper()]
    crop = image.resize((settings.size, settings.size), mode, box=part)
    return torch.from_numpy(np.array(crop)).permute(2, 0, 1)


def reduction(crops: list[tuple[int, int, int]]) -> int:
    """The greatest s of 1, 4, 8 so that crops (height, width, size of the view) of an image at 1/s of its size are
    still at least as large as their views: none is enlarged that would not have been.

    JPEG's 1/2 is left out: it was no faster than the full size, whose crops torch resizes faster than PIL does.
    """
    most = min(min(height, width) / size for height, width, size in crops)
    return max((s for s in (4, 8) if s <= most), default=1)
