"""Where the system gives no more (files, memory, processes), a command says so in one sentence and leaves nothing."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import forked, names

from adasim.cli import main as cli
from adasim.util.machine import refused_by_system, require_enough

COMMANDS = {
    "pretrain": ["demo", "--out", "new"],
    "eval": ["knn", "RUN"],
    "embed": ["RUN", "--data", "synthetic:8", "--out", "f.npz"],
    "similar": ["RUN", "0", "--in", "synthetic:8"],
    "export": ["RUN", "--to", "timm"],
    "explore": ["RUN"],
    "apply": ["verdicts.csv", "--data", "photos", "--out", "new"],
    "gallery": ["RUN"],
    "plot": ["RUN"],
    "plan": ["demo"],
}


def limited(kind: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (value, value))


def in_a_process(folder: Path, arguments: list[str], limit: Callable[[], None]) -> tuple[int, str]:
    """Exit code and words of `adasim ARGUMENTS` under a limit, in that folder."""

    def work() -> None:
        os.chdir(folder)
        limit()
        try:
            cli.main(arguments)
        except SystemExit as error:
            print(f"code {error.code}", flush=True)

    _, said = forked(work)
    words, _, number = said.rpartition("code ")
    return int(number), words


@pytest.mark.parametrize("command", COMMANDS)
def test_too_few_open_files_are_refused_at_once_by_every_command(
    command: str, finished: Path, tmp_path: Path
) -> None:
    arguments = [str(finished) if word == "RUN" else word for word in COMMANDS[command]]
    code, said = in_a_process(tmp_path, [command, *arguments], limited(resource.RLIMIT_NOFILE, 18))
    assert code == 2
    assert "18 files open (ulimit -n)" in said
    assert said.count("\n") == 1
    assert names(tmp_path) == []


def test_an_address_space_too_small_for_the_libraries_is_refused_before_they_abort(tmp_path: Path) -> None:
    code, said = in_a_process(tmp_path, ["plan", "demo"], limited(resource.RLIMIT_AS, 2**30))
    assert code == 2
    assert "ulimit -v" in said
    assert said.count("\n") == 1


def test_a_soft_limit_on_open_files_is_raised_as_far_as_it_may_be() -> None:
    def work() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 512))
        require_enough()
        print(resource.getrlimit(resource.RLIMIT_NOFILE))

    assert forked(work) == (0, "(512, 512)\n")


RAN_OUT = {
    "ulimit -n": OSError(errno.EMFILE, "Too many open files"),
    "3.44 GB": RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 3435973837 bytes."
    ),
    "memory": MemoryError(),
    "20.00 MiB": RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has"),
    "ulimit -u": RuntimeError("can't start new thread"),
    "permission for no/encoder": PermissionError(errno.EACCES, "Permission denied", "no/encoder"),
    "container": BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
}


@pytest.mark.parametrize("word", RAN_OUT)
def test_a_command_that_runs_out_of_something_says_of_what_in_one_line(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: object) -> None:
        raise RAN_OUT[word]

    monkeypatch.setattr(cli, "run", fail)
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    said = capsys.readouterr().err
    assert stop.value.code == 1
    assert word in said
    assert said.count("\n") == 1


def test_other_errors_keep_their_traceback() -> None:
    assert refused_by_system(RuntimeError("shapes differ")) is None
    assert refused_by_system(FileNotFoundError(errno.ENOENT, "No such file")) is None


def test_a_process_that_may_start_no_thread_says_so_before_a_library_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(SystemExit):
        cli.main(["plan", "demo"])
    assert "ulimit -u" in capsys.readouterr().err
