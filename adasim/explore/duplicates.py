"""Duplicates: equal pixels, and mutual nearest neighbours that are far closer than their surroundings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from adasim.explore.support import Nearest

Kind = Literal["exact", "near", "same scene"]
KINDS: tuple[Kind, ...] = ("exact", "near", "same scene")
_EXACT = -1.0  # in place of a difference
_ROUNDING = 1e-6

MUTUAL = 3
"""Two images are mutual neighbours if each is among the other's so many nearest: a third copy must not be missed."""
CANDIDATE, SCENE = 2.0, 4.0
"""How far below the median a closeness must lie, in robust standard deviations: for a pair to be looked at as near
copies, and to be listed as the same scene on the encoder's word alone."""
DIFFERENCE = 0.4
"""Near copies differ by at most this, see `thumbnail_difference`."""
_SHIFT = 2  # pixels by which thumbnails are moved against each other
_AT_ONCE = 1024  # images or pairs whose thumbnails are looked at


@dataclass(frozen=True)
class Mutual:
    """Pairs of mutual neighbours in some space, and how close they are for where they are."""

    pairs: Tensor
    """(P, 2): mutual neighbours, the smaller id first."""
    closeness: Tensor
    """(P,): their distance in parts of their scales' geometric mean."""
    scale: Tensor
    """(N,): the distance of each image to the last neighbour that was looked at."""

    def threshold(self, deviations: float) -> float:
        """The closeness so many robust standard deviations below the median of all these pairs.

        That is exp(m - deviations * 1.4826 * median |log c - m|), with m the median of log c; 0 without any pair.
        """
        if not len(self.closeness):
            return 0.0
        logs = self.closeness.double().log()
        median = logs.quantile(0.5)
        deviation = 1.4826 * (logs - median).abs().quantile(0.5)
        return float((median - deviations * deviation).exp())

    def close(self, deviations: float) -> Tensor:
        """(Q, 2): the mutual neighbours that stand out by so much."""
        return self.pairs[self.closeness < self.threshold(deviations)]

    def would_stand_out(self, pairs: Tensor, distances: Tensor, deviations: float) -> Tensor:
        """(P,): whether pairs of images, neighbours or not, at these distances are as close as that."""
        return _closeness(pairs, distances, self.scale) < self.threshold(deviations)


@dataclass(frozen=True)
class Group:
    """Images that show the same, the first one to be kept."""

    members: list[int]
    kind: Kind
    difference: float
    """The largest difference of thumbnails along the links that hold the group together; 0 for equal pixels."""
    straddles: bool
    """Whether some are in one split and some in another."""


