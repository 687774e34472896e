"""An int8 copy of a matrix of rows, with a proven bound on the error of every inner product.

With mu a vector near the rows' mean and s a scale, each row is stored as codes a (int8, clipped) and

    z = mu + s a + e,      error = |e|,      reach = |s a|;

a query, with a scale of its own, as q = t b + f. The integers give q.z up to a constant per query, and

    |q.z - q.mu - s t (a.b)| = |q.e + f.(s a)| <= |q| error + |f| reach        (Cauchy-Schwarz).

Taking off the mean costs nothing (it moves all scores of a query alike) and is what keeps the bound tight
when features crowd around a common direction, as they do in every encoder. `error` is measured, not
estimated, so a clipped outlier only loosens its own row.
"""

from __future__ import annotations

import time
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from adasim.neighbors.arithmetic import U

_CHUNK = 1 << 14  # rows converted at once
_SAMPLE = 4096  # rows looked at to choose mean and scale
_LOWEST = torch.iinfo(torch.int32).min


class QuantizedRows:
    """int8 codes of (N, D) rows, for CPUs; `refresh` after many rows changed, `write` after a few."""

    def __init__(self, rows: Tensor) -> None:
        n, dim = rows.shape
        self.codes = torch.zeros(n, dim, dtype=torch.int8, device=rows.device)
        self.error = torch.zeros(n, device=rows.device)
        self.reach = torch.zeros(n, device=rows.device)
        self.row_norm = 0.0  # no row is longer
        self.refresh(rows)

    def refresh(self, rows: Tensor) -> None:
        """Choose mean and scale anew and convert every row."""
        step = max(1, len(rows) // _SAMPLE)
        sample = rows[::step].float()
        sample = sample[torch.isfinite(sample).all(1)]
        self.mean = sample.mean(0) if len(sample) else rows.new_zeros(rows.shape[1], dtype=torch.float32)
        self.scale = _best_scale(sample - self.mean)
        for start in range(0, len(rows), _CHUNK):
            part = slice(start, min(start + _CHUNK, len(rows)))
            self._convert(part, rows[part])
        self.pause = 0  # searches for which it is not tried

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Convert the rows that were just written at `ids`."""
        self._convert(ids, rows)

    def worth_trying(self) -> bool:
        """False where int8 is slow, and for a while after the bound pruned too little."""
        if self.pause:
            self.pause -= 1
            return False
        wide = self.codes.shape[1] > 1  # torch 2.6 has a wrong product of width 1 on CPUs
        return wide and int8_is_faster(self.codes.device, self.codes.shape[1])

    def failed(self) -> None:
        """The bound pruned too little: rest for the next searches, then try again."""
        self.pause = 31

    def _convert(self, where: slice | Tensor, rows: Tensor) -> None:
        centred = rows.float() - self.mean
        codes = (centred / self.scale).round_().clamp_(-127, 127)
        reach = codes * self.scale
        error = torch.linalg.vector_norm(centred - reach, dim=1)
        # The lines above round: relatively in the norms (D u), absolutely in the differences (a few u |z|).
        slack = 1 + 2 * (rows.shape[1] + 4) * U
        size = torch.linalg.vector_norm(centred, dim=1) + torch.linalg.vector_norm(self.mean)
        self.codes[where] = codes.to(torch.int8)
        self.error[where] = error * slack + 8 * U * size
        self.reach[where] = torch.linalg.vector_norm(reach, dim=1) * slack
        self.row_norm = max(self.row_norm, float(size.max()) * slack)


class Int8Product:
    """Products of int8 codes, exact in int32; the margin is the codes' own error. A `Product` of `search`."""

    one_pass = 32

    def __init__(self, q: Tensor, quantized: QuantizedRows) -> None:
        self.quantized = quantized
        scale = q.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
        codes = (q / scale).round_().clamp_(-127, 127)
        self.codes = codes.to(torch.int8)
        self.unit = scale.double() * quantized.scale
        self.norms = torch.linalg.vector_norm(q.double(), dim=1, keepdim=True)
        self.left_out = torch.linalg.vector_norm(
            q.double() - codes.double() * scale.double(), dim=1, keepdim=True
        )
        self.rounding = 4 * U * self.norms * quantized.row_norm  # of the score to fp32, on either side

    def scores(self, start: int, stop: int, width: int) -> Tensor:
        scores = torch._int_mm(self.codes, self.quantized.codes[start:stop].T)
        missing = width - scores.shape[1]
        return F.pad(scores, (0, missing), value=_LOWEST) if missing else scores

    def group_margins(self, start: int, stop: int, group: int) -> Tensor:
        error, reach = (
            F.pad(bound[start:stop], (0, -(stop - start) % group)).view(-1, group).amax(1)  # (groups,)
            for bound in (self.quantized.error, self.quantized.reach)
        )
        return self.norms * error + self.left_out * reach + self.rounding

    def margins(self, queries: Tensor, ids: Tensor) -> Tensor:
        pairs = self.norms[queries, 0] * self.quantized.error[ids]
        return pairs + self.left_out[queries, 0] * self.quantized.reach[ids] + self.rounding[queries, 0]


def _best_scale(centred: Tensor) -> float:
    """The scale with the least mean error on a sample: fine steps against clipped outliers."""
    largest = float(centred.abs().max()) if centred.numel() else 0.0
    if largest == 0.0:
        return 1.0
    scales = [largest / 127 * 2.0 ** (-i / 2) for i in range(12)]

    def mean_error(scale: float) -> float:
        codes = (centred / scale).round_().clamp_(-127, 127)
        return float(torch.linalg.vector_norm(centred - codes * scale, dim=1).mean())

    return min(scales, key=mean_error)


@lru_cache
def int8_is_faster(device: torch.device, dim: int) -> bool:
    """Measure once per device and width whether an int8 product beats fp32 by enough to pay for rescoring."""
    try:
        a8, b8 = (torch.ones(n, dim, dtype=torch.int8, device=device) for n in (128, 4096))
        torch._int_mm(a8, b8.T)
    except RuntimeError:  # this device or this width has no integer product
        return False
    a, b = a8.float(), b8.float()
    seconds: dict[str, list[float]] = {"int8": [], "fp32": []}
    for _ in range(5):
        for name in seconds:
            start = time.perf_counter()
            _ = torch._int_mm(a8, b8.T) if name == "int8" else a @ b.T
            seconds[name].append(time.perf_counter() - start)
    return min(seconds["int8"]) * 1.5 < min(seconds["fp32"])  # the rounds least disturbed by others
