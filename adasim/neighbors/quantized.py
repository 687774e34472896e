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
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from adasim.neighbors.workspace import workspace

_CHUNK = 1 << 14  # rows converted at once
_SAMPLE = 4096  # rows looked at to choose mean and scale
_U = 2.0**-24  # unit roundoff of fp32
# CUDA's int8 product takes more than 16 queries, and widths and numbers of rows that are multiples of 8.
_ALIGN, _LEAST_QUERIES = 8, 32


class QuantizedRows:
    """int8 codes of (N, D) rows; `refresh` after many rows changed, `write` after a few."""

    def __init__(self, rows: Tensor) -> None:
        n, dim = rows.shape
        self._align = 1 if rows.device.type == "cpu" else _ALIGN
        # Where the device wants it, wider and longer by zeros, which add nothing to a product.
        self._padded = torch.zeros(
            _round_up(n, self._align), _round_up(dim, self._align), dtype=torch.int8, device=rows.device
        )
        self.codes = self._padded[:n, :dim]
        self.error = torch.zeros(n, device=rows.device)
        self.reach = torch.zeros(n, device=rows.device)
        self.row_norm = 0.0  # no row is longer
        self._pause = 0
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
        self.refreshed()

    def refreshed(self) -> None:
        """Forget that a bound pruned too little: the rows have changed."""
        self._pause = 0

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Convert the rows that were just written at `ids`."""
        self._convert(ids, rows)

    def encode_queries(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes (B, D) int8; the worth of one integer unit (B, 1) fp64; |f| (B, 1) fp64."""
        scale = q.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
        codes = (q / scale).round_().clamp_(-127, 127)
        left_out = torch.linalg.vector_norm(q.double() - codes.double() * scale.double(), dim=1, keepdim=True)
        return codes.to(torch.int8), scale.double() * self.scale, left_out

    def products_with(self, queries: Tensor) -> Callable[[int, int, Tensor | None], Tensor]:
        """A function of (start, stop, out): the int32 products (B, stop - start) of codes (B, D) with those rows'.

        `start` must be a multiple of 8 where the device is not a CPU. `out` is where to put them, if not None.
        """
        if self._align == 1:
            return lambda start, stop, out: _int8_product(queries, self.codes[start:stop].T, out)
        count = len(queries)
        more = max(_LEAST_QUERIES, _round_up(count, self._align)) - count
        queries = F.pad(queries, (0, self._padded.shape[1] - queries.shape[1], 0, more))

        def products(start: int, stop: int, out: Tensor | None) -> Tensor:
            rows = self._padded[start : start + _round_up(stop - start, self._align)]
            found = torch._int_mm(queries, rows.T)[:count, : stop - start]
            return found if out is None else out.copy_(found)

        return products

    def worth_trying(self) -> bool:
        """False where int8 is slow, and for a while after the bound pruned too little."""
        if self._pause:
            self._pause -= 1
            return False
        wide = self.codes.shape[1] > 1  # torch 2.6 has a wrong product of width 1 on CPUs
        return wide and int8_is_faster(self._padded.device, self._padded.shape[1])

    def failed(self) -> None:
        """The bound pruned too little: rest for the next searches, then try again."""
        self._pause = 31

    def _convert(self, where: slice | Tensor, rows: Tensor) -> None:
        centred = rows.float() - self.mean
        codes = (centred / self.scale).round_().clamp_(-127, 127)
        reach = codes * self.scale
        error = torch.linalg.vector_norm(centred - reach, dim=1)
        # The lines above round: relatively in the norms (D u), absolutely in the differences (a few u |z|).
        slack = 1 + 2 * (rows.shape[1] + 4) * _U
        size = torch.linalg.vector_norm(centred, dim=1) + torch.linalg.vector_norm(self.mean)
        self.codes[where] = codes.to(torch.int8)
        self.error[where] = error * slack + 8 * _U * size
        self.reach[where] = torch.linalg.vector_norm(reach, dim=1) * slack
        self.row_norm = max(self.row_norm, float(size.max()) * slack)


def _int8_product(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    """(B, T) int32 on a CPU."""
    if out is None or out.is_contiguous():
        return torch._int_mm(a, b, out=out) if out is not None else torch._int_mm(a, b)
    whole = workspace.empty("int8 product", (len(a), b.shape[1]), torch.int32, a.device)
    return out.copy_(torch._int_mm(a, b, out=whole))


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


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
            _synchronize(device)
            start = time.perf_counter()
            _ = torch._int_mm(a8, b8.T) if name == "int8" else a @ b.T
            _synchronize(device)
            seconds[name].append(time.perf_counter() - start)
    return min(seconds["int8"]) * 1.5 < min(seconds["fp32"])  # the rounds least disturbed by others


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
