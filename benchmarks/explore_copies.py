"""The explorer's duplicates: planted copies of every kind among photographs, and CIFAR-10's own copies.

    python benchmarks/explore_copies.py plant --data cifar10 --out planted
    adasim embed MODEL --data planted --size 96 --out planted.npz
    python benchmarks/explore_copies.py planted --data planted --features planted.npz
    python benchmarks/explore_copies.py crowds --data cifar10 --model MODEL
    python benchmarks/explore_copies.py cifar10 --data cifar10 --features all.npz --pairs duplicates_cifar10.csv

`crowds` has 1,500 photographs, a tenth, half or all of which have a copy as JPEG. `cifar10` explores all 60,000
images (`all.npz`: both splits, with `files` that begin with train/ and test/) and compares what it lists with the
pairs that the authors of ciFAIR judged (their meta/duplicates_cifar10.csv), with the processor time and memory taken.
"""

from __future__ import annotations

import argparse
import csv
import io
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from _report import report
from PIL import Image, ImageEnhance, ImageOps

from adasim.explore import page
from adasim.explore.duplicates import KINDS
from adasim.explore.map import coordinates
from adasim.explore.open import open_features
from adasim.options import ExploreOptions

EACH, PHOTOGRAPHS, CROWD = 100, 5400, 1500
Picture = Image.Image


def kinds(rng: random.Random) -> dict[str, Callable[[Picture], Picture]]:
    def jpeg(picture: Picture) -> Picture:
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=60)
        return Image.open(file).convert("RGB")

    def noise(picture: Picture) -> Picture:
        pixels = np.asarray(picture).astype(float)
        pixels += np.random.RandomState(rng.randrange(1 << 30)).normal(0, 10, pixels.shape)
        return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))

    def cut(share: float) -> Callable[[Picture], Picture]:
        def made(picture: Picture) -> Picture:
            (w, h), side = picture.size, round(picture.width * share)
            x, y = rng.randint(0, w - side), rng.randint(0, h - side)
            return picture.crop((x, y, x + side, y + side)).resize((w, h), Image.Resampling.BICUBIC)

        return made

    def stretched(picture: Picture) -> Picture:
        wide = picture.resize((round(picture.width * 1.2), picture.height), Image.Resampling.BICUBIC)
        x = (wide.width - picture.width) // 2
        return wide.crop((x, 0, x + picture.width, picture.height))

    def colour(picture: Picture) -> Picture:
        hue, saturation, value = picture.convert("HSV").split()
        hue = hue.point(lambda x: (x + 40) % 256)
        return Image.merge("HSV", (hue, saturation, value)).convert("RGB")

    def framed(picture: Picture) -> Picture:
        pixels = np.zeros_like(np.asarray(picture))
        pixels[3:-3, 3:-3] = np.asarray(picture)[3:-3, 3:-3]
        return Image.fromarray(pixels)

    return {
        "jpeg": jpeg,
        "mirrored": ImageOps.mirror,
        "64px": lambda picture: picture.resize((64, 64), Image.Resampling.BICUBIC),
        "noise": noise,
        "brighter": lambda picture: ImageEnhance.Brightness(picture).enhance(1.4),
        "crop90": cut(0.9),
        "crop80": cut(0.8),
        "stretched": stretched,
        "colour": colour,
        "grey": lambda picture: picture.convert("L").convert("RGB"),
        "inverted": ImageOps.invert,
        "turned": lambda picture: picture.rotate(15, Image.Resampling.BICUBIC),
        "framed": framed,
        "framed_inside": lambda picture: ImageOps.expand(picture, 3, (255, 255, 255)).resize(
            picture.size, Image.Resampling.BICUBIC
        ),
    }


def plant(data: Path, out: Path, seed: int) -> None:
    """Photographs NNNNN.png, and copies NNNNN~KIND.png of the first ones."""
    rng = random.Random(seed)
    lay_out(data, out, rng, PHOTOGRAPHS)
    for place, (kind, change) in enumerate(kinds(rng).items()):
        copy(out, kind, change, range(EACH * place, EACH * (place + 1)))


def lay_out(data: Path, out: Path, rng: random.Random, count: int) -> None:
    out.mkdir(parents=True)
    for n, file in enumerate(rng.sample(sorted(data.glob("train/*/*.png")), count)):
        Image.open(file).convert("RGB").save(out / f"{n:05d}.png")


def copy(out: Path, kind: str, change: Callable[[Picture], Picture], numbers: range) -> None:
    for n in numbers:
        change(Image.open(out / f"{n:05d}.png")).save(out / f"{n:05d}~{kind}.png")


