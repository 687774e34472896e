"""What was found, for other tools: Embedding Atlas, FiftyOne, cleanlab."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adasim.explore.page import Exploration
from adasim.util.csv import to_csv
from adasim.util.errors import UserError
from adasim.util.files import atomic_write

Row = dict[str, str | int | float | None]


def image_rows(explored: Exploration) -> list[Row]:
    """Of every image: what it is, where it lies on the map, and its score in each list that it stands in."""
    collection = explored.collection
    rows: list[Row] = [
        {
            "id": i,
            "file": name,
            "split": collection.splits[collection.split_of[i]],
            "label": collection.class_name(i) or None,
            "x": _finite(x),
            "y": _finite(y),
        }
        for i, (name, (x, y)) in enumerate(zip(collection.names, explored.map.tolist(), strict=True))
    ]
    for list_name, table in explored.tables.items():
        kept = [column for column in ("score", "suggested", "group", "kind") if column in table.columns]
        fields = {column: f"{list_name.replace('-', '_')}_{column}" for column in kept}
        for row in rows:
            row |= dict.fromkeys(fields.values())
        for line in table.rows:
            found = dict(zip(table.columns, line, strict=True))
            rows[int(found["id"])] |= {
                field: float(found[column]) if column == "score" else found[column]
                for column, field in fields.items()
            }
    return rows


def _finite(value: float) -> float | None:
    return round(value, 6) if np.isfinite(value) else None


def write_atlas(path: Path, explored: Exploration) -> None:
    """One line per image for Embedding Atlas, with neighbours as it reads them: {"ids": [...], "distances": [...]},
    row numbers from 0; a distance is 1 less the neighbour's share among all of the image's neighbours."""
    support, others = explored.support, explored.support.others()
    lines = []
    for i, row in enumerate(image_rows(explored)):
        listed = others[i] > 0
        distances = [round(1 - p, 6) for p in others[i][listed].tolist()]
        neighbours: Any = {"ids": support.neighbours[i][listed].tolist(), "distances": distances}
        lines.append(json.dumps(row | {"neighbors": neighbours}))
    atomic_write(path, ("\n".join(lines) + "\n").encode())


def write_fiftyone(path: Path, explored: Exploration) -> None:
    """A CSV file with a row per image, for `fiftyone.types.CSVDataset`."""
    collection = explored.collection
    files = [Path(images.where(i)).absolute() for images in collection.sets for i in range(len(images))]
    if not files[0].exists():
        raise UserError("FiftyOne shows image files, and these images are none: leave out --export-fiftyone.")
    rows = image_rows(explored)
    columns = ["filepath", *rows[0]]
    lines = [
        [str(file), *("" if value is None else str(value) for value in row.values())]
        for file, row in zip(files, rows, strict=True)
    ]
    atomic_write(path, to_csv(columns, lines).encode("utf-8", "surrogateescape"))


def write_cleanlab(path: Path, explored: Exploration, features: Tensor) -> None:
    """The arrays that cleanlab takes, of all images that have a label and features: `labels` and `features`, and what
    row is which image (`ids`, `files`, `classes`)."""
    collection = explored.collection
    if collection.labels is None:
        raise UserError("cleanlab judges labels, and these images have none: leave out --export-cleanlab.")
    ids = (torch.isfinite(features).all(1) & (collection.labels >= 0)).nonzero()[:, 0]
    file = io.BytesIO()
    np.savez(
        file,
        features=features[ids].numpy(),
        labels=collection.labels[ids].numpy(),
        classes=np.array(collection.classes),
        ids=ids.numpy(),
        files=np.array([collection.names[i] for i in ids.tolist()]),
    )
    atomic_write(path, file.getvalue())
