"""The command line.

    adasim demo                                       three minutes: generated images, AdaSim pairs, k-NN accuracy
    adasim pretrain RECIPE --data FOLDER --out RUN    pretrain an encoder; `adasim pretrain` lists the recipes
    adasim pretrain --resume RUN                      go on where RUN stopped, to the same bits (GPU: --deterministic)
    adasim eval knn RUN                               measure it; `adasim eval` lists the evaluations
    adasim embed RUN --data FOLDER --out F.npz        features of all images of a folder
    adasim similar RUN IMAGE --in FOLDER              the images most similar to one, as a table and a picture
    adasim export RUN --to timm                       for other libraries: timm, hf, onnx, pt2
    adasim explore RUN                                a page of neighbours, duplicates, wrong labels; any encoder, too
    adasim gallery RUN --pick intriguing              the paper's galleries: images with their support and p_win
    adasim plot RUN [RUN ...]                         curves of a run, or of several in one figure
    adasim plan RECIPE --data FOLDER                  memory, time and disk of a run here, before you start it
    adasim plan --images 14000000 --ranks 8           the same for a size and a number of processes, counted

Bad input gets one sentence and exit code 2. What a signal stopped ends with 128 + its number: 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from rich.table import Table
from rich.text import Text

from adasim.cli.options import load_plugins
from adasim.util import terminal
from adasim.util.errors import UserError, closest
from adasim.util.interrupts import Stopped, is_first
from adasim.util.machine import refused_by_system, require_enough

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("adasim.cli.demo", "three minutes on generated images: pretrain, then k-NN accuracy"),
    "pretrain": ("adasim.cli.pretrain", "pretrain an encoder on your images, or resume a run"),
    "eval": (
        "adasim.cli.evaluate",
        "measure an encoder: k-NN, linear, few-shot, segmentation, views; compare runs",
    ),
    "embed": ("adasim.cli.embed", "features of a folder of images: .npz, .parquet or .npy"),
    "similar": ("adasim.cli.similar", "the images most similar to one: a table and a picture"),
    "export": ("adasim.cli.export", "for other libraries: timm, Hugging Face, ONNX, pt2"),
    "explore": (
        "adasim.cli.explore",
        "a page to go through neighbours, duplicates, wrong labels and outliers",
    ),
    "gallery": ("adasim.cli.gallery", "images with their ranked support and p_win: a picture and tables"),
    "plot": ("adasim.cli.plot", "curves of one run, or of several in one figure"),
    "plan": ("adasim.cli.plan", "memory, time and disk of a run, before you start it"),
}
"""Each command's module, whose `main(arguments)` runs it, and a line about it."""


def show_commands() -> None:
    console = terminal.console()
    console.print(
        Text.assemble(
            ("adasim", "bold"),
            ": self-distillation on positive pairs from a learned neighbour distribution\n",
        )
    )
    table = Table(box=None, padding=(0, 2), show_header=False)
    for name, (_, text) in COMMANDS.items():
        table.add_row(Text(f"adasim {name}", "bold"), text)
    console.print(table)
    console.print(Text.assemble(("\nadasim COMMAND --help", "bold"), " explains each."))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; bad input ends with a sentence on standard error and exit code 2."""
    # PIL warns of damaged EXIF and of large photos, which are read all the same.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        try:
            run(sys.argv[1:] if arguments is None else arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, not when Python ends: a pipe or a disk may refuse
    except Exception as error:
        if isinstance(error, BrokenPipeError):
            terminal.discard_output()
            raise Stopped(signal.SIGPIPE) from None
        if isinstance(error, UserError):
            if is_first():
                terminal.complain(error)
            sys.exit(error.exit_code)
        if (sentence := refused_by_system(error)) is None:
            raise
        terminal.complain(sentence)
        sys.exit(1)
    if terminal.is_unread():
        raise Stopped(signal.SIGPIPE)
    if (problem := terminal.output_error()) is not None:
        terminal.complain(f"Not everything could be written to standard output: {problem.strerror}.")
        sys.exit(1)


def run(arguments: Sequence[str]) -> None:
    arguments = [expand_home(argument) for argument in arguments]
    if not arguments or arguments[0] in ("-h", "--help"):
        return show_commands()
    if arguments[0] == "--version":
        from adasim import __version__

        return print(f"adasim {__version__}")
    if arguments[0] not in COMMANDS:
        known = {**{name: name for name in COMMANDS}, "photos": "pretrain photos", "knn": "eval knn"}
        guess = "".join(f" Did you mean adasim {known[near]}?" for near in closest(arguments[0], known))
        raise UserError(f"Unknown command {arguments[0]!r}.{guess} The commands are {', '.join(COMMANDS)}.")
    require_enough()
    module, _ = COMMANDS[arguments[0]]
    import_module(module).main(load_plugins(arguments[1:]))  # not before: torch takes seconds to import


def expand_home(argument: str) -> str:
    """`--data=~/x` as people mean it: the shell expands the tilde of a word, but not within one."""
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    kind, colon, path = value.partition(":") if re.match(r"\w+:~", value) else ("", "", value)
    return option + equals + kind + colon + os.path.expanduser(path)
