"""`explore`: images and supports in, everything that was found out about them."""

from __future__ import annotations

from adasim.eval.features import progress_bar
from adasim.explore.findings import hunt, tables
from adasim.explore.looks import look
from adasim.explore.opening import Opened, Say
from adasim.explore.writing import Exploration


def explore(opened: Opened, say: Say = lambda sentence: None) -> Exploration:
    """Look at every image once, then run all hunts."""
    collection = opened.collection
    with progress_bar("thumbnails", len(collection)) as advance:
        looks = look(collection.sets, advance)
    if looks.unreadable:
        some = next(iter(looks.unreadable.values()))
        say(f"{len(looks.unreadable):,} images cannot be read and have no thumbnail, as {some}.")
    remembered = len(collection) if opened.remembered is None else opened.remembered
    findings = hunt(collection, opened.support, opened.features, looks, remembered)
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
    )
