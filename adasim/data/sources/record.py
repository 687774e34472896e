"""What a run remembers of its data, and whether a data set is still the same.

Names, sizes, labels and modification times of all files are kept, and what some of them hold: of up to 4,096
files (all, in a smaller data set) a hash of at most 64 KB each, so that the cost is bounded; or, where a complete
check was asked for, a hash of every byte of every file. Times alone decide nothing: a copy on another disk may
have other ones. Where they differ, the contents must agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from adasim.data.contents import sample_ids
from adasim.data.images import ImageSet
from adasim.data.sources.found import few
from adasim.errors import UserError
from adasim.terminal import printable

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
        "fingerprint": images.fingerprint(),
        "listing": images.listing(),
        "labels": images.labels_hash(),
        "times": images.times(),
        "sample": _hashes(images, _sampled(images)),
    }
    if complete and facts["sample"]:
        facts["contents"] = _hashes(images, range(len(images)), whole=True)
    return facts


def check_same_data(
    saved: dict[str, Any],
    images: ImageSet,
    complete: bool = False,
    remedy: str = "Restore the data set as it was",
) -> str:
    """Refuse to go on with other data, naming the first differences; returns a sentence on what was checked.

    Args:
        saved: what `record` kept.
        images: the data set as it is now.
        complete: read every file again, if every file was read when the record was made.
        remedy: what to do about other data.
    """
    try:
        return _check(saved, images, complete, remedy)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise UserError(
            "The run's data.json is damaged: restore it from a copy, or start a new run."
        ) from None


def _check(saved: dict[str, Any], images: ImageSet, complete: bool, remedy: str) -> str:
    listing, count = images.listing(), len(images)
    if saved["listing"] != listing:
        raise _other_data(difference(saved["listing"], listing), remedy)
    if saved["labels"] != images.labels_hash():
        raise _other_data("the labels differ", remedy)
    known = dict(zip(_sampled(images), saved["sample"], strict=True))
    _require_same_contents(images, known, remedy)
    late = [i for i, (a, b) in enumerate(zip(saved["times"], images.times(), strict=True)) if a != b]
    whole = saved.get("contents")
    read = 0
    if whole:
        again = range(count) if complete else [late[n] for n in sample_ids(len(late), SAMPLED_FILES)]
        _require_same_contents(images, {i: whole[i] for i in again}, remedy, whole=True)
        read = len(again)
    vouching = sum(i in known for i in late)
    if vouching < min(len(late), _ENOUGH) and not whole:
        unknown = [printable(listing[i].rpartition(" ")[0]) for i in late if i not in known]
        raise _other_data(
            f"{len(late):,} of {count:,} files were written after the run began ({few(unknown)}), and what they "
            f"held is not on record: it is for {len(known):,} files, or for all in a run begun with --verify-data",
            "Restore these files with their modification times",
        )
    return _words(saved, count, len(known), late, read, complete)


def _words(
    saved: dict[str, Any], count: int, sampled: int, late: list[int], read: int, complete: bool
) -> str:
    text = "The data are those that the run began with: "
    if not saved["times"]:
        return text + f"the contents of {sampled or count:,} of {count:,} images agree."
    same = "names and sizes" if late else "names, sizes and modification times"
    text += f"{same} of all {count:,} files agree"
    if read == count:
        text += ", and so does every byte of them."
    else:
        text += f", and so do the contents of {sampled:,} of them (up to 64 KB of each)."
    if late:
        text += f" Modification times differ for {len(late):,}, as after a copy."
        if 0 < read < count:
            text += f" Every byte of {read:,} of these was read, and is as before."
    if complete and not saved.get("contents"):
        text += " Not all could be read again and compared: the run began without --verify-data."
    return text


def _sampled(images: ImageSet) -> list[int]:
    """Which images are looked into; none where the listing has all contents already."""
    return sample_ids(len(images), SAMPLED_FILES) if images.content(0) else []


def _hashes(images: ImageSet, ids: Sequence[int], whole: bool = False) -> list[str]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(partial(images.content, whole=whole), ids))


def _require_same_contents(images: ImageSet, known: dict[int, str], remedy: str, whole: bool = False) -> None:
    ids = list(known)
    now = _hashes(images, ids, whole)
    changed = [i for i, found in zip(ids, now, strict=True) if found != known[i]]
    if changed:
        names = few(printable(images.where(i)) for i in changed)
        raise _other_data(
            f"{len(changed):,} of {len(known):,} images that were looked into hold something else than before"
            f"{', in as many bytes' if images.times() else ''} ({names})",
            remedy,
        )


def _other_data(what: str, remedy: str) -> UserError:
    return UserError(
        f"Cannot resume with other data: {what}. {remedy}, or start a new run with another --out."
    )


def difference(before: list[str], after: list[str]) -> str:
    """In words, how two listings differ. A line is a name, then a size or a hash as its last word."""
    removed = list((Counter(before) - Counter(after)).elements())
    added = list((Counter(after) - Counter(before)).elements())
    names_removed, names_added = _by_name(removed), _by_name(added)
    changed = [name for name in names_removed if name in names_added]
    gone = {name: mark for name, mark in names_removed.items() if name not in names_added}
    new = {name: mark for name, mark in names_added.items() if name not in names_removed}
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
    if parts:
        return f"of {len(before)} entries, " + ", ".join(parts)
    return "the order of the images differs"


def _by_name(lines: Iterable[str]) -> dict[str, str]:
    return {name or mark: mark for name, _, mark in (line.rpartition(" ") for line in lines)}
