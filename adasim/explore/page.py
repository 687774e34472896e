"""The page of `adasim explore`: `explore` collects all that can be found out about some images, `write_page` puts it
into one file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from adasim.data import ImageSet
from adasim.explore.collection import Collection
from adasim.explore.hunts import Findings, hunt
from adasim.explore.lists import Table, tables
from adasim.explore.looks import Looks, look
from adasim.explore.map import coordinates
from adasim.explore.open import Opened, Say, find_nearest
from adasim.explore.support import Support
from adasim.tools.outputs import SHEET_NAME, sheets_folder
from adasim.util.files import atomic_write, remove_leftovers
from adasim.util.terminal import printable, progress_bar

PAGE_SUPPORT = 12
"""Neighbours of each image on the page."""
INLINE_BYTES = 25_000_000
"""A page that would be larger than this has its thumbnails beside it."""
_SCRIPTS = (
    *("data", "dom", "verdicts", "files", "feed", "threshold", "bulk", "look", "filters"),
    *("overview", "lists", "neighbours", "points", "regions", "map", "main"),
)
_BINS = 20


@dataclass
class Exploration:
    """Everything that was found out about some images."""

    collection: Collection
    support: Support
    looks: Looks
    findings: Findings
    tables: dict[str, Table]
    source: str
    """What the images are, in words."""
    origin: str
    """Where the supports come from, in words."""
    windowed: bool = True
    remembered: int = 0
    """How many images, the first ones, could become anybody's neighbour."""
    map: Tensor = field(default_factory=lambda: torch.empty(0, 2))
    """(N, 2): where each image lies on the map; NaN where it lies nowhere."""


def explore(opened: Opened, say: Say = lambda sentence: None) -> Exploration:
    """Look at every image once, then run all hunts."""
    collection = opened.collection
    with progress_bar("thumbnails", len(collection)) as advance:
        looks = look(collection.sets, advance)
    if looks.unreadable:
        some = next(iter(looks.unreadable.values()))
        say(f"{len(looks.unreadable):,} images cannot be read and have no thumbnail, as {some}.")
    remembered = len(collection) if opened.remembered is None else opened.remembered
    nearest = opened.nearest or find_nearest(opened.features)
    findings = hunt(opened, looks, nearest)
    sets = collection.sets
    source = sets[0].place or sets[0].name
    if sets[0].split and sets[0].place.endswith(sets[0].split):
        source = source.removesuffix(sets[0].split).rstrip("/")
    return Exploration(
        collection=collection,
        support=opened.support,
        looks=looks,
        findings=findings,
        tables=tables(collection, opened.support, findings),
        source=source,
        origin=opened.origin,
        windowed=opened.windowed,
        remembered=remembered,
        map=coordinates(opened.features, nearest),
    )


# ---- the page ----


