"""The synthetic data set: patterned pebbles, drawn by code, in any number and at any size.

An image is a pebble (a smooth closed outline) on plain ground. The pebble carries one of sixteen families of
pattern, and the family is the class. Rotation, period, position, outline, contrast, lighting and noise differ
from image to image and say nothing about the class; there is no colour at all. So whatever survives cropping,
flipping and a change of brightness is the class or a nuisance that images of all classes share.

Raw pixels are poor neighbours: with 3,000 training and 1,000 test images of 32 pixels, k-NN (k = 20, cosine)
reaches 15.6% (33.5% after taking off the mean image; chance is 6.25%), an untrained small ResNet 18%. The
class is there to be learned: the same ResNet (four blocks, width 16) reaches 98.6% in 40 epochs with labels,
under crops, flips and brightness jitter. What pretraining without them reaches: benchmarks/results/demo.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from adasim.data.images import ArrayImages
from adasim.registry import SOURCES
from adasim.util import seeding
from adasim.util.errors import UserError

TURN = 2 * math.pi
EXTRAS = 128  # uniforms per image that a family may use
_CELLS = 8  # the Voronoi cells have 8 x 8 seeds


def _each(r: Tensor, column: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """One uniform per image, stretched to [low, high), ready to broadcast over pixels: (n, 1, 1)."""
    return (low + (high - low) * r[:, column])[:, None, None]


def _whole(r: Tensor, column: int, low: int, high: int) -> Tensor:
    """One integer of low..high per image: (n, 1, 1)."""
    return _each(r, column, low, high + 1).floor()


def _centred(u: Tensor) -> Tensor:
    """Distance to the nearest whole number, signed, in [-1/2, 1/2]."""
    return u - u.round()


def spirals(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    hand = 2 * _whole(r, 0, 0, 1) - 1
    return (TURN * torch.hypot(u, v) + hand * _whole(r, 1, 2, 4) * torch.atan2(v, u)).sin()


def zigzag(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    tooth = 2 * _centred(v * _each(r, 0, 0.55, 0.75)).abs()  # a triangle wave in [0, 1]
    return (TURN * (u + _each(r, 1, 0.8, 1.2) * tooth)).sin()


def dots(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    return 3 * (_each(r, 0, 0.24, 0.34) - torch.hypot(_centred(u), _centred(v)))


def grid(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    return 4 * (torch.maximum(_centred(u).abs(), _centred(v).abs()) - _each(r, 0, 0.33, 0.4))


def bricks(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    row = (2 * v).floor()
    along = _centred(u + 0.5 * row.remainder(2)).abs()
    across = _centred(2 * v - 0.5).abs() / 2
    width = _each(r, 0, 0.07, 0.1)
    return 6 * torch.maximum(along - 0.5 + width, across - 0.25 + width)


def honeycomb(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    tall = math.sqrt(3)
    a, b = _centred(u), tall * _centred(v / tall)
    c, d = _centred(u - 0.5), tall * _centred(v / tall - 0.5)
    # Which of the two lattices has the nearest centre.
    first = a.square() + b.square() < c.square() + d.square()
    x, y = torch.where(first, a, c).abs(), torch.where(first, b, d).abs()
    return 5 * (torch.maximum(x, x / 2 + y * tall / 2) - _each(r, 0, 0.36, 0.42))


def triangles(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    half, tall = u / 2, v * math.sqrt(3) / 2
    return 2.5 * (math.pi * u).sin() * (math.pi * (half + tall)).sin() * (math.pi * (half - tall)).sin()


def weave(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    over = (u.floor() + v.floor()).remainder(2) == 0
    return (TURN * 2.5 * torch.where(over, u, v)).sin()


def crosses(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    a, b = _centred(u), _centred(v)
    x, y = (a + b).abs() * math.sqrt(0.5), (a - b).abs() * math.sqrt(0.5)
    thick, long = _each(r, 0, 0.09, 0.13), _each(r, 1, 0.36, 0.44)
    bar = torch.minimum(torch.maximum(x - thick, y - long), torch.maximum(y - thick, x - long))
    return -6 * bar


def scales(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    row = (2 * v).floor()
    value = torch.zeros_like(u)
    open_ = torch.ones_like(u, dtype=torch.bool)
    for back in (0, 1, 2):  # the lowest disc that reaches a point hides the others
        this = row - back
        centre = 0.5 * this.remainder(2)
        distance = torch.hypot(_centred(u - centre), v - this / 2)
        inside = open_ & (distance < 0.55)
        value = torch.where(inside, (2.2 * TURN * distance).cos(), value)
        open_ = open_ & ~inside
    return value


def cells(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    n, count = len(r), _CELLS * _CELLS
    place = torch.arange(count)
    seeds = torch.stack([place % _CELLS, place // _CELLS], 1) - (_CELLS - 1) / 2.0  # (64, 2), a grid
    seeds = seeds + 0.8 * (r[:, : 2 * count].reshape(n, count, 2) - 0.5)
    nearest = torch.full_like(u, 1e9)
    second = nearest.clone()
    for a, b in seeds[..., None, None].permute(1, 2, 0, 3, 4):  # (n, 1, 1) each
        distance = (u - a).square() + (v - b).square()
        second = torch.minimum(second, torch.maximum(nearest, distance))
        nearest = torch.minimum(nearest, distance)
    return 5 * (0.16 - (second.sqrt() - nearest.sqrt()))


def labyrinth(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    waves = 9
    total = torch.zeros_like(u)
    for i in range(waves):  # plane waves of one length in all directions: what a Turing pattern is made of
        angle = math.pi * (i + _each(r, 2 * i)) / waves
        total += (TURN * (u * angle.cos() + v * angle.sin() + _each(r, 2 * i + 1))).sin()
    return total


FAMILIES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], float, float]] = {
    # name: (function, fewest and most periods in half an image's width)
    "stripes": (lambda u, v, r: (TURN * u).sin(), 1.6, 3.2),
    "checks": (lambda u, v, r: 1.6 * (math.pi * u).sin() * (math.pi * v).sin(), 2.0, 3.8),
    "rings": (lambda u, v, r: (TURN * (torch.hypot(u, v) + _each(r, 0))).sin(), 1.6, 3.0),
    "rays": (lambda u, v, r: (_whole(r, 0, 6, 11) * torch.atan2(v, u)).sin(), 1.0, 1.0),
    "spirals": (spirals, 1.0, 2.0),
    "zigzag": (zigzag, 1.5, 2.5),
    "dots": (dots, 1.5, 2.8),
    "grid": (grid, 1.3, 2.4),
    "bricks": (bricks, 1.0, 1.7),
    "honeycomb": (honeycomb, 1.2, 2.2),
    "triangles": (triangles, 1.3, 2.4),
    "weave": (weave, 0.8, 1.3),
    "crosses": (crosses, 1.1, 1.9),
    "scales": (scales, 1.1, 1.9),
    "cells": (cells, 1.2, 2.2),
    "labyrinth": (labyrinth, 1.4, 2.6),
}


COUNT = 10_000
"""Training images of the source `synthetic` where no number is given."""
_CHUNK = 1024  # images drawn at a time: bounds the memory, keeps the work in the processor's caches


class SyntheticImages(ArrayImages):
    """Greyscale images with labels, and masks: 0 is ground, class + 1 the pebble."""

    labels: Tensor
    masks: Tensor


def synthetic(count: int, size: int = 32, split: str = "train", seed: int = 0) -> SyntheticImages:
    """Draw `count` images of `size` pixels, uint8 (count, 1, size, size), with labels and masks.

    Image i is a pure function of (seed, split, i): a longer data set begins with the shorter one.

    >>> tuple(synthetic(64).images.shape)
    (64, 1, 32, 32)
    """
    if count < 1:
        raise UserError(f"synthetic: count={count} must be at least 1.")
    labels = _labels(seed, split, count)
    images = torch.empty(count, 1, size, size, dtype=torch.uint8)
    masks = torch.empty(count, size, size, dtype=torch.uint8)
    for ids in torch.arange(count).split(_CHUNK):
        images[ids, 0], masks[ids] = _draw(seed, split, ids, labels[ids], size)
    return SyntheticImages(f"synthetic-{split}", images, labels, list(FAMILIES), masks)


@SOURCES.register("synthetic")
def open_synthetic(count: str, *, size: int, split: str, seed: int) -> SyntheticImages:
    """`synthetic[:COUNT]`: as many training images, and a fifth of that as test images."""
    if count and not (count.isdecimal() and int(count)):
        raise UserError(
            f"synthetic:{count}: the count must be a whole number above 0, as in --data synthetic:5000."
        )
    number = int(count) if count else COUNT
    if split == "test":  # a fifth, but enough for a figure to mean something
        number = max(256, number // 5)
    images = synthetic(number, size, split, seed)
    images.place = f"synthetic{':' if count else ''}{count} (generated patterns, no photographs)"
    return images


def _purpose(split: str, what: str) -> str:
    """Names a random choice. The word is the data set's former name: with another, every image would be another."""
    return f"embedded {split} {what}"


