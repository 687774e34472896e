"""The windowed distribution p_win of the paper, for many images at once.

From an image's w top-K lists, laid side by side as M = w K entries, come

    m_win(j) = (1/w) * sum of j's similarities over the lists;  absent counts as 0, the divisor is always w;
    support  = the K best j (ties to the smaller id), or all of them;
    p_win(j) = softmax over the support of m_win(j) / tau.

Similarities are fp16 values of at most 1, so all are multiples of 2^-24: sums are kept as integers in that
unit, exact in any order. Grouping is a sort of the M ids; sums are differences of one running total.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = 2.0**-24  # of the integer sums: the spacing of fp16's smallest numbers


def ranked_sums(ids: Tensor, similarities: Tensor, k: int | None) -> tuple[Tensor, Tensor]:
    """Each image's candidates, best first, with the sums of their similarities.

    Args:
        ids: (C, M) int32; -1 is padding. Within one list an id stands once.
        similarities: (C, M) fp16, at most 1 in size.
        k: how many candidates to keep; None keeps all.

    Returns:
        neighbours (C, S) int64, padded with -1, and sums (C, S) int64 in units of 2^-24, padded with 0.
    """
    C, M = ids.shape
    sorted_ids, position = _sort_ids(ids)
    units = similarities.float().mul_(1 / UNIT).int().gather(1, position)  # (C, M)
    running = units.view(-1).cumsum(0)  # int64, over all images: only its differences are used

    last = torch.ones(C, M, dtype=torch.bool)  # the last entry of each run of equal ids
    torch.ne(sorted_ids[:, 1:], sorted_ids[:, :-1], out=last[:, :-1])
    ends = last.view(-1).nonzero()[:, 0]
    candidates = sorted_ids.view(-1)[ends].long()
    sums = running[ends].diff(prepend=running.new_zeros(1))
    image = ends // M
    per_image = torch.bincount(image, minlength=C)
    column = torch.arange(len(ends)) - (per_image.cumsum(0) - per_image)[image]
    real = candidates >= 0
    image, column, candidates, sums = image[real], column[real], candidates[real], sums[real]

    width = int(per_image.max()) if C else 0
    keep = width if k is None else k
    # One integer orders by sum, then by column, and columns ascend with the ids. Sums are below 2^40 in size.
    keys = torch.full((C, max(width, keep)), torch.iinfo(torch.int64).min)
    table = torch.full((C, max(width, keep)), -1)
    keys[image, column] = (sums << 20) | ((1 << 20) - 1 - column)
    table[image, column] = candidates
    top, at = keys.topk(keep, dim=1)
    neighbours = table.gather(1, at)
    return neighbours, torch.where(neighbours >= 0, top >> 20, 0)


def softmax_of_sums(neighbours: Tensor, sums: Tensor, window: int, tau: float) -> Tensor:
    """p_win over the support, (C, S) fp64; padding gets 0."""
    logits = sums.double() * (UNIT / window / tau)
    logits = torch.where(neighbours >= 0, logits, -torch.inf)
    return torch.nan_to_num(logits.softmax(1), nan=0.0)  # an image that was never seen has no support


def _sort_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Ids of each row in ascending order, and where they stood; equal ids keep their order."""
    bits = (ids.shape[1] - 1).bit_length()
    if int(ids.max()) >> (31 - bits) == 0:  # id and position fit into one int32, which numpy sorts with SIMD
        keys = torch.add(torch.arange(ids.shape[1], dtype=torch.int32), ids, alpha=1 << bits)
        keys.numpy().sort(axis=1)
        return keys >> bits, (keys & ((1 << bits) - 1)).long()
    return ids.sort(dim=1, stable=True)
