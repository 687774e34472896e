"""What an evaluation hands back: its figures, and how they are shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from adasim.eval.results import Result
from adasim.util import terminal


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of one evaluation. `print(report)` shows what `adasim eval` does."""

    results: tuple[Result, ...]
    """One for each data set, with all figures; these are what a run's results.jsonl keeps."""
    title: str | Text
    table: RenderableType
    sentences: tuple[str | Text, ...] = ()
    """What there is to say below the table."""
    said: tuple[str, ...] = ()
    """What was said on the way: which images were found, left out or held out."""

    @property
    def value(self) -> float:
        """The main figure; where there are several data sets, their mean."""
        return sum(result.value for result in self.results) / len(self.results)

    @property
    def metrics(self) -> dict[str, Any]:
        """All figures of the first result, which is the only one except for few-shot on several data sets."""
        return self.results[0].metrics

    def show(self, console: Console) -> None:
        """Title, table and sentences."""
        console.print(self.title, soft_wrap=True)
        console.print(self.table)
        for sentence in self.sentences:
            console.print(sentence, soft_wrap=True)

    def __str__(self) -> str:
        console = terminal.console(color_system=None)
        with console.capture() as shown:
            for sentence in self.said:
                console.print(sentence, soft_wrap=True)
            self.show(console)
        return shown.get().rstrip("\n")