def _labels(seed: int, split: str, count: int) -> Tensor:
    """Every run of sixteen images holds each class once, in an order of its own."""
    blocks = torch.arange(-(-count // len(FAMILIES)))
    order = seeding.uniform(seed, _purpose(split, "label"), 0, blocks, len(FAMILIES)).argsort(1)
    return order.flatten()[:count].clone()


def _draw(seed: int, split: str, ids: Tensor, labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Images and masks of these ids, uint8 (n, size, size) each."""

    def draw(purpose: str, count: int) -> Tensor:
        return seeding.uniform(seed, _purpose(split, purpose), 0, ids, count).float()

    axis = (torch.arange(size) + 0.5) * (2 / size) - 1
    y, x = (a[None] for a in torch.meshgrid(axis, axis, indexing="ij"))  # (1, size, size), in [-1, 1]
    inside = _outline(x, y, draw("outline", 9), 2 / size)
    shade = _shade(x, y, labels, draw("pattern", 4), draw("extras", EXTRAS))

    r = draw("light", 6)[:, :, None, None]
    contrast = 0.16 + 0.16 * r[:, 0]
    stone = 0.5 + 0.1 * (r[:, 1] - 0.5) + contrast * shade
    ground = 0.3 + 0.4 * r[:, 2]
    angle = TURN * r[:, 3]
    light = 1 + 0.35 * r[:, 4] * (x * angle.cos() + y * angle.sin())
    noise = (0.04 + 0.1 * r[:, 5]) * (draw("noise", size * size).view(-1, size, size) - 0.5)
    image = (ground + inside * (stone - ground)) * light + noise
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8)
    masks = (inside > 0.5).to(torch.uint8) * (labels[:, None, None] + 1).to(torch.uint8)
    return pixels, masks


def _outline(x: Tensor, y: Tensor, r: Tensor, pixel: float) -> Tensor:
    """How much of each pixel the pebble covers, in [0, 1]."""
    r = r[:, :, None, None]
    dx, dy = x - 0.2 * (r[:, 0] - 0.5), y - 0.2 * (r[:, 1] - 0.5)
    angle = torch.atan2(dy, dx)
    radius = 0.8 + 0.3 * r[:, 2]
    wobble = torch.zeros_like(angle)
    for i, waves in enumerate((2, 3, 4)):
        wobble = wobble + 0.16 / waves * r[:, 3 + 2 * i] * (waves * angle + TURN * r[:, 4 + 2 * i]).cos()
    return ((radius * (1 + 2 * wobble) - torch.hypot(dx, dy)) / pixel + 0.5).clamp(0, 1)


def _shade(x: Tensor, y: Tensor, labels: Tensor, r: Tensor, extras: Tensor) -> Tensor:
    """The pattern of each image's class, turned, scaled and shifted, in [-1, 1]: (n, size, size)."""
    shade = torch.empty(len(labels), *x.shape[1:])
    for label, (family, low, high) in enumerate(FAMILIES.values()):
        rows = (labels == label).nonzero()[:, 0]
        if not len(rows):
            continue
        mine = r[rows][:, :, None, None]
        angle = TURN * mine[:, 0]
        periods = low * (high / low) ** mine[:, 1]
        dx, dy = x - 0.8 * (mine[:, 2] - 0.5), y - 0.8 * (mine[:, 3] - 0.5)
        u = periods * (dx * angle.cos() + dy * angle.sin())
        v = periods * (dy * angle.cos() - dx * angle.sin())
        shade[rows] = (2 * family(u, v, extras[rows])).tanh()
    return shade
