"""`adasim embed`: the features of a folder of images as a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adasim.cli.options import Model, Reading, read_options
from adasim.tools.outputs import check_features_file
from adasim.util.terminal import say


@dataclass(kw_only=True)
class EmbedArguments(Reading):
    """Features of all images of a folder, with their file names and labels.

    adasim embed runs/photos --data photos/ --out features.npz

    Interrupted, the same command goes on where it stopped; done before, it writes the file at once. Images that
    cannot be read are left out and named."""

    model: Model
    data: str
    """A folder of images, an .npz file, hf:NAME or synthetic[:COUNT]."""
    out: Path
    """The file to make. .npz: the arrays features, files, labels, classes. .parquet: the columns file, label,
    features. .npy: the features alone, with file and label in a .csv beside it."""
    overwrite: bool = False
    """Replace OUT if it is there."""


def main(arguments: Sequence[str]) -> None:
    """`adasim embed ...`"""
    asked = read_options(EmbedArguments, arguments, "embed")
    check_features_file(asked.out, asked.overwrite)
    asked.check(asked.model, asked.data, "--data")

    from adasim.tools.embed import embed

    made = embed(asked.model, asked.data, asked.out, overwrite=asked.overwrite, **asked.named(), say=say)
    count, width = made.features.shape
    labels = "no labels" if made.labels is None else f"labels of {len(made.classes):,} classes"
    say(f"{asked.out}: features of {count:,} images, {width} wide, file names, {labels}.")
