"""Duplicates: equal pixels, pictures whose detail agrees once aligned, scenes that the encoder finds alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn import functional as F

from adasim.explore.align import SIDE, Aligned, align, unframed
from adasim.explore.support import Nearest, nearest_others, unit_rows
from adasim.neighbors.search import search
from adasim.util.terminal import progress_bar

Kind = Literal["exact", "near", "same scene"]
KINDS: tuple[Kind, ...] = ("exact", "near", "same scene")

CANDIDATES = 5
"""Nearest images of each, by features and by their coarse looks, that may be copies."""
_SURROUNDINGS = 10  # a distance is measured in parts of the distances to both images' neighbours of this rank
_BY_FEATURES, _BY_LOOKS = 0.9, 0.6  # closer than this, in such parts, are candidates
DETAIL, DETAIL_CHANGED = 0.7, 0.85
"""The least correlation of detail of near copies; and of those that are mirrored, inverted, turned or scaled: so many
ways are tried that strangers agree in some."""
SCENE = 0.55
"""Pairs that are closer than this by features, in parts of their surroundings, and far closer than others, show the
same scene."""
CLEARLY = 0.4
"""By how much a near copy's correlation, as Fisher's z, exceeds the best one with a later neighbour."""
_LATER, _LAST = 5, 30  # places of later neighbours, every other of which is looked at
_SURE = 0.97  # a correlation that copies alone have
_AT_ONCE = 4096
_EXACT = 2.0  # in place of a score


class Link(NamedTuple):
    """Two images of a group."""

    score: float
    how: str
    i: int
    j: int


@dataclass(frozen=True)
class Pairs:
    """Pairs that show the same."""

    ids: Tensor
    """(P, 2), the smaller one first."""
    score: Tensor
    """(P,): how well their detail agrees, up to 1."""
    near: Tensor
    """(P,): whether it agrees well enough for near copies; the others are the same scene to the encoder."""
    how: list[str]
    """What was done to one of them, in words."""


@dataclass(frozen=True)
class Group:
    """Images that show the same, the first one to be kept."""

    members: list[int]
    kind: Kind
    score: float
    """The least score of the links that hold the group together; 1 for equal pixels."""
    straddles: bool
    """Whether some are in one split and some in another."""
    how: str = ""
    """What was done to the copy with that score."""


def find_pairs(nearest: Nearest, small: Tensor) -> Pairs:
    """Near copies and scenes among the nearest images.

    Candidates are close for where they are, by features or by their coarse looks without colour: an encoder may
    tell copies apart, and a mirrored copy looks far away. They are aligned, and their detail is compared, in which
    two skies or two cars differ; it must agree well, and stand out (`stands_out`). No threshold is taken from the
    candidates themselves, so that copies are found however many there are.

    Args:
        nearest: by features.
        small: (N, 3, 32, 32) uint8.
    """
    grey = torch.cat([part.float().mean(1, keepdim=True) for part in small.split(_AT_ONCE)])
    inner, framed = unframed(grey)
    by_features, closeness, mutual = close_pairs(nearest, math.inf, surroundings(nearest))
    looks = coarse_looks(inner)
    by_looks = nearest_others(looks, _SURROUNDINGS)
    scale = surroundings(by_looks)
    similarities, opposite = search(unit_rows(-looks), unit_rows(looks), 1)  # inverted copies
    inverted = Nearest(1 - similarities, opposite)
    alike = [close_pairs(of, _BY_LOOKS, scale)[0] for of in (by_looks, inverted)]
    everything = torch.cat([by_features[closeness < _BY_FEATURES], *alike, _of_framed(inner, grey, framed)])
    ids = everything.unique(dim=0)
    with progress_bar("copies", len(ids)) as advance:
        found = align(inner, ids, advance)
    near = found.detail >= torch.where(found.changed(), DETAIL_CHANGED, DETAIL)
    near[near.clone()] = stands_out(inner, ids[near], found.detail[near], nearest)
    key = torch.tensor([len(grey), 1])
    others = mutual & ~torch.isin(by_features @ key, ids[near] @ key)
    limit = min(SCENE, far_below(closeness[others]))
    listed = near | torch.isin(ids @ key, by_features[others & (closeness < limit)] @ key)
    how = [
        in_words(found, int(n), small[ids[n]], framed[ids[n]]) if near[n] else ""
        for n in listed.nonzero()[:, 0]
    ]
    return Pairs(ids[listed], found.detail[listed].clamp(0, 1), near[listed], how)


def stands_out(grey: Tensor, pairs: Tensor, detail: Tensor, nearest: Nearest) -> Tensor:
    """(P,): whether pairs agree clearly better than their images agree with later neighbours.

    Drawn patterns and plain things agree without being copies: whatever is aligned with them does. A later neighbour
    that is a copy itself must not count, however many copies an image has. So the last neighbours, of which hardly
    any is one, and pairs that agree beyond doubt tell first which images belong together; then all later neighbours
    count that do not belong to the image's own group.
    """
    images, place = pairs.unique(return_inverse=True)  # place: (P, 2)
    later = nearest.ids[images, _LATER:_LAST:2]  # (n, R)
    if not later.numel():
        return torch.ones(len(pairs), dtype=torch.bool)
    asked = torch.stack([images[:, None].expand_as(later), later], 2)
    known = later >= 0
    usual = torch.zeros(later.shape)
    with progress_bar("copies beside later neighbours", int(known.sum())) as advance:
        usual[known] = align(grey, asked[known], advance).detail

    def clear(counted: Tensor) -> Tensor:
        """With the best of each image's neighbours that count, (n, R), but for the pair itself."""
        other = later[place] == pairs.flip(1)[:, :, None]  # (P, 2, R)
        best = (usual * counted)[place].masked_fill(other, 0).amax((1, 2))
        return _fisher(detail) - _fisher(best) >= CLEARLY

    sure = usual >= _SURE
    last = torch.arange(later.shape[1]) * 2 + _LATER >= _SURROUNDINGS * 2
    together = [pairs[clear(last & ~sure) | (detail >= _SURE)], asked[sure]]
    group = _components(torch.cat(together), len(grey))
    return clear(known & (group[later] != group[images][:, None]))


