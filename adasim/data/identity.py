"""Is it still the same data? What a run writes down of its images, and what a resume compares.

Names, sizes, labels and modification times of all files are kept, and what some of them hold: of up to 4,096
files (all, in a smaller data set) a hash of at most 64 KB each, so that the cost is bounded; or, where a complete
check was asked for, a hash of every byte of every file. Times alone decide nothing: a copy on another disk may
have other ones. Where they differ, the contents must agree.

What is in a folder may be a million lines. It is kept apart, in a file of its own (`listing_file`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from adasim.data.image_folder import FolderImages, Listing
from adasim.data.images import ImageSet, Subset, sample_ids
from adasim.util.errors import UserError
from adasim.util.terminal import few, printable

SAMPLED_FILES = 4096
_ENOUGH = 30
"""This many unchanged files are enough to trust others whose modification times differ: if a tenth of those had
other contents, such a sample would show it with a probability of 96%."""
_THREADS = 8


def record(images: ImageSet, complete: bool = False) -> dict[str, Any]:
    """What to keep of a data set, for `check_same_data` to compare with later; as JSON takes it.

    Args:
        complete: read every file, and hash every byte.
    """
    facts: dict[str, Any] = {
        "images": len(images),
        "fingerprint": images.fingerprint(),
        "labels": images.labels_hash(),
        "sample": _hashes(images, _sampled(images)),
    }
    if _folder_listing(images) is None:
        facts |= {"listing": images.listing(), "times": []}
    if complete and facts["sample"]:
        facts["contents"] = _hashes(images, range(len(images)), whole=True)
    return facts


def listing_file(images: ImageSet) -> bytes | None:
    """The names, sizes and times of a folder's files, to keep beside its `record`; None where that has all."""
    listing = _folder_listing(images)
    return None if listing is None else listing.to_bytes(images.fingerprint())


def check_same_data(
    saved: dict[str, Any],
    images: ImageSet,
    complete: bool = False,
    advice: str = "Restore the data set as it was",
    listing: Listing | None = None,
) -> str:
    """Refuse to go on with other data, naming the first differences; returns a sentence on what was checked.

    Args:
        saved: what `record` kept.
        images: the data set as it is now.
        complete: read every file again, if every file was read when the record was made.
        advice: what to do about other data, for the refusal.
        listing: of a folder, the files that were in it, by `Listing.read` of what `listing_file` gave.
    """
    files, count, whole, read = _folder_listing(images), len(images), saved.get("contents"), 0
    late: list[int] = []  # images whose files have another modification time than before
    sample: dict[int, str] = {}
    times = saved.get("times") if listing is None else listing.states[:, 1].numpy()
    other = _other_names(saved, images, listing)
    if not other:
        if files is not None and times is not None:
            late = np.flatnonzero(np.asarray(times) != files.states[:, 1].numpy()).tolist()
        sample = dict(zip(_sampled(images), saved["sample"], strict=True))
        other = _other_contents(images, sample)
    if not other and whole:
        again = range(count) if complete else [late[n] for n in sample_ids(len(late), SAMPLED_FILES)]
        read = len(again)
        other = _other_contents(images, {i: whole[i] for i in again}, whole=True)
    elif not other and sum(i in sample for i in late) < min(len(late), _ENOUGH):
        unknown = few(printable(images.where(i)) for i in late if i not in sample)
        advice = "Restore these files with their modification times"
        other = (
            f"{len(late):,} of {count:,} files were written after the run began ({unknown}), and what they held is "
            f"not on record: it is for {len(sample):,} files, or for all in a run begun with --verify-data"
        )
    if other:
        raise UserError(
            f"Cannot resume with other data: {other}. {advice}, or start a new run with another --out."
        )
    text = "The data are those that the run began with: "
    if files is None:
        return text + f"the contents of {len(sample) or count:,} of {count:,} images agree."
    text += "names and sizes" if times is None or late else "names, sizes and modification times"
    text += f" of all {count:,} files agree"
    if read == count:
        text += ", and so does every byte of them."
    else:
        text += f", and so do the contents of {len(sample):,} of them (up to 64 KB of each)."
    if late:
        text += f" Modification times differ for {len(late):,}, as after a copy."
        if 0 < read < count:
            text += f" Every byte of {read:,} of these was read, and is as before."
    if times is None:
        text += " Modification times could not be compared: the run's listing.npz is lost or damaged."
    if complete and not whole:
        text += " Not all could be read again and compared: the run began without --verify-data."
    return text


def _folder_listing(images: ImageSet) -> Listing | None:
    """The files of a folder, or of what is left of one; None of other images."""
    if isinstance(images, Subset) and bool((images.ids[1:] > images.ids[:-1]).all()):
        listing = _folder_listing(images.images)
        return None if listing is None else listing.select(images.ids)
    return images.files if isinstance(images, FolderImages) else None


def _other_names(saved: dict[str, Any], images: ImageSet, listing: Listing | None) -> str:
    """In words, how names, sizes, order or labels differ; empty if they do not."""
    if saved["fingerprint"] != images.fingerprint():
        before = saved.get("listing")
        if listing is not None:
            before = [line for lines in listing.lines() for line in lines]
        if before is None:
            lost = "which ones cannot be said: the run's listing.npz is lost or damaged"
            return f"names, sizes or contents differ ({lost})"
        if before != (now := images.listing()):
            return difference(before, now)
    known = saved["labels"] or images.labels_hash()  # labels may have become known since
    return "" if known == images.labels_hash() else "the labels differ"


def _sampled(images: ImageSet) -> list[int]:
    """Which images are looked into; none where the listing has all contents already."""
    return sample_ids(len(images), SAMPLED_FILES) if images.content(0) else []


def _hashes(images: ImageSet, ids: Sequence[int], whole: bool = False) -> list[str]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(partial(images.content, whole=whole), ids))


def _other_contents(images: ImageSet, known: dict[int, str], whole: bool = False) -> str:
    """In words, which images hold something else than these hashes say; empty if none does."""
    hashes = zip(known, _hashes(images, list(known), whole), strict=True)
    changed = [printable(images.where(i)) for i, now in hashes if now != known[i]]
    if not changed:
        return ""
    in_place = "" if _folder_listing(images) is None else ", in as many bytes"
    return (
        f"{len(changed):,} of {len(known):,} images that were looked into hold something else than before"
        f"{in_place} ({few(changed)})"
    )


def difference(before: list[str], after: list[str]) -> str:
    """In words, how two listings differ. A line is a name, then a size or a hash as its last word."""
    gone, new = _by_name(Counter(before) - Counter(after)), _by_name(Counter(after) - Counter(before))
    changed = [name for name in gone if name in new]
    for name in changed:
        del gone[name], new[name]
    twins: dict[str, list[str]] = {}  # size -> new names, the first one last
    for name in reversed(new):
        twins.setdefault(new[name], []).append(name)
    renamed: list[str] = []
    for name, mark in list(gone.items()):
        if twins.get(mark):  # the same size under another name
            twin = twins[mark].pop()
            renamed.append(f"{name} -> {twin}")
            del gone[name], new[twin]
    kinds = {"renamed": renamed, "removed": list(gone), "added": list(new), "changed": changed}
    parts = [f"{len(names)} {kind} ({few(map(printable, names))})" for kind, names in kinds.items() if names]
    return f"of {len(before)} entries, " + ", ".join(parts) if parts else "the order of the images differs"


def _by_name(lines: Iterable[str]) -> dict[str, str]:
    return {name or mark: mark for name, _, mark in (line.rpartition(" ") for line in lines)}
