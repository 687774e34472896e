"""`adasim eval ...`: measure an encoder, and compare what was measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.table import Column, Table

from adasim.cli.options import (
    MODEL,
    Command,
    Model,
    check_file,
    check_images,
    check_model,
    read_options,
    show_help,
)
from adasim.options import with_options
from adasim.registry import EVALUATIONS
from adasim.util import terminal
from adasim.util.errors import UserError, suggest

TABLE = "table"
"""The one command here that measures nothing."""


@dataclass(kw_only=True)
class Encoder(Command):
    """Which encoder."""

    model: Model
    all_snapshots: bool = False
    """Measure each encoder in RUN/encoders (pretrained with --save.encoder-every), and show how the figure changed
    over training."""


@dataclass(kw_only=True)
class TableArguments:
    """Compare the newest results of several runs. Those that differ by --seed alone share a row, as mean ± standard
    deviation; gains over the first row, between runs of the same seed, stand in brackets."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """Run folders (or files of results), the baseline first."""
    format: Literal["terminal", "markdown", "latex"] = "terminal"


def main(arguments: Sequence[str]) -> None:
    """`adasim eval ...`"""
    if not arguments or arguments[0] in ("-h", "--help"):
        return show_evaluations()
    name, rest = arguments[0], arguments[1:]
    if name == TABLE:
        return show_table(read_options(TableArguments, rest, f"eval {TABLE}"))
    if name not in EVALUATIONS:
        near = suggest(name, [*EVALUATIONS.names(), TABLE])
        raise UserError(f"Unknown evaluation {name!r}. {near} One of your own needs --plugin FILE.")
    evaluate(name, rest)


def evaluate(name: str, arguments: Sequence[str]) -> None:
    """Measure, print what was measured, and keep it."""
    evaluation = parse_evaluation(name, arguments)

    from adasim.dist.processes import Distributed
    from adasim.eval.evaluation import open_extractor
    from adasim.eval.results import NAMES
    from adasim.models.io import snapshots

    models: dict[int, str | Path] = {0: evaluation.model}
    if evaluation.all_snapshots:
        models = {**snapshots(Path(evaluation.model))}
        if not models:
            raise UserError(f"{evaluation.model} has no snapshots. Pretrain with --save.encoder-every N.")
        evaluation.no_cache = True  # features of every snapshot would fill the disk
    curve = Table("epoch", Column(NAMES.get(name, name), justify="right"), box=None, padding=(0, 2))
    with Distributed.start(evaluation.device) as ranks:
        shown = terminal.console(quiet=not ranks.is_main)
        for epoch, model in models.items():
            say = (lambda sentence: None) if curve.row_count else terminal.say  # the same of each
            size = evaluation.named_size
            extractor = open_extractor(model, evaluation, named_size=size, say=say, ranks=ranks)
            report = evaluation.run(extractor)
            if not evaluation.all_snapshots:
                report.show(shown)
            extractor.keep(report.results, evaluation.results)
            curve.add_row(str(epoch), f"{report.value:.2f}")
        if evaluation.all_snapshots:
            shown.print(curve)


def parse_evaluation(name: str, arguments: Sequence[str]) -> Any:
    """The evaluation `name`, filled in; it has the fields of `Options` and of `Encoder` too."""
    asked = read_options(with_options(EVALUATIONS.outline(name), Encoder), arguments, f"eval {name}")
    check_model(asked.model)
    check_file(asked.exclude, "--exclude")
    for option in ("data", "train", "test"):
        value = getattr(asked, option, None)
        for source in value if isinstance(value, tuple) else (value,):
            check_images(source, f"--{option}")
    named = [getattr(asked, option, None) for option in ("data", "train")]
    is_name = ":" not in asked.model and not os.path.exists(asked.model)
    if hasattr(asked, "data") and not any(named) and is_name:
        raise UserError(f"Which images? {asked.model} is no run with its own: name some with --data.")
    return with_options(EVALUATIONS[name], Encoder)(**vars(asked))


def show_table(arguments: TableArguments) -> None:
    for run in arguments.runs:
        check_file(run, "its spelling")

    from adasim.eval.results import LEGEND, compare, print_comparison, to_latex, to_markdown

    console, aside = terminal.console(), terminal.console(stderr=True)  # the table may go into a file
    comparison = compare(list(arguments.runs), lambda sentence: aside.print(sentence, soft_wrap=True))
    if arguments.format == "terminal":
        print_comparison(comparison, console)
    else:
        console.out({"markdown": to_markdown, "latex": to_latex}[arguments.format](comparison), end="")
    if comparison.has_seeds():
        aside.print(LEGEND, style="dim")


def show_evaluations() -> None:
    """`adasim eval`: what there is."""
    explained = {name: EVALUATIONS.outline(name).__doc__ or "" for name in EVALUATIONS.names()}
    rows = [(name, text.strip().partition("\n")[0]) for name, text in explained.items()]
    rows.append((TABLE, "Compare runs: the results side by side, also as Markdown or LaTeX."))
    ending = f"MODEL: {MODEL} Results are kept in the run's results.jsonl."
    ending += "\nadasim eval WHAT --help shows every option."
    show_help("adasim eval WHAT MODEL [options]", rows, ending)
