"""Verdicts put into effect: a folder of images written anew, without those that were left out and with new labels."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

from adasim.data import ImageSet, open_images
from adasim.data.sources import REJECT, RELABEL, file_key, file_name, read_verdicts
from adasim.util.errors import MissingSplitError, UserError
from adasim.util.terminal import printable, progress_bar, spelled


@dataclass
class Applied:
    """What was done, counted in images."""

    written: int = 0
    left_out: int = 0
    relabelled: int = 0
    unknown_label: int = 0
    """Wrong labels without a new one: these images stay where they were."""
    unmatched: int = 0
    """Verdicts on images that are not there."""
    others: int = 0
    """Other files of the folder: no images, or of a split that is not explored. They are not written."""

    def __str__(self) -> str:
        parts = [
            f"{self.written:,} {'image' if self.written == 1 else 'images'} written",
            f"{self.left_out:,} left out",
            f"{self.relabelled:,} moved to another class",
        ]
        if self.unknown_label:
            parts.append(f"{self.unknown_label:,} with a wrong label and no new one, not moved")
        if self.unmatched:
            parts.append(f"verdicts that fit no image here: {self.unmatched:,}")
        if self.others:
            parts.append(f"other files, not written: {self.others:,}")
        return ", ".join(parts) + "."


def apply(verdicts: Path, data: str, out: Path, *, copy: bool = False) -> Applied:
    """Write the images of a folder to `out`, as links or with `copy` as files. The folder itself is not changed.

    An image that a verdict rejects is left out; one with a new label goes to that class's folder. The whole of `out`
    appears at once, or not at all.
    """
    wanted = read_verdicts(verdicts)
    sets = _splits(data)
    names = {spelled(file_key(images, i)): (images, i) for images in sets for i in range(len(images))}
    done = Applied(unmatched=len(wanted.keys() - names.keys()), others=_other_files(data, sets))
    if done.unmatched == len(wanted):
        raise UserError(
            f"No verdict of {verdicts} is on an image of {data}: they are called like "
            f"{printable(min(wanted, default='nothing'))}, and the images like {min(names)}. Name the folder that "
            f"was explored."
        )
    taken: Counter[str] = Counter()
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        temporary.chmod(0o755)
        with progress_bar("links" if not copy else "copies", len(names)) as advance:
            for name, (images, i) in names.items():
                advance(1)
                verdict, label = wanted.get(name, ("", ""))
                if verdict == REJECT:
                    done.left_out += 1
                    continue
                key = file_key(images, i)
                if verdict == RELABEL and label:
                    key = _relabelled(images, i, label)
                    done.relabelled += 1
                elif verdict == RELABEL:
                    done.unknown_label += 1
                _place(Path(images.where(i)), temporary / _free(key, taken), copy)
                done.written += 1
        if not done.written:
            raise UserError(f"{verdicts} leaves out every image of {data}. Keep some.")
        os.rename(temporary, out)  # over an empty folder at most
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return done


def _splits(data: str) -> list[ImageSet]:
    """The images of a folder: its training and its test split, or all of them where it is not divided."""
    sets = [open_images(data)]
    with suppress(MissingSplitError):
        sets.append(open_images(data, split="test"))
    return sets


def _other_files(data: str, sets: list[ImageSet]) -> int:
    """How many files of the folder, but for hidden ones, are none of these images."""
    listed = {os.path.abspath(images.where(i)) for images in sets for i in range(len(images))}
    return sum(
        os.path.abspath(os.path.join(folder, name)) not in listed
        for folder, _, files in os.walk(data)
        for name in files
        if not name.startswith(".")
    )


def _relabelled(images: ImageSet, i: int, label: str) -> str:
    """Where image i goes: the folder of its class, with which its path begins, is replaced by that of its new one."""
    folder = next((name for name in images.classes if printable(name) == label), label)
    if folder.startswith("/") or not folder.strip("./") or ".." in PurePath(folder).parts:
        raise UserError(f"{label} is no name for a class. Correct the column new_label.")
    number = -1 if images.labels is None else int(images.labels[i])
    own = f"{images.classes[number]}/" if number >= 0 else ""
    return os.path.join(images.split, folder, file_name(images, i).removeprefix(own))


def _free(key: str, taken: Counter[str]) -> str:
    """This name, or one with a number behind it if another image has it by now."""
    taken[key] += 1
    if taken[key] == 1:
        return key
    path = PurePath(key)
    return _free(str(path.with_name(f"{path.stem}-{taken[key]}{path.suffix}")), taken)


def _place(file: Path, target: Path, copy: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if copy:
        shutil.copy2(file, target)
    else:
        target.symlink_to(file.resolve())
