"""What a person sees while a run trains: one bar on a terminal, plain lines everywhere else.

Epoch  12/100 ━━━━━━━━╸━━━━━━━━━━━━━━━  35%  1:02:11 left
loss 6.021   1,234 images/s   waiting for data 3%   bootstrapped 17%
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from adasim.util import terminal
from adasim.util.units import duration

_SMOOTH_S = 20.0  # speeds are averages over about this long


class Progress:
    """Shows a run's progress; `update` after every step, `say` for messages, which appear above the bar.

    Args:
        total_steps: steps of the whole run.
        epochs: epochs of the whole run.
        console: where to write; standard output by default. A bar if that is a terminal, else lines.
        every_s: without a terminal, a line at every new epoch and whenever so many seconds have passed.
        clock: seconds, for tests.

    >>> with Progress(total_steps=1000, epochs=10) as bar:  # doctest: +SKIP
    ...     bar.update(step=1, epoch=0, loss=6.2, images=256, waited_s=0.01, bootstrap=0.0)
    ...     bar.say("The teacher's output is nearly uniform.")
    """

    def __init__(
        self,
        total_steps: int,
        epochs: int,
        console: Console | None = None,
        every_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.epochs = epochs
        self.step = 0
        """Steps done; what was done before a resume counts for the bar and not for the speed."""
        self.epoch = 0
        self.loss = math.nan
        self.bootstrap: float | None = None
        self._console = console or terminal.console()
        self._every_s = every_s
        self._clock = clock
        self._last = clock()
        self._steps = self._images = self._waited = self._busy = 0.0  # decayed sums, of one age
        self._printed: tuple[int, float] | None = None  # epoch and time of the last plain line
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        self._last = self._clock()  # building the bar and its run is not training
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self._bar, console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._steps and self._printed != (self.epoch, self._last):
            self._print_line()

    def update(
        self,
        *,
        step: int,
        epoch: int,
        loss: float,
        images: int,
        waited_s: float,
        bootstrap: float | None = None,
    ) -> None:
        """Count one more step.

        Args:
            step: steps done, this one included.
            epoch: the epoch it belongs to, from 0.
            loss: its loss.
            images: how many images it took.
            waited_s: seconds of it spent waiting for data.
            bootstrap: share of images whose partner is another image; None where that has no meaning.
        """
        now = self._clock()
        took, self._last = now - self._last, now
        fade = math.exp(-took / _SMOOTH_S)
        self._steps = self._steps * fade + (step - self.step)
        self._images = self._images * fade + images
        self._waited = self._waited * fade + waited_s
        self._busy = self._busy * fade + took
        self.step, self.epoch, self.loss, self.bootstrap = step, epoch, loss, bootstrap
        if self._live is None and self._line_is_due(now):
            self._print_line()

    def say(self, text: str) -> None:
        """Print a message above the bar, on one line whatever names it holds."""
        self._print(terminal.printable(text), wrap=self._live is not None)

    @property
    def images_per_second(self) -> float:
        return self._images / self._busy if self._busy else 0.0

    @property
    def waiting(self) -> float:
        """Share of the time spent waiting for data, 0 to 1."""
        return min(1.0, self._waited / self._busy) if self._busy else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At the present speed; None before the first step."""
        return (self.total_steps - self.step) * self._busy / self._steps if self._steps else None

    def _line_is_due(self, now: float) -> bool:
        return (
            self._printed is None
            or self.epoch != self._printed[0]
            or now - self._printed[1] >= self._every_s
            or self.step == self.total_steps
        )

    def _print_line(self) -> None:
        self._printed = (self.epoch, self._last)
        share = f"{self.step / self.total_steps:.0%}" if self.total_steps else "100%"
        parts = [
            f"epoch {self._epoch()}",
            f"step {self.step:,}/{self.total_steps:,} ({share})",
            *self._figures(),
        ]
        self._print(", ".join([*parts, self._left()]), wrap=False)

    def _print(self, text: str, wrap: bool) -> None:
        self._console.print(text, markup=False, emoji=False, soft_wrap=not wrap)

    def _bar(self) -> Group:
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(justify="right", no_wrap=True)
        line.add_column(justify="right", no_wrap=True)
        done = self.step / self.total_steps if self.total_steps else 1.0
        line.add_row(
            Text.assemble("Epoch ", (self._epoch(), "bold")),
            ProgressBar(total=max(1, self.total_steps), completed=self.step),
            f"{math.floor(done * 100)}%",
            Text(self._left(), style="cyan"),
        )
        return Group(line, Text("   ".join(self._figures()), style="dim", no_wrap=True, overflow="ellipsis"))

    def _epoch(self) -> str:
        width = len(str(self.epochs))
        return f"{min(self.epoch + 1, self.epochs):>{width}}/{self.epochs}"

    def _figures(self) -> list[str]:
        if not self._steps:
            return ["starting"]
        speed = self.images_per_second
        figures = [
            f"loss {self.loss:.4g}",
            f"{speed:,.0f} images/s" if speed >= 10 else f"{speed:.2g} images/s",
            f"waiting for data {self.waiting:.0%}",
        ]
        return figures if self.bootstrap is None else [*figures, f"bootstrapped {self.bootstrap:.0%}"]

    def _left(self) -> str:
        return "-:-- left" if self.seconds_left is None else f"{duration(self.seconds_left)} left"
