"""Two pictures laid over each other: how well their detail agrees once one is turned, scaled, moved or mirrored."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

SIDE = 32
"""Of the thumbnails that are compared."""
_WINDOW = 24  # the middle of the first picture, which the second is laid over
_COARSE = 12  # the same, at half the resolution
_SHIFTS = SIDE // 2 - _COARSE + 1  # places of the window in each direction, two pixels apart
_PROMISING = 0.55  # a coarse agreement below which a pair is not looked at any further
_STEPS = 8  # of the fine alignment
_MOST = torch.tensor([0.08, 0.08, 1.5, 0.08, 0.08, 1.5])  # by which a step changes the warp
_AT_ONCE = 512  # pairs
_FRAMES = range(2, 7)  # pixels that a frame is wide


def _linear(across: float, down: float, degrees: float, mirrored: bool) -> list[list[float]]:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    sign = -1.0 if mirrored else 1.0
    return [[sign * across * cos, -sign * down * sin], [across * sin, down * cos]]


_TRIED = [(s, s, 0) for s in (0.75, 0.87, 1.0, 1.15, 1.3)]  # scale across, scale down, turn
_TRIED += [(1.2, 1, 0), (0.83, 1, 0), (1, 1.2, 0), (1, 0.83, 0)]
_TRIED += [(s, s, degrees) for s in (0.87, 1.0) for degrees in (-16, -8, 8, 16)]
_WARPS = torch.tensor(
    [_linear(*tried, mirrored) for mirrored in (False, True) for tried in _TRIED]
)  # (V, 2, 2)


@dataclass(frozen=True)
class Aligned:
    """Pairs of pictures in their best alignment; all (P,) or (P, 2, 2)."""

    detail: Tensor
    """The correlation of their detail, from -1 to 1; 0 where they do not even roughly agree."""
    warp: Tensor
    """From offsets in the first picture to offsets in the second."""
    inverted: Tensor
    """Whether dark and bright are exchanged."""

    def changed(self) -> Tensor:
        """(P,): whether more was done than a shift or a slight cut: mirrored, inverted, turned, scaled."""
        (a, b), (c, d) = self.warp.permute(1, 2, 0)
        area = a * d - b * c
        turned = (c - b * area.sign()).abs() > 0.09 * (a * area.sign() + d).abs()  # by five degrees
        return (area < 0.8) | (area > 1.25) | turned | self.inverted


def align(grey: Tensor, pairs: Tensor, advance: Callable[[int], None] = lambda count: None) -> Aligned:
    """Lay the second picture of each pair over the first.

    A rough search over scales from 0.75 to 1.3, stretches, turns by up to 16 degrees, mirrors and shifts by up to
    four pixels; its two best answers are refined as affine warps. Grey values alone are compared, so colours do not
    matter; nor do brightness and contrast.

    Args:
        grey: (N, 1, 32, 32), thumbnails as floats.
        pairs: (P, 2) ids.
        advance: is told how many more pairs are done.
    """
    parts = [Aligned(torch.zeros(0), torch.zeros(0, 2, 2), torch.zeros(0, dtype=torch.bool))]
    for some in pairs.split(_AT_ONCE) if len(pairs) else ():
        agreement, warp, shift = _search(grey, some)
        promising = agreement.abs().amax(1) > _PROMISING
        detail, best = torch.zeros(len(some)), torch.eye(2).repeat(len(some), 1, 1)
        inverted = torch.zeros(len(some), dtype=torch.bool)
        if promising.any():
            for way in range(agreement.shape[1]):
                sign = agreement[promising, way].sign()
                found, refined = _refine(
                    grey, some[promising], _WARPS[warp[promising, way]], shift[promising, way], sign
                )
                better = promising.clone()
                better[promising] = found > detail[promising]
                of = better[promising]
                detail[better], best[better], inverted[better] = found[of], refined[of], sign[of] < 0
        parts.append(Aligned(detail, best, inverted))
        advance(len(some))
    return Aligned(*(torch.cat([getattr(p, name) for p in parts]) for name in ("detail", "warp", "inverted")))


def unframed(grey: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures (N, 1, 32, 32) without a frame of one colour, enlarged to their old size; and which had one (N,)."""
    width = torch.zeros(len(grey), dtype=torch.int64)
    for w in range(1, _FRAMES[-1] + 2):
        band = torch.ones(SIDE, SIDE, dtype=torch.bool)
        band[w:-w, w:-w] = False
        width[grey[:, 0, band].std(1) < 4] = w
    inner = grey.clone()
    for w in _FRAMES:
        framed = width == w
        if framed.any():
            part = grey[framed][:, :, w + 1 : -w - 1, w + 1 : -w - 1]  # a pixel more: frames have soft edges
            inner[framed] = F.interpolate(part, (SIDE, SIDE), mode="bilinear", align_corners=False)
    return inner, (width >= _FRAMES[0]) & (width <= _FRAMES[-1])