def crowds(data: Path, model: str, seed: int) -> list[dict[str, Any]]:
    rows = []
    for share in (0.1, 0.5, 1.0):
        rng = random.Random(seed)
        with tempfile.TemporaryDirectory() as folder:
            images, features = Path(folder) / "images", Path(folder) / "features.npz"
            lay_out(data, images, rng, CROWD)
            copy(images, "jpeg", kinds(rng)["jpeg"], range(round(share * CROWD)))
            embed = [sys.executable, "-m", "adasim", "embed", model, "--data", str(images), "--size", "96"]
            subprocess.run([*embed, "--out", str(features)], check=True)
            row, *_ = planted(images, features)
        rows.append({"photographs with a copy": f"{share:.0%}", **row})
    return rows


def listed_as(found: page.Exploration) -> Callable[[int, int], str]:
    """How two images are listed together: exact, near, same scene or not at all."""
    group = {i: n for n, g in enumerate(found.findings.groups) for i in g.members}

    def kind(i: int, j: int) -> str:
        together = i in group and group[i] == group.get(j)
        return found.findings.groups[group[i]].kind if together else "missed"

    return kind


def planted(data: Path, features: Path) -> list[dict[str, Any]]:
    found = page.explore(open_features(features, str(data), ExploreOptions(), print))
    names, kind_of = found.collection.names, listed_as(found)
    place = {name: i for i, name in enumerate(names)}
    counts: dict[str, dict[str, int]] = {}
    for name, i in place.items():
        original, _, kind = name.removesuffix(".png").partition("~")
        if kind:
            row = counts.setdefault(kind, {"copy": 0, "scene": 0, "missed": 0})
            as_what = kind_of(place[f"{original}.png"], i)
            row[{"same scene": "scene", "missed": "missed"}.get(as_what, "copy")] += 1
    others = [
        sorted({names[i][:5] for i in group.members})
        for group in found.findings.groups
        if group.kind != "same scene"
    ]
    rows: list[dict[str, Any]] = [{"kind": kind, **row} for kind, row in counts.items()]
    rows.append({"kind": "groups of copies", "copy": len(others)})
    rows.append(
        {"kind": "of these with photographs that nobody planted", "copy": sum(len(o) > 1 for o in others)}
    )
    return rows


def cifar10(data: Path, features: Path, judged: Path) -> list[dict[str, Any]]:
    taken: dict[str, float] = {}

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        start = time.process_time()
        yield
        taken[what] = time.process_time() - start

    def place_points(*args: Any) -> Any:
        with timed("the map"):
            return coordinates(*args)

    with timed("all, to the page"), patch.object(page, "coordinates", place_points):
        with timed("neighbours"):
            opened = open_features(features, str(data), ExploreOptions(), print)
        found = page.explore(opened, print)
        with tempfile.TemporaryDirectory() as folder:
            page.write_page(Path(folder) / "page.html", found)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    place = {
        (name.partition("/")[0], int(Path(name).stem)): i for i, name in enumerate(found.collection.names)
    }
    kind_of = listed_as(found)
    rows: list[dict[str, Any]] = []
    with open(judged) as file:
        pairs = list(csv.DictReader(file))
    for judgment, words in (("1", "near pairs"), ("2", "very similar pairs")):
        those = [pair for pair in pairs if pair["Judgment"] == judgment]
        as_what = [
            kind_of(place["test", int(pair["TestID"])], place["train", int(pair["TrainID"])])
            for pair in those
        ]
        rows.append({"what": words, "count": len(those), **{k: as_what.count(k) for k in (*KINDS, "missed")}})
    for straddles, words in ((True, "groups in both splits"), (False, "other groups")):
        groups = [group for group in found.findings.groups if group.straddles == straddles]
        rows.append(
            {"what": words, "count": len(groups), **{k: sum(g.kind == k for g in groups) for k in KINDS}}
        )
    rows += [
        {"what": f"processor time of {what}, in seconds", "count": round(s)} for what, s in taken.items()
    ]
    rows.append({"what": "peak memory in GB", "count": round(memory, 2)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("plant", "planted", "crowds", "cifar10"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", help="as adasim embed takes it")
    parser.add_argument("--features", type=Path)
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--seed", type=int, default=21)
    args = parser.parse_args()
    if args.what == "plant":
        plant(args.data, args.out, args.seed)
    elif args.what == "planted":
        rows = planted(args.data, args.features)
        report("explore_copies", {"seed": args.seed, "each": EACH}, rows, "explore_copies", "planted")
    elif args.what == "crowds":
        rows = crowds(args.data, args.model, args.seed)
        report("explore_crowds", {"seed": args.seed, "images": CROWD}, rows, "explore_copies", "crowds")
    else:
        rows = cifar10(args.data, args.features, args.pairs)
        report("explore_cifar10", {"images": 60_000}, rows, "explore_copies", "cifar10")


if __name__ == "__main__":
    main()