def write_page(page: Path, explored: Exploration, *, inline_bytes: int = INLINE_BYTES) -> list[Path]:
    """Write the page, with its thumbnails beside it if it were larger than `inline_bytes`; returns what there is."""
    folder = sheets_folder(page)
    sheets = explored.looks.sheets
    html = render(explored, page, None)
    beside = len(html) + sum(4 * -(-len(sheet) // 3) + 3 for sheet in sheets) > inline_bytes
    if beside:
        folder.mkdir(exist_ok=True)
        for number, sheet in enumerate(sheets):
            atomic_write(folder / _sheet_name(number), sheet)
    atomic_write(page, html if beside else render(explored, page, sheets))
    # What an earlier page had beside it, or a killed command left, goes last.
    remove_leftovers(folder)
    needed = {_sheet_name(number) for number in range(len(sheets) if beside else 0)}
    for path in folder.iterdir() if folder.is_dir() else ():
        if SHEET_NAME.fullmatch(path.name) and path.name not in needed:
            path.unlink()
    if not beside and folder.is_dir():
        folder.rmdir()
    return [page, folder] if beside else [page]


def render(explored: Exploration, page: Path, sheets: list[bytes] | None) -> bytes:
    """The whole page; without `sheets` it looks for them beside it."""
    templates = files("adasim.explore") / "page"
    script = "\n".join((templates / f"{name}.js").read_text("utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    style = (templates / "style.css").read_text("utf-8")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "img-src 'self' file: blob: data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    parts = {
        "POLICY": policy,
        "STYLE": style,
        "SCRIPT": script,
        "DATA": as_json(payload(explored, page, sheets)),
    }
    html = (templates / "index.html").read_text("utf-8")
    # In one go: what is put in is not searched again.
    return re.sub(r"@@([A-Z]+)@@", lambda match: parts[match[1]], html).encode()


def as_json(value: Any) -> str:
    """JSON in ASCII that can stand within a script element: no `<`, no `&`, no line separators."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def payload(explored: Exploration, page: Path, sheets: list[bytes] | None) -> dict[str, Any]:
    """What the page knows. Numbers that every image has are packed; lists are text, as they are exported."""
    collection, support, looks, labels = (
        explored.collection,
        explored.support,
        explored.looks,
        explored.findings.labels,
    )
    neighbours, p = support.neighbours[:, :PAGE_SUPPORT], support.p[:, :PAGE_SUPPORT]
    bases = [_base(images, page) for images in collection.sets]
    return {
        "source": printable(explored.source),
        "origin": printable(explored.origin),
        "windowed": explored.windowed,
        "remembered": explored.remembered,
        "fingerprint": collection.fingerprint(),
        "count": len(collection),
        "train": len(collection.sets[0]),
        "splits": collection.splits,
        "classes": collection.classes,
        "names": collection.names,
        "labels": None if collection.labels is None else _packed(collection.labels, "<i4"),
        "widths": _packed(looks.sizes[:, 1], "<u4"),
        "heights": _packed(looks.sizes[:, 0], "<u4"),
        "sizes": _sizes(looks),
        "unreadable": len(looks.unreadable),
        "bases": bases,
        "unlinked": [
            i for i, name in enumerate(collection.names) if "\\" in name
        ],  # escaped: not the file's own name
        "support": {
            "width": neighbours.shape[1],
            "ids": _packed(neighbours, "<i4"),
            "p": _packed((p * 65535).round(), "<u2"),
        },
        "listed": _packed(explored.findings.popularity, "<u4"),
        "map": _packed_map(explored.map),
        "own": _packed((support.self_match().nan_to_num(0.0) * 65535).ceil(), "<u2"),  # 0: not at all
        "selfMatch": _histogram(support.self_match()[: len(collection.sets[0])]),
        "ownLabel": None if labels is None else round(float(labels.votes[labels.known, 0].mean()), 5),
        "wrong": None if labels is None else labels.estimate,
        "confusion": [[a, b, round(share, 5)] for (a, b), share in labels.confusion.items()]
        if labels
        else [],
        "tables": {
            name: {
                "columns": table.columns,
                "rows": table.rows,
                "threshold": table.threshold,
            }
            for name, table in explored.tables.items()
        },
        "sheets": {
            "tile": looks.tile,
            "columns": looks.columns,
            "folder": quote(os.fsencode(sheets_folder(page).name)),
            "inline": None if sheets is None else [base64.b64encode(sheet).decode() for sheet in sheets],
        },
    }


# ---- parts ----


def _sheet_name(number: int) -> str:
    return f"sheet-{number:05d}.webp"


def _base(images: ImageSet, page: Path) -> str | None:
    """The address of the folder that names of files begin in, seen from the page."""
    place = Path(images.place)
    if not images.place or not place.is_dir():
        return None
    root = place.parent if images.split else place
    path = os.path.relpath(root.resolve(), page.parent.resolve()).replace(os.sep, "/")
    return quote(os.fsencode(path)) + "/"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _packed(values: Tensor, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values.numpy()).astype(kind).tobytes()).decode()


def _packed_map(places: Tensor) -> str:
    """Places from 0 to 65,534, both axes alike, the map in the middle; 65,535 for an image without one."""
    known = torch.isfinite(places).all(1)
    packed = torch.full_like(places, 65535.0)
    if known.any():
        inside = places[known].double()
        low, high = inside.amin(0), inside.amax(0)
        side = float((high - low).max()) or 1.0
        packed[known] = ((inside - (low + high) / 2) / side + 0.5).mul(65534).round().to(packed.dtype)
    return _packed(packed, "<u2")


def _histogram(p: Tensor) -> dict[str, Any]:
    """Counts in equal bins from 0 to the next multiple of 5% above the largest."""
    known = p[torch.isfinite(p)]
    top = min(1.0, max(0.05, -(-float(known.max()) // 0.05) * 0.05)) if len(known) else 1.0
    places = (known / top * _BINS).long().clamp(max=_BINS - 1)
    mean = float(known.mean()) if len(known) else 0.0
    return {"top": round(top, 2), "mean": mean, "counts": torch.bincount(places, minlength=_BINS).tolist()}


def _sizes(looks: Looks) -> dict[str, Any]:
    """In words, and the most common ones."""
    counts = Counter(f"{w} \u00d7 {h}" for h, w in looks.sizes.tolist() if h)
    common = counts.most_common(6)
    if len(counts) <= 1:
        text = common[0][0] if common else "none"
    else:
        sides = looks.sizes[looks.sizes[:, 0] > 0]
        text = f"{int(sides.min()):,} to {int(sides.max()):,}"
    return {"text": text, "common": common}
