"""The command line: finds the module of a command, and turns errors into one sentence and an exit code."""

from __future__ import annotations

import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from adasim.cli.options import load_plugins
from adasim.util import terminal
from adasim.util.errors import UserError, suggest
from adasim.util.interrupts import Stopped, is_first
from adasim.util.machine import refused_by_system, require_enough

HELP = """\
adasim: self-distillation on positive pairs from a learned neighbour distribution

    adasim demo       three minutes on generated images: pretrain, then k-NN accuracy
    adasim pretrain   pretrain an encoder on your images, or resume a run
    adasim eval       measure an encoder: k-NN, linear, few-shot, segmentation, views; compare runs
    adasim embed      features of a folder of images: .npz, .parquet or .npy
    adasim similar    the images most similar to one: a table and a picture
    adasim export     for other libraries: timm, Hugging Face, ONNX, pt2
    adasim explore    a page to go through neighbours, duplicates, wrong labels and outliers
    adasim apply      a folder written anew by the verdicts that you gave on that page
    adasim gallery    images with their ranked support and p_win: a picture and tables
    adasim plot       curves of one run, or of several in one figure
    adasim plan       memory, time and disk of a run, before you start it

adasim COMMAND --help explains each. Bad input gets one sentence and exit code 2. What a signal stopped ends with
128 + its number: 130 after Ctrl-C.
"""
COMMANDS = re.findall(r"^    adasim (\w+)", HELP, re.M)
"""Each has a module of its name, whose `main(arguments)` runs it."""


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
    except BrokenPipeError:
        terminal.discard_output()
        raise Stopped(signal.SIGPIPE) from None
    except UserError as error:
        if is_first():
            terminal.complain(error)
        sys.exit(error.exit_code)
    except Exception as error:
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
        return terminal.say(HELP.rstrip())
    if arguments[0] == "--version":
        from adasim import __version__

        return print(f"adasim {__version__}")
    command = arguments[0]
    if command not in COMMANDS:
        known = [*COMMANDS, "pretrain photos", "eval knn"]
        raise UserError(f"Unknown command {command!r}. {suggest(command, known, otherwise=COMMANDS)}")
    require_enough()
    module = import_module(f"adasim.cli.{'evaluate' if command == 'eval' else command}")
    module.main(load_plugins(arguments[1:]))


def expand_home(argument: str) -> str:
    """`--data=~/x` as people mean it: the shell expands the tilde of a word, but not within one."""
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    kind, colon, path = value.partition(":") if re.match(r"\w+:~", value) else ("", "", value)
    return option + equals + kind + colon + os.path.expanduser(path)