def _fisher(correlation: Tensor) -> Tensor:
    return correlation.clamp(0, 0.9999).atanh()


def _components(pairs: Tensor, count: int) -> Tensor:
    """(count,): the number of the connected component that each image belongs to."""
    i, j = pairs.T.numpy()
    graph = csr_matrix((np.ones(len(pairs)), (i, j)), shape=(count, count))
    return torch.from_numpy(connected_components(graph, directed=False)[1]).long()


def surroundings(nearest: Nearest) -> Tensor:
    """(N,): the distance of each image to its tenth neighbour, or half the usual one, where ten others are copies.

    How close is close differs between encoders and between dense and sparse regions: distances are measured in parts
    of this.
    """
    if not nearest.ids.shape[1]:
        return torch.ones(len(nearest.ids))
    far = nearest.distances[:, :_SURROUNDINGS].masked_fill(nearest.ids[:, :_SURROUNDINGS] < 0, 0).amax(1)
    known = far[nearest.ids[:, 0] >= 0]
    return far.clamp(min=max(1e-6, float(known.median()) / 2) if len(known) else 1e-6)


def close_pairs(nearest: Nearest, closer: float, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs (P, 2) of images and their first neighbours that are close for where they are; how close (P,); and
    whether each is among the other's first (P,)."""
    other, count = nearest.ids[:, :CANDIDATES], len(nearest.ids)
    own = torch.arange(count)[:, None].expand_as(other)
    closeness = nearest.distances[:, :CANDIDATES] / (scale[own] * scale[other.clamp(min=0)]).sqrt()
    close = (other >= 0) & (other != own) & (closeness < closer)
    pairs = torch.stack([torch.minimum(own, other), torch.maximum(own, other)], 2)[close]
    keys, place, times = (pairs[:, 0] * count + pairs[:, 1]).unique(return_inverse=True, return_counts=True)
    closest = torch.empty(len(keys)).index_copy_(0, place, closeness[close])
    return torch.stack([keys // count, keys % count], 1), closest, times == 2


def far_below(closeness: Tensor) -> float:
    """Four robust standard deviations below the median, on a logarithmic scale; 0 without any."""
    if not len(closeness):
        return 0.0
    logs = closeness.clamp(min=1e-6).log()
    deviation = 1.4826 * (logs - logs.median()).abs().median()
    return float((logs.median() - 4 * deviation).exp())


def coarse_looks(grey: Tensor) -> Tensor:
    """Pictures (N, 1, 32, 32) as unit vectors (N, 64), blurred, without brightness and contrast; NaN if plain."""
    blurred = F.avg_pool2d(grey, 6, stride=4, padding=1, count_include_pad=False).flatten(1)
    centred = blurred - blurred.mean(1, keepdim=True)
    norm = centred.norm(dim=1, keepdim=True)
    return torch.where(norm > 8, centred / norm.clamp(min=1), torch.nan)


def _of_framed(inner: Tensor, grey: Tensor, framed: Tensor) -> Tensor:
    """(P, 2): pictures that had a frame, and those whose middle looks like what is left of them."""
    ids = framed.nonzero()[:, 0]
    if not len(ids):
        return torch.empty(0, 2, dtype=torch.int64)
    middle = F.interpolate(grey[:, :, 4:-4, 4:-4], (SIDE, SIDE), mode="bilinear", align_corners=False)
    looks = unit_rows(coarse_looks(middle))
    found = search(unit_rows(coarse_looks(inner[ids])), looks, min(CANDIDATES, len(grey)))[1]
    own = ids[:, None].expand_as(found)
    pairs = torch.stack([torch.minimum(own, found), torch.maximum(own, found)], 2)
    return pairs[(found >= 0) & (found != own)]


def in_words(found: Aligned, n: int, pictures: Tensor, framed: Tensor) -> str:
    """What was done to one picture of pair n to make the other, as far as the alignment tells."""
    (a, b), (c, d) = found.warp[n].tolist()
    mirrored = a * d - b * c < 0
    if mirrored:
        a, b = -a, -b
    across, down = math.hypot(a, c), math.hypot(b, d)
    cut = min(across * down, 1 / max(across * down, 1e-6)) ** 0.5
    turn = abs(math.degrees(math.atan2(c - b, a + d)))
    grey = [float((picture.float() - picture.float().mean(0)).abs().mean()) for picture in pictures]
    words = [
        "mirrored" if mirrored else "",
        "inverted" if found.inverted[n] else "",
        "framed" if framed[0] != framed[1] else "",
        "without colour" if min(grey) < 1 < 4 < max(grey) else "",
        f"turned by {turn:.0f} degrees" if turn > 3 else "",
        f"cut to {cut:.0%}" if cut < 0.96 and framed[0] == framed[1] else "",
        "stretched" if max(across, down) > 1.08 * min(across, down) else "",
    ]
    return ", ".join(filter(None, words))


def find_groups(
    hashes: Sequence[str], pairs: Pairs, splits: Sequence[int], sizes: Sequence[int]
) -> list[Group]:
    """Equal pixels and pairs as groups: straddling ones first, then exact, near, same scene, each by score.

    Args:
        hashes: of each image's pixels; "" is equal to nothing, and in no group.
        splits: the number of each image's split; the last one is the test split where there are several.
        sizes: of each image, in pixels: the largest is kept, in a group that straddles the largest of the last split.
    """
    copies: list[Link] = []
    scenes: list[Link] = []
    first: dict[str, int] = {}
    for i, digest in enumerate(hashes):
        if digest and digest in first:
            copies.append(Link(_EXACT, "", first[digest], i))
        first.setdefault(digest, i)
    found = zip(pairs.ids.tolist(), pairs.score.tolist(), pairs.how, pairs.near.tolist(), strict=True)
    for (i, j), score, how, is_near in found:
        if hashes[i] and hashes[j] and hashes[i] != hashes[j]:  # given features may know an unreadable image
            (copies if is_near else scenes).append(Link(score, how, i, j))
    # Near copies and mere resemblance are not mixed: a chain of scenes must not swallow a pair of copies.
    of_copies = _joined(copies, len(hashes))
    taken = {i for members, _ in of_copies for i in members}
    of_scenes = _joined([link for link in scenes if not {link.i, link.j} & taken], len(hashes))
    made = []
    for number, (members, worst) in enumerate(of_copies + of_scenes):
        kind: Kind = "exact" if worst.score == _EXACT else "near" if number < len(of_copies) else "same scene"
        inside = {splits[i] for i in members}
        keepable = [i for i in members if splits[i] == max(inside)]
        keep = max(keepable, key=lambda i: (sizes[i], -i))
        others = [i for i in members if i != keep]
        made.append(Group([keep, *others], kind, min(worst.score, 1.0), len(inside) > 1, worst.how))
    return sorted(made, key=lambda g: (not g.straddles, KINDS.index(g.kind), -g.score, min(g.members)))


def _joined(links: list[Link], count: int) -> list[tuple[list[int], Link]]:
    """Connected components with more than one member, ascending, and the link with the least score within."""
    group = _components(torch.tensor([(link.i, link.j) for link in links]).view(-1, 2), count).tolist()
    members: dict[int, set[int]] = {}
    worst: dict[int, Link] = {}
    for link in links:
        key = group[link.i]
        members.setdefault(key, set()).update((link.i, link.j))
        worst[key] = min(worst.get(key, link), link)
    found = [(sorted(joined), worst[key]) for key, joined in members.items()]
    return sorted(found, key=lambda of: of[0])
