"""RUN/unreadable.csv: the images that could not be read, one line each, over all resumes of the run."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from adasim.data import ImageSet
from adasim.util.files import atomic_write
from adasim.util.terminal import printable

UNREADABLE_FILE = "unreadable.csv"
_HEADER = ["image", "file", "reason"]


class UnreadableList:
    """Keeps the file up to date. An image that was repaired since stays on the list: it was replaced in the past."""

    def __init__(self, run: Path, images: ImageSet) -> None:
        self.path = run / UNREADABLE_FILE
        self._images = images
        self._lines = _read(self.path)

    def update(self, found: dict[int, str]) -> None:
        """Write the file anew if `found`, {id: where and why}, has something to add. Raises an OSError."""
        lines = dict(self._lines)
        for i, text in found.items():
            where = self._images.where(i)
            reason = text.removeprefix(f"{where}: ")
            lines[i] = [printable(where), printable(reason)]
        if lines == self._lines:
            return
        page = io.StringIO()
        writer = csv.writer(page, lineterminator="\n")
        writer.writerow(_HEADER)
        writer.writerows([i, *lines[i]] for i in sorted(lines))
        atomic_write(self.path, page.getvalue().encode())
        self._lines = lines


def _read(path: Path) -> dict[int, list[str]]:
    """The file's rows; none if it is damaged, which is no reason to stop a run."""
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))[1:]
        return {int(number): [where, reason] for number, where, reason in rows}
    except (OSError, ValueError, csv.Error):
        return {}
