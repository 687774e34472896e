"""In words: what a data set was found to hold, and what was left out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from adasim.data.images import ImageSet
from adasim.data.sources.decode import HEIC_ENDINGS
from adasim.util.terminal import printable

_CONVERTIBLE = {
    *("avif", "jxl", "jp2", "j2k", "jpx", "psd", "svg", "eps", "exr", "tga", "ico", "pdf"),
    *("raw", "dng", "cr2", "cr3", "nef", "arw", "orf", "rw2", "dcm"),
}
_WORDS = {  # of what is left out for another reason than its ending
    ".": ("file without an ending", "files without an ending"),
    "special": ("pipe, socket or device", "pipes, sockets or devices"),
    "loop": ("link that leads back to a folder above it", "links that lead back to a folder above them"),
    "folder": ("folder named like an image", "folders named like images"),
    "closed": ("folder that cannot be opened", "folders that cannot be opened"),
}


def describe(images: ImageSet, *, used: Collection[str] | None = ()) -> str:
    """`1,203 images in 2 classes (cat, dog) from photos/train (its split train; 300 in test/ are not used). Left
    out: 9 .heic (to read them: pip install pillow-heif), 3 .txt.`

    Args:
        used: other splits of the source that are used, too, so that only what is in none of them is named; with None,
            nothing is.
    """
    labelled = "without labels"
    if images.labels is not None:
        count = len(images.classes)
        names = f" ({', '.join(map(printable, images.classes))})" if count <= 4 else ""
        labelled = f"in {count:,} {'class' if count == 1 else 'classes'}{names}"
    text = f"{len(images):,} {'image' if len(images) == 1 else 'images'} {labelled}"
    if images.place:
        text += f" from {printable(images.place)}"
    notes = [f"its split {images.split}"] if images.split else []
    if used is not None and (rest := images.unused(used)):
        notes.append(rest)
    text += f" ({'; '.join(notes)})." if notes else "."
    return text + (f" Left out: {images.left_out}." if images.left_out else "")


def left_out_words(counts: Counter[str]) -> str:
    """`9 .heic (to read them: pip install pillow-heif), 3 .cr2 (convert them to JPEG or PNG), 3 .txt`"""
    words = []
    for what, count in sorted(counts.items(), key=lambda item: (not _hint(item[0]), -item[1], item[0])):
        one, many = _WORDS.get(what, (what, what))
        words.append(f"{count:,} {printable(one if count == 1 else many)}{_hint(what)}")
    return few(words, 6)


def few(words: Iterable[str], limit: int = 3) -> str:
    """`a, b, c and 5 more`"""
    words = list(words)
    more = f" and {len(words) - limit:,} more" if len(words) > limit else ""
    return ", ".join(words[:limit]) + more


def _hint(what: str) -> str:
    """What to do about files with this ending that are images, too."""
    ending = what.removeprefix(".")
    if ending in HEIC_ENDINGS:
        return " (to read them: pip install pillow-heif)"
    return " (convert them to JPEG or PNG)" if ending in _CONVERTIBLE else ""
