"""`adasim eval ...`: measure an encoder, and compare what was measured.

adasim eval knn RUN                               k-NN accuracy on the run's own data
adasim eval linear RUN --data photos/             a linear layer on frozen features
adasim eval fewshot RUN --data flowers/ pets/     5-way 5-shot episodes
adasim eval segmentation RUN --data VOC2012/      a linear layer on patch features
adasim eval table RUN RUN                         the runs' results side by side
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from adasim import terminal
from adasim.cli.arguments import (
    Common,
    FewshotArguments,
    KnnArguments,
    LinearArguments,
    SegmentationArguments,
    TableArguments,
)
from adasim.data.sources.masks import class_names
from adasim.errors import UserError
from adasim.eval.encoders import open_subject
from adasim.eval.measure import Bench, linear_batch, open_masked_split
from adasim.eval.results import Result, append_result, compare
from adasim.eval.splits import Split, data_name, open_split
from adasim.eval.tables import print_comparison, to_latex, to_markdown
from adasim.models.transforms import SMALL

SEGMENTATION_SIZE = 2
"""Segmentation looks at images twice the side of the encoder's own: 448 for 224, as published."""


def knn(arguments: KnnArguments, console: Console) -> None:
    bench = open_bench(arguments, console)
    split = open_sources(bench, arguments, console)
    scores = bench.knn(split, arguments.k)
    table = Table("k", "top-1", "top-5", box=None, padding=(0, 2))
    for k, score in scores.items():
        table.add_row(str(k), f"{score.top1:.2f}", f"{score.top5:.2f}", style="bold" if k == 20 else "")
    title(console, "k-NN", bench, split)
    console.print(table)
    main = 20 if 20 in scores else max(scores)
    metrics = {f"top{n}_k{k}": score[i] for k, score in scores.items() for i, n in enumerate((1, 5))}
    keep(
        bench,
        arguments,
        console,
        Result(
            protocol="knn",
            setting=f"k={main}",
            value=scores[main].top1,
            metrics=metrics,
            data=split.describe(),
            model=bench.describe_model(),
            settings={"k": list(scores), "temperature": 0.07, "size": bench.subject.transform.size},
        ),
    )


def linear(arguments: LinearArguments, console: Console) -> None:
    bench = open_bench(arguments, console)
    quick = pick_mode(arguments.quick, arguments.augmented, bench.small)
    protocol = bench.subject.method if arguments.protocol == "auto" else arguments.protocol
    split = open_sources(bench, arguments, console)
    result = bench.linear(
        split,
        protocol=protocol,
        quick=quick,
        rates=arguments.rates,
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
    )
    mode = "quick" if quick else "augmented"
    title(console, f"Linear ({protocol}, {mode})", bench, split)
    table = Table(box=None, padding=(0, 2))
    for heading in ("rate", "best top-1", "top-5", "epoch", "last top-1", "top-5"):
        table.add_column(heading, justify="right")
    for best, last in zip(result.best_epochs(), result.last_epochs(), strict=True):
        chosen = best.rate == result.best.rate
        cells = [f"{best.rate:g}", f"{best.top1:.2f}", f"{best.top5:.2f}", str(best.epoch)]
        table.add_row(*cells, f"{last.top1:.2f}", f"{last.top5:.2f}", style="bold" if chosen else "")
    console.print(table)
    console.print(
        Text.assemble(
            "Best epoch of the best rate, as published: ",
            (f"{result.best.top1:.2f}", "bold"),
            f" (top-5 {result.best.top5:.2f})   last epoch: ",
            (f"{result.last.top1:.2f}", "bold"),
            f" (top-5 {result.last.top5:.2f})   (both chosen on the test images)",
        ),
        soft_wrap=True,
    )
    if result.further_rates():
        console.print(
            f"The best rate, {result.best.rate:g}, is still at the sweep's edge: try further --rates."
        )
    keep(
        bench,
        arguments,
        console,
        Result(
            protocol="linear",
            setting=f"{protocol}, {mode}",
            value=result.best.top1,
            metrics={
                "top1_best": result.best.top1,
                "top5_best": result.best.top5,
                "best_rate": result.best.rate,
                "best_epoch": result.best.epoch,
                "top1_last": result.last.top1,
                "top5_last": result.last.top5,
                "last_rate": result.last.rate,
                "rates": list(result.rates),
                "top1_best_by_rate": [score.top1 for score in result.best_epochs()],
                "top1_last_by_rate": [score.top1 for score in result.last_epochs()],
            },
            data=split.describe(),
            model=bench.describe_model(),
            settings={
                "protocol": protocol,
                "mode": mode,
                "epochs": len(result.top1),
                "batch_size": arguments.batch_size or linear_batch(protocol, len(split.train_ids)),
                "size": bench.subject.transform.size,
            },
        ),
    )