def mutual_neighbours(nearest: Nearest, mutual: int = MUTUAL) -> Mutual:
    """Pairs that are among each other's nearest.

    How close is close differs between encoders and between dense and sparse regions. So a distance is measured in
    parts of the distances to both images' K-th neighbours.
    """
    distances, ids = nearest.distances, nearest.ids
    count, width = ids.shape
    near = ids[:, : min(mutual, width)]
    listed = near >= 0
    i, j = torch.arange(count)[:, None].expand_as(near)[listed], near[listed]
    keys, place, times = (torch.minimum(i, j) * count + torch.maximum(i, j)).unique(
        return_inverse=True, return_counts=True
    )
    between = torch.empty(len(keys)).index_copy_(0, place, distances[:, : near.shape[1]][listed])
    both = times == 2
    pairs = torch.stack([keys[both] // count, keys[both] % count], 1)
    scale = torch.full((count,), _ROUNDING)
    if width:
        scale = torch.maximum(scale, distances.masked_fill(~torch.isfinite(distances), 0).amax(1))
    return Mutual(pairs, _closeness(pairs, between[both], scale), scale)


def looks_as_features(small: Tensor) -> Tensor:
    """Thumbnails (N, 3, 32, 32) as unit vectors: blurred, so that a shift or a slight turn matters little, and
    without brightness and contrast. A plain image becomes 0.
    """
    rows = []
    for block in small.split(_AT_ONCE):
        blurred = F.avg_pool2d(block.float(), 6, stride=4, padding=1, count_include_pad=False)  # (B, 3, 8, 8)
        rows.append(_standard(blurred).flatten(1))
    return torch.cat(rows)


def coarse_difference(small: Tensor, pairs: Tensor) -> Tensor:
    """(P,): the cosine distance of two images' `looks_as_features`, or of one's and the other's mirror image."""
    a, b = looks_as_features(small[pairs[:, 0]]), small[pairs[:, 1]]
    plain, mirrored = ((a * looks_as_features(view)).sum(1) for view in (b, b.flip(-1)))
    return (1 - torch.maximum(plain, mirrored)).clamp(min=0)


def thumbnail_difference(small: Tensor, pairs: Tensor) -> Tensor:
    """(P,): how different the fine detail of two images is, from 0 (the same up to contrast) to 2.

    Copies share their detail; two pictures of the sky only share what is coarse. So each thumbnail less its own
    blur (5 x 5) is compared: one minus their correlation, the least over shifts by up to two pixels and over a
    mirror. An image without any detail differs from all by 1.

    Args:
        small: (N, 3, 32, 32)
        pairs: (P, 2) ids.
    """
    differences = [torch.empty(0)]
    for block in pairs.split(_AT_ONCE):
        a, b = (_detail(small[block[:, side]]) for side in (0, 1))
        inner = a.shape[-1] - 2 * _SHIFT
        a = _standard(a[:, :, _SHIFT : _SHIFT + inner, _SHIFT : _SHIFT + inner])
        alike = torch.full((len(block),), -1.0)
        for view in (b, b.flip(-1)):
            for y in range(2 * _SHIFT + 1):
                for x in range(2 * _SHIFT + 1):
                    shifted = _standard(view[:, :, y : y + inner, x : x + inner])
                    alike = torch.maximum(alike, (a * shifted).sum((1, 2, 3)))
        differences.append((1 - alike).clamp(min=0))
    return torch.cat(differences)


def near_and_scenes(features: Mutual, looks: Mutual, small: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs (P, 2) of near copies and of scenes, how different their thumbnails are, and which are near copies.

    Looked at is what stands out among the features or among the blurred thumbnails: an encoder may have learned to
    tell copies apart, and a mirrored copy looks far away. Near copies must be close by their blurred thumbnails,
    which cannot tell two skies apart, and agree in detail, in which two brick walls do.
    """
    candidates = torch.cat([features.close(CANDIDATE), looks.close(CANDIDATE)])
    pairs = candidates.unique(dim=0) if len(candidates) else candidates
    differences = thumbnail_difference(small, pairs)
    apart = coarse_difference(small, pairs)
    near = (differences <= DIFFERENCE) & looks.would_stand_out(pairs, apart, CANDIDATE)
    scenes = {tuple(pair) for pair in features.close(SCENE).tolist()}
    listed = near | torch.tensor([tuple(pair) in scenes for pair in pairs.tolist()], dtype=torch.bool)
    return pairs[listed], differences[listed], near[listed]


def find_groups(
    hashes: Sequence[str],
    pairs: Tensor,
    differences: Tensor,
    near: Tensor,
    splits: Sequence[int],
    sizes: Sequence[int],
) -> list[Group]:
    """Equal pixels, and pairs that stand out, as groups: straddling ones first, then exact, near, same scene.

    Args:
        hashes: of each image's pixels; "" is equal to nothing.
        pairs: (P, 2), as `near_and_scenes` gives them, with
        differences: (P,) of their thumbnails, and
        near: (P,), whether they are near copies.
        splits: the number of each image's split; the last one is the test split where there are several.
        sizes: of each image, in pixels: the largest is kept, in a group that straddles the largest of the last split.
    """
    copies: list[tuple[int, int, float]] = []
    scenes: list[tuple[int, int, float]] = []
    first: dict[str, int] = {}
    for i, digest in enumerate(hashes):
        if digest and digest in first:
            copies.append((first[digest], i, _EXACT))
        first.setdefault(digest, i)
    for (i, j), difference, is_near in zip(pairs.tolist(), differences.tolist(), near.tolist(), strict=True):
        if not hashes[i] or hashes[i] != hashes[j]:
            (copies if is_near else scenes).append((i, j, difference))
    # Near copies and mere resemblance are not mixed: a chain of scenes must not swallow a pair of copies.
    of_copies = _joined(copies)
    taken = {i for members, _ in of_copies for i in members}
    of_scenes = _joined([link for link in scenes if link[0] not in taken and link[1] not in taken])
    made = []
    for number, (members, worst) in enumerate(of_copies + of_scenes):
        kind: Kind = "exact" if worst == _EXACT else "near" if number < len(of_copies) else "same scene"
        inside = {splits[i] for i in members}
        keepable = [i for i in members if splits[i] == max(inside)]
        keep = max(keepable, key=lambda i: (sizes[i], -i))
        others = [i for i in members if i != keep]
        made.append(Group([keep, *others], kind, max(worst, 0.0), len(inside) > 1))
    return sorted(made, key=lambda g: (not g.straddles, KINDS.index(g.kind), g.difference, min(g.members)))


def _joined(links: list[tuple[int, int, float]]) -> list[tuple[list[int], float]]:
    """Connected components with more than one member, ascending, and the largest value of a link within."""
    parent: dict[int, int] = {}

    def root(i: int) -> int:
        parent.setdefault(i, i)
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for i, j, _ in links:
        parent[root(i)] = root(j)
    members: dict[int, list[int]] = {}
    for i in sorted(parent):
        members.setdefault(root(i), []).append(i)
    worst: dict[int, float] = {}
    for i, _, value in links:
        worst[root(i)] = max(worst.get(root(i), _EXACT), value)
    return [(joined, worst[key]) for key, joined in members.items()]


def _closeness(pairs: Tensor, distances: Tensor, scale: Tensor) -> Tensor:
    return distances.clamp(min=_ROUNDING) / (scale[pairs[:, 0]] * scale[pairs[:, 1]]).sqrt()


def _detail(small: Tensor) -> Tensor:
    """Thumbnails less their own blur."""
    pixels = small.float()
    return pixels - F.avg_pool2d(pixels, 5, stride=1, padding=2, count_include_pad=False)


def _standard(pixels: Tensor) -> Tensor:
    """Pixels (B, C, h, w) less their mean, with norm 1; 0 where hardly anything is left."""
    centred = pixels - pixels.mean((1, 2, 3), keepdim=True)
    norm = centred.square().sum((1, 2, 3), keepdim=True).sqrt()
    return torch.where(norm > 1, centred / norm.clamp(min=1), 0.0)
