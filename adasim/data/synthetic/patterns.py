"""Sixteen families of pattern, each a function of the plane.

Every function takes coordinates u, v (n, H, W) measured in periods of the pattern, and extra uniforms r (n,
R) for what else may vary within the family. It returns values around 0 whose sign tells ink from paper;
`synthetic` turns them into grey levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

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


def stripes(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    return (TURN * u).sin()


def checks(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    return 1.6 * (math.pi * u).sin() * (math.pi * v).sin()


def rings(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    return (TURN * (torch.hypot(u, v) + _each(r, 0))).sin()


def rays(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    return (_whole(r, 0, 6, 11) * torch.atan2(v, u)).sin()


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
    "stripes": (stripes, 1.6, 3.2),
    "checks": (checks, 2.0, 3.8),
    "rings": (rings, 1.6, 3.0),
    "rays": (rays, 1.0, 1.0),
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
