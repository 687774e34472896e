"""A small folder with everything in it that the explorer must cope with, explored by given features."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from adasim.data.synthetic import synthetic
from adasim.explore.collection import Collection
from adasim.explore.open import Opened, open_collection
from adasim.explore.page import Exploration, explore, write_page
from adasim.explore.support import Support, nearest_others, support_of_features

HOSTILE = [
    "<img src=x onerror=window.pwned=1>.png",
    "=HYPERLINK(1+1).png",
    "'quoted', \"twice\".png",
    "@@SCRIPT@@.png",
    "javascript:window.pwned=1.png",
    "\u202egnp.exe.png",
    "two\nlines\u2028.png",
    "100% #1?.png",
]
"""File names that others may have chosen."""


@dataclass
class Explored:
    data: Path
    page: Path
    found: Exploration
    features: torch.Tensor


def make_folder(root: Path, per_class: int = 12) -> Path:
    """train/ and test/ with four classes of generated images; copies, a leak, a wrong label, and hostile names."""
    drawn = synthetic(400, size=32, seed=1)
    classes = ["blue", "<", "__proto__", "+1"]
    for split, count in (("train", per_class), ("test", 4)):
        for c, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            members = (drawn.labels == c).nonzero()[:, 0].tolist()
            for n, i in enumerate(members[:count] if split == "train" else members[-count:]):
                _save(root / split / name / f"{n:02d}.png", drawn.load(i))
    first = (root / "train" / "blue" / "00.png").read_bytes()
    (root / "test" / "blue" / "leak.png").write_bytes(first)
    (root / "train" / "+1" / "wrong.png").write_bytes((root / "train" / "blue" / "01.png").read_bytes())
    (root / "train" / "<" / "script>alert(1)<!--.png").write_bytes(first)  # a path with "</script>" in it
    for n, name in enumerate(HOSTILE):
        _save(root / "train" / "blue" / name, drawn.load(200 + n))
    with open(os.fsencode(root / "train" / "blue") + b"/bytes-\xff.png", "wb") as file:
        file.write(first)
    (root / "train" / "blue" / "torn.png").write_bytes(first[:60])
    return root


def explored(
    folder: Path, *, labels: bool = True, inline_bytes: int = 25_000_000, data: Path | None = None
) -> Explored:
    """The folder above, and the page of it; neighbours from features that know the class, and a little more."""
    data = data or make_folder(folder / "data")
    collection = open_collection(str(data), size=32, say=print)
    if not labels:
        collection.labels, collection.classes = None, []
    generator = torch.Generator().manual_seed(0)
    known = open_collection(str(data), size=32, say=print).labels
    assert known is not None
    features = torch.eye(4)[known].repeat(1, 2) + 0.4 * torch.randn(len(collection), 8, generator=generator)
    return Explored(data, *_explore(folder, collection, features, inline_bytes), features)


def _explore(
    folder: Path, collection: Collection, features: torch.Tensor, inline: int
) -> tuple[Path, Exploration]:
    support = support_of_features(nearest_others(features), k=6)
    # Some images match another one best, as they may in a run.
    swapped = torch.arange(0, len(collection), 5)
    neighbours = support.neighbours.clone()
    neighbours[swapped, 0], neighbours[swapped, 1] = (
        support.neighbours[swapped, 1],
        support.neighbours[swapped, 0],
    )
    found = explore(Opened(collection, Support(neighbours, support.p), features, "features of the tests"))
    page = folder / "page.html"
    write_page(page, found, inline_bytes=inline)
    return page, found


def _save(path: Path, pixels: torch.Tensor) -> None:
    Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())).save(path)