def fewshot(arguments: FewshotArguments, console: Console) -> None:
    bench = open_bench(arguments, console)
    sources = arguments.data or tuple(filter(None, [own_source(bench, arguments)]))
    if not sources:
        raise UserError("Which images? Name one or several data sets with --data.")
    setting = f"{arguments.ways}-way {arguments.shots}-shot"
    options = {name: getattr(arguments, name) for name in ("ways", "shots", "queries", "episodes")}
    unbalanced = pick_unbalanced(sources, arguments.per_class)
    rows = []
    for source in sources:
        accuracy, data = bench.fewshot(source, **options, per_class=source in unbalanced)
        rows.append((accuracy, data))
    title(console, f"Few-shot, {setting}, {arguments.episodes} episodes", bench)
    table = Table("data", "images", "accuracy", "95%", box=None, padding=(0, 2))
    for accuracy, data in rows:
        cells = (
            str(data["name"]),
            f"{data['images']:,}",
            f"{accuracy.mean:.2f}",
            f"± {accuracy.interval95:.2f}",
        )
        table.add_row(*cells)
    if len(rows) > 1:
        mean = sum(accuracy.mean for accuracy, _ in rows) / len(rows)
        table.add_row("average", "", f"{mean:.2f}", "", style="bold")
    console.print(table)
    for source, (accuracy, data) in zip(sources, rows, strict=True):
        settings = {"per_class": source in unbalanced, "seed": arguments.seed}
        keep(
            bench,
            arguments,
            console,
            Result(
                protocol="fewshot",
                setting=setting,
                value=accuracy.mean,
                metrics={"mean": accuracy.mean, "interval95": accuracy.interval95},
                data=data,
                model=bench.describe_model(),
                settings=options | settings | {"size": bench.subject.transform.size},
            ),
        )


def segmentation(arguments: SegmentationArguments, console: Console) -> None:
    side = None if Path(arguments.model).exists() else arguments.size or 224 * SEGMENTATION_SIZE
    bench = open_bench(arguments, console, side)
    quick = pick_mode(arguments.quick, arguments.augmented, bench.small)
    native = bench.subject.transform.size
    size = arguments.size or (native if side else native * SEGMENTATION_SIZE)
    data = arguments.data
    if data is None and arguments.train is None:
        data = own_source(bench, arguments)
    split = open_masked_split(data, arguments.train, arguments.test, size=native, seed=arguments.seed)
    say_found(split, console)
    result, num_classes = bench.segmentation(
        split,
        size=size,
        n_blocks=arguments.blocks,
        quick=quick,
        num_classes=arguments.classes,
        ignore=arguments.ignore,
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        lr=arguments.lr,
    )
    mode = "quick" if quick else "augmented"
    left_out = "".join(f", ignore {i}" for i in sorted(set(arguments.ignore)))
    title(console, f"Linear segmentation ({mode})", bench, split)
    table = Table("IoU", box=None, padding=(0, 2))
    for heading in ("best epoch", "last epoch"):
        table.add_column(heading, justify="right")
    scores = (result.best, result.last)
    table.add_row("mean", *(f"{score.miou:.2f}" for score in scores), style="bold")
    table.add_row("mean of the classes present", *(f"{score.miou_present:.2f}" for score in scores))
    for i, name in enumerate(class_names(split.train, num_classes)):
        if i not in arguments.ignore:
            table.add_row(f"  {name}", *(f"{score.iou[i]:.2f}" for score in scores))
    console.print(table)
    keep(
        bench,
        arguments,
        console,
        Result(
            protocol="segmentation",
            setting=f"mIoU, {mode}{left_out}",
            value=result.best.miou,
            metrics={
                "miou_best": result.best.miou,
                "miou_last": result.last.miou,
                "miou_present_best": result.best.miou_present,
                "iou_best": list(result.best.iou),
            },
            data=split.describe(),
            model=bench.describe_model(),
            settings={
                "classes": num_classes,
                "ignore": list(arguments.ignore),
                "blocks": arguments.blocks,
                "epochs": len(result.epochs),
                "lr": arguments.lr,
                "size": size,
                "mode": mode,
            },
        ),
    )


def table(arguments: TableArguments, console: Console) -> None:
    comparison = compare(list(arguments.runs))
    if arguments.format == "terminal":
        print_comparison(comparison, console)
    else:
        console.out({"markdown": to_markdown, "latex": to_latex}[arguments.format](comparison), end="")


