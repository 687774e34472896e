"""The one place that makes consoles: all text for people goes through it.

Names of files, error messages of libraries and results of other runs are written by others. Whatever a console
prints is made printable first, and `[...]` in a string is text, never markup: style is given by `Text` objects.
Output that cannot be written (a closed pipe, a full disk) is dropped: it never ends a run.
"""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def printable(text: object, keep: str = "") -> str:
    r"""The text with control characters, overrides of the reading direction and undecodable bytes escaped.

    >>> printable("a\x1b[31m.jpg"), printable("caf\udce9.jpg"), printable("two\nlines")
    ('a\\x1b[31m.jpg', 'caf\\xe9.jpg', 'two\\nlines')
    """
    return _UNSAFE.sub(lambda match: match[0] if match[0] in keep else _escaped(match[0]), str(text))


def spelled(name: str) -> str:
    r"""A name for a list that is read again: printable, with backslashes doubled, so that no two names become one.

    >>> spelled("two\nlines"), spelled(r"two\nlines")
    ('two\\nlines', 'two\\\\nlines')
    """
    return printable(name.replace("\\", "\\\\"))


def shortened(name: object, letters: int) -> str:
    """A printable name of at most so many letters: of a long one the end, which tells more than the beginning."""
    shown = printable(name)
    return shown if len(shown) <= letters else "…" + shown[1 - letters :]


def few(words: Iterable[str], limit: int = 3) -> str:
    """`a, b, c and 5 more`"""
    words = list(words)
    more = f" and {len(words) - limit:,} more" if len(words) > limit else ""
    return ", ".join(words[:limit]) + more


def _escaped(character: str) -> str:
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # how Python names a byte that is not UTF-8
        return f"\\x{number - 0xDC00:02x}"
    return _SHORT.get(character) or (f"\\x{number:02x}" if number < 128 else f"\\u{number:04x}")


class _Console(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text, "\n\t"), segment.style)

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        """As rich's. What is not wrapped elsewhere, lest a name be broken in a log, is wrapped on a terminal."""
        super().print(*objects, soft_wrap=soft_wrap and not self.is_terminal, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, "\n\t"), **options)  # before a table measures it


def console(*, stderr: bool = False, quiet: bool = False, **options: Any) -> Console:
    """A console on standard output or standard error; options as for rich's."""
    return _Console(
        file=cast(TextIO, _Stream("stderr" if stderr else "stdout")),
        markup=False,
        emoji=False,
        highlight=False,
        quiet=quiet,
        **options,
    )


def say(sentence: str) -> None:
    """A sentence on standard output."""
    console().print(sentence, soft_wrap=True)


@contextmanager
def without_font_warnings() -> Iterator[None]:
    """While a figure is drawn: matplotlib says nothing of letters that no font has, and which become boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from|Matplotlib currently does not support"
        )
        yield


def complain(error: object) -> None:
    """The one line on standard error by which a command ends that could not be carried out."""
    _Stream("stderr").write(f"adasim: {printable(error)}\n")


def is_unread() -> bool:
    """Whether standard output is a pipe whose reader has gone (`adasim ... | head`)."""
    return isinstance(_Stream.failed, BrokenPipeError)


def output_error() -> OSError | None:
    """Why something could not be written to standard output."""
    return _Stream.failed


def discard_output() -> None:
    """Send standard output nowhere: what is still in its buffer would fail once more when Python ends."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.__stdout__.fileno())  # type: ignore[union-attr]
        os.close(nowhere)


@contextmanager
def progress_bar(text: str, total: int, wanted: bool = True) -> Iterator[Callable[[int], None]]:
    """A function to call with how much more is done; the bar is shown on a terminal only, and goes at the end."""
    bar_console = console(stderr=True)
    if not (wanted and bar_console.is_terminal):
        yield lambda count: None
        return
    from rich.progress import Progress, TextColumn  # not before: it takes a while

    columns = (TextColumn("{task.description}", markup=False), *Progress.get_default_columns()[1:])
    with Progress(*columns, console=bar_console, transient=True) as progress:
        task = progress.add_task(text, total=total)
        yield lambda count: progress.advance(task, count)


class _Stream(io.TextIOBase):
    """Standard output or error as it is at the moment of writing; what cannot be written is dropped."""

    failed: OSError | None = None
    """Why standard output could not be written to."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def _file(self) -> TextIO:
        file = getattr(sys, self._name) or io.StringIO()  # None where it was closed
        return getattr(file, "rich_proxied_file", file)  # beneath a live bar

    def write(self, text: str) -> int:
        file = self._file
        encoding = file.encoding or "utf-8"
        try:  # what a terminal that knows ASCII alone cannot show is escaped
            file.write(text.encode(encoding, "backslashreplace").decode(encoding))
            file.flush()
        except ValueError:  # closed
            pass
        except OSError as error:
            if self._name == "stdout":
                _Stream.failed = error
                if isinstance(error, BrokenPipeError):
                    discard_output()
        return len(text)

    def flush(self) -> None:
        pass  # every write is

    def isatty(self) -> bool:
        return not self._file.closed and self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._file.encoding or "utf-8"