def _search(grey: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two best rough alignments: agreement (P, 2), below 0 if inverted, which warp (P, 2), shift (P, 2, 2)."""
    ids, places = pairs.unique(return_inverse=True)
    rough = _smooth(grey[ids], 3) - _smooth(grey[ids], 9)
    points = 2 * _offsets(_COARSE).view(1, -1, 2) @ _WARPS.transpose(1, 2)  # (V, 144, 2)
    warped = _sample(rough, points.view(1, -1, _COARSE, 2).expand(len(ids), -1, -1, -1))
    warped = _standard(warped.view(len(ids), len(_WARPS), -1))
    windows = _standard(F.unfold(F.avg_pool2d(rough, 2), _COARSE).transpose(1, 2))  # (n, shifts, 144)
    agreement = (warped[places[:, 1]] @ windows[places[:, 0]].transpose(1, 2)).flatten(1)
    best = agreement.abs().topk(2, dim=1).indices
    place = best % _SHIFTS**2
    shift = 2.0 * torch.stack([place % _SHIFTS, place // _SHIFTS], 2) - (_SHIFTS - 1)
    return agreement.gather(1, best), best // _SHIFTS**2, shift


def _refine(grey: Tensor, pairs: Tensor, warp: Tensor, shift: Tensor, sign: Tensor) -> tuple[Tensor, Tensor]:
    """The agreement of detail (P,) and the warps (P, 2, 2) after Gauss-Newton steps on the blurred pictures."""
    count, at = len(pairs), _offsets(_WINDOW).view(-1, 2)  # (576, 2)
    square = (count, 1, _WINDOW, _WINDOW)
    first, second = grey[pairs[:, 0]], grey[pairs[:, 1]]
    window = _sample(first, (at + shift[:, None]).view(count, _WINDOW, _WINDOW, 2))
    target = _standard(_smooth(window, 3).flatten(1)) * sign[:, None]
    blurred, points = _smooth(second, 3), F.pad(at, (0, 1), value=1.0)
    affine = F.pad(warp, (0, 1))  # (P, 2, 3)
    best, kept = torch.full((count,), -2.0), affine.clone()
    for step in range(_STEPS + 1):
        moved = _sample(blurred, (points @ affine.transpose(1, 2)).view(count, _WINDOW, _WINDOW, 2))
        centred = moved.flatten(1) - moved.flatten(1).mean(1, keepdim=True)
        norm = centred.norm(dim=1, keepdim=True).clamp(min=1)
        unit = centred / norm
        agreement = (unit * target).sum(1)
        better = agreement > best
        best, kept = torch.where(better, agreement, best), torch.where(better[:, None, None], affine, kept)
        if step == _STEPS:
            break
        x = F.pad(moved[..., 2:] - moved[..., :-2], (1, 1)).view(count, -1) / (2 * norm)
        y = F.pad(moved[..., 2:, :] - moved[..., :-2, :], (0, 0, 1, 1)).view(count, -1) / (2 * norm)
        slopes = torch.stack([x * at[:, 0], x * at[:, 1], x, y * at[:, 0], y * at[:, 1], y], 2)  # (P, 576, 6)
        slopes = slopes - slopes.mean(1, keepdim=True)
        slopes = slopes - unit[:, :, None] * (unit[:, :, None] * slopes).sum(1, keepdim=True)
        normal = slopes.transpose(1, 2) @ slopes
        normal = normal + torch.diag_embed(0.01 * normal.diagonal(dim1=1, dim2=2) + 1e-6)
        change = torch.linalg.solve(normal, slopes.transpose(1, 2) @ (target - unit)[:, :, None])[:, :, 0]
        change = change.clamp(-_MOST, _MOST).view(count, 2, 3)
        affine = affine + affine[:, :, :2] @ change  # of the warp before
    moved = _sample(second, (points @ kept.transpose(1, 2)).view(count, _WINDOW, _WINDOW, 2)).view(square)
    details = [_standard((of - _smooth(of, 5)).flatten(1)) for of in (window, moved)]
    return (details[0] * details[1]).sum(1) * sign, kept[:, :, :2]


def _offsets(side: int) -> Tensor:
    """(side, side, 2): x and y of pixels, from the middle."""
    at = torch.arange(side) - (side - 1) / 2
    return torch.stack(torch.meshgrid(at, at, indexing="xy"), 2)


def _sample(pictures: Tensor, at: Tensor) -> Tensor:
    return F.grid_sample(pictures, at / (SIDE / 2), padding_mode="border", align_corners=False)


def _smooth(pictures: Tensor, width: int) -> Tensor:
    return F.avg_pool2d(pictures, width, stride=1, padding=width // 2, count_include_pad=False)


def _standard(values: Tensor) -> Tensor:
    """Less their mean, with norm 1 along the last dimension; 0 where hardly anything is left."""
    centred = values - values.mean(-1, keepdim=True)
    norm = centred.norm(dim=-1, keepdim=True)
    return torch.where(norm > 1, centred / norm.clamp(min=1), 0.0)