def open_bench(arguments: Common, console: Console, size: int | None = None) -> Bench:
    """The encoder on its device; a word if nobody trained it."""
    from adasim.ranks.devices import pick_device

    subject = open_subject(
        arguments.model, random_weights=arguments.random_weights, size=size or arguments.size
    )
    if arguments.random_weights:
        console.print(f"{subject.name} has random weights: these figures are those of an untrained encoder.")
    if subject.note:
        console.print(subject.note, soft_wrap=True)
    return Bench(
        subject,
        device=pick_device(arguments.device),
        workers=arguments.workers,
        cached=not arguments.no_cache,
        seed=arguments.seed,
        say=lambda text: console.print(text, markup=False, soft_wrap=True),
    )


def open_sources(bench: Bench, arguments: Any, console: Console) -> Split:
    """The images that were asked for, or the run's own; how they were divided, if nobody said."""
    data = arguments.data
    if data is None and arguments.train is None:
        data = own_source(bench, arguments)
    size = bench.subject.transform.size
    split = open_split(data, arguments.train, arguments.test, size=size, seed=arguments.seed)
    say_found(split, console)
    return split


def pick_unbalanced(sources: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    """The data sets to be scored per class: those named (as with --data, or by their short names), or all."""
    if wanted is None:
        return []
    chosen = [source for source in sources if source in wanted or data_name(source) in wanted]
    known = {name for source in chosen for name in (source, data_name(source))}
    unknown = next((name for name in wanted if name not in known), None)
    if unknown is not None:
        raise UserError(f"--per-class {unknown} is none of the data sets {', '.join(sources)}.")
    return chosen if wanted else list(sources)


def say_found(split: Split, console: Console) -> None:
    """What images there are, what was left out, and how they were divided, if nobody said."""
    for sentence in [*split.found(), *([split.note] if split.note else [])]:
        console.print(sentence, soft_wrap=True)


def own_source(bench: Bench, arguments: Common) -> str | None:
    """The images that the run was trained on, if the model is a run."""
    from adasim.runs.folder import RunFolder

    if bench.subject.source is not None and Path(arguments.model).is_dir():
        RunFolder.open(Path(arguments.model), lock=False).check_source()
    return bench.subject.source


def pick_mode(quick: bool, augmented: bool, small: bool) -> bool:
    """Whether to be quick: as asked, or up to `SMALL` pixels."""
    if quick and augmented:
        raise UserError(
            f"--quick and --augmented exclude each other; quick is the default up to {SMALL} pixels."
        )
    return quick or (small and not augmented)


def title(console: Console, what: str, bench: Bench, split: Split | None = None) -> None:
    subject = bench.subject
    text = f" of {subject.name} ({subject.origin})"
    if split is not None:
        text += f" on {split.name}: {len(split.train_ids):,} training and {len(split.test_ids):,} test images"
    console.print(Text.assemble(("\n" + what, "bold"), text, ", in percent"), soft_wrap=True)


def keep(bench: Bench, arguments: Common, console: Console, result: Result) -> None:
    """Append to the run's results, or where --results says."""
    path = arguments.results or bench.subject.results_file
    if path is not None:
        append_result(path, result, str(bench.device))


COMMANDS: dict[str, tuple[type[Any], Callable[[Any, Console], None], str]] = {
    "knn": (KnnArguments, knn, "k-NN accuracy: DINO's weighted vote for k = 10, 20, 100, 200"),
    "linear": (
        LinearArguments,
        linear,
        "accuracy of a linear layer: DINO's or SimSiam's protocol, rates swept",
    ),
    "fewshot": (
        FewshotArguments,
        fewshot,
        "5-way 5-shot accuracy by prototypes, on one or several data sets",
    ),
    "segmentation": (SegmentationArguments, segmentation, "mean IoU of a linear layer on patch features"),
    "table": (TableArguments, table, "compare runs: the results side by side, also as Markdown or LaTeX"),
}


def main(arguments: Sequence[str]) -> None:
    """`adasim eval ...`"""
    console = terminal.console()
    if not arguments or arguments[0] in ("-h", "--help"):
        console.print(Text.assemble(("adasim eval", "bold"), " WHAT MODEL [options]\n"))
        lines = Table(box=None, padding=(0, 2), show_header=False)
        for name, (_, _, text) in COMMANDS.items():
            lines.add_row(Text(name, "bold"), text)
        console.print(lines)
        console.print(
            Text.assemble(
                "\nMODEL is a run folder, a backbone.safetensors, or a timm model name. Results are kept in the "
                "run's results.jsonl.\n",
                ("adasim eval WHAT --help", "bold"),
                " shows every option.",
            )
        )
        return
    if arguments[0] not in COMMANDS:
        raise UserError(f"Unknown evaluation {arguments[0]!r}. There are {', '.join(COMMANDS)}.")
    kind, run, _ = COMMANDS[arguments[0]]
    run(tyro.cli(kind, args=list(arguments[1:]), prog=f"adasim eval {arguments[0]}"), console)
