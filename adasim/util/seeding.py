"""Every random choice is a pure function of (seed, purpose, epoch, image id).

There is no generator whose state could be lost, copied into a worker or advanced by a different number of
ranks: a number is looked up by its name. `uniform` gives many at once; `seeded` lends one key to code that
draws from torch's own generator (torchvision transforms, stochastic depth).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # splitmix64's finaliser (Steele et al., 2014)


def key(seed: int, *parts: int | str) -> int:
    """A 63-bit number, a function of `seed` and `parts` alone.

    >>> key(0, "view", 3, 17) == key(0, "view", 3, 17) != key(0, "view", 3, 18)
    True
    """
    state = _mix((seed + 1) & _MASK)
    for part in parts:
        word = zlib.crc32(part.encode()) if isinstance(part, str) else part
        state = _mix((state * _GOLDEN + word + 1) & _MASK)
    return state >> 1


def uniform(seed: int, purpose: str, epoch: int, ids: Tensor, count: int = 1) -> Tensor:
    """`count` independent uniforms in [0, 1) for each image: float64, shape (len(ids), count)."""
    base = _signed(key(seed, purpose, epoch))
    words = ids.to(torch.int64)[:, None] * count + torch.arange(count, device=ids.device)  # (B, count)
    bits = _mix_tensor(_mix_tensor(words + base))
    return _shift(bits, 11).double() * 2.0**-53


def permutation(seed: int, purpose: str, epoch: int, n: int) -> Tensor:
    """A shuffle of 0..n-1, int64."""
    return uniform(seed, purpose, epoch, torch.arange(n))[:, 0].argsort(stable=True)


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seed torch's CPU generator for the length of the block, then give it back as it was."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(key)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MULTIPLIERS[0]) & _MASK
    x = ((x ^ (x >> 27)) * _MULTIPLIERS[1]) & _MASK
    return x ^ (x >> 31)


def _mix_tensor(x: Tensor) -> Tensor:
    """splitmix64's output function on int64 tensors, whose multiplication wraps as uint64's does."""
    x = x * _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(_MULTIPLIERS[0])
    x = (x ^ _shift(x, 27)) * _signed(_MULTIPLIERS[1])
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's `>>` copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
