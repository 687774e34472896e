"""What a run does when it is asked to stop or to save: at once in words, then without losing anything."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from helpers import until
from PIL import Image
from pretrainings import STEP, WRITE, Ranks, Runs, arguments, at, digest, saved_steps, small

from adasim.api import pretrain
from adasim.util.interrupts import STOP, Interrupts, Stopped, StopRequests, requeue

pytestmark = pytest.mark.slow

ANSWER = "Stopping after this step and a save."


# A run


@pytest.mark.parametrize("call", [STEP, WRITE], ids=["in a step", "in a save"])
def test_the_first_interrupt_is_answered_at_once_and_a_second_one_leaves_at_once(
    runs: Runs, undisturbed: str, tmp_path: Path, call: str
) -> None:
    """Even while a call into C takes a minute; and what was saved before is whole."""
    run = runs.start(small(), tmp_path / "run", hooks=[at(call, 5, "be busy", when="before")], command=True)
    until(lambda: "busy" in run.said)
    os.kill(run.pid, signal.SIGINT)
    until(lambda: ANSWER in run.said)
    os.kill(run.pid, signal.SIGINT)
    assert run.wait() == 130
    assert "Traceback" not in run.said
    pretrain(small(), tmp_path / "run", resume=True)
    assert digest(tmp_path / "run") == undisturbed


def test_usr1_saves_and_the_run_goes_on_and_a_sigterm_that_comes_twice_at_once_is_one_request(
    runs: Runs, undisturbed: str, tmp_path: Path
) -> None:
    hooks = [at(STEP, 1, "signal USR1"), at(STEP, 4, "terminate"), at(STEP, 5, "terminate")]
    run = runs.start(small(save__keep=9), tmp_path / "run", hooks=hooks, command=True).ended(143)
    assert run.said.count("SIGUSR1: saving after this step.") == 1
    assert run.said.count(ANSWER) == 1
    assert "Stopped after step 5. Continue with: adasim pretrain --resume" in run.said
    assert saved_steps(tmp_path / "run") == [2, 3, 5]
    pretrain(small(), tmp_path / "run", resume=True)
    assert digest(tmp_path / "run") == undisturbed


def test_a_closed_pipe_stops_the_run_with_a_checkpoint_and_an_exit_code(runs: Runs, tmp_path: Path) -> None:
    """`adasim pretrain ... | head -n 1`"""
    config = small(views__in_memory=False, data__workers=2)
    run = runs.start(config, tmp_path / "run", hooks=[at(STEP, 3, "lose the reader")], command=True).ended(
        141
    )
    assert "Continue with: adasim pretrain --resume" in run.said
    assert "Traceback" not in run.said
    assert 3 <= saved_steps(tmp_path / "run")[-1] <= 5


def test_a_terminal_that_closes_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    """A real one: its end hangs up the run, whose words nobody can take any more."""
    out = tmp_path / "run"
    words = arguments(small(epochs=5000, save__every_epochs=0), out)
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execv(sys.executable, [sys.executable, "-m", "adasim", *words])
    os.set_blocking(terminal, False)

    def trains() -> bool:
        with suppress(BlockingIOError):
            os.read(terminal, 1 << 16)  # or the run would wait for somebody to read its words
        return (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_text()) > 2000

    until(trains)
    assert not any(out.glob("checkpoints/step-*"))
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 129
    assert digest(out)  # of the checkpoint that it left


def test_a_run_that_was_interrupted_in_its_last_step_is_complete_and_what_follows_is_not_started(
    runs: Runs, undisturbed: str, tmp_path: Path
) -> None:
    run = runs.start(small(), tmp_path / "run", hooks=[at(STEP, 12, "interrupt")], command=True).ended(130)
    assert "the run is complete" in run.said
    assert digest(tmp_path / "run") == undisturbed


def test_an_output_that_cannot_be_written_does_not_end_a_run(
    runs: Runs, undisturbed: str, tmp_path: Path
) -> None:
    """A log on a full disk: the run is there, and the command says what is missing."""
    run = runs.start(
        small(), tmp_path / "run", command=True, hooks=[at(STEP, 2, "write to a full disk")]
    ).ended(1)
    assert "Not everything could be written to standard output: No space left on device." in run.said
    assert digest(tmp_path / "run") == undisturbed


@pytest.fixture
def scontrol(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """The environment of a Slurm job, with a stand-in for its command; and the file where that notes its calls."""
    calls = tmp_path / "calls"
    calls.touch()
    command = tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    command.chmod(0o755)
    return {"SLURM_JOB_ID": "77", "PATH": f"{command.parent}:{os.environ['PATH']}"}, calls


def test_usr1_under_slurm_requeues_once(
    runs: Runs,
    whole: Callable[[int], tuple[Path, Ranks]],
    scontrol: tuple[dict[str, str], Path],
    tmp_path: Path,
) -> None:
    """Every process of the job gets the signal, twice; one of them asks, once; the job that starts again goes on."""
    env, calls = scontrol
    out, config = tmp_path / "run", small(epochs=3)
    hooks = [at(STEP, 4, "signal USR1"), at(STEP, 5, "signal USR1")]
    ranks = runs.start_ranks(config, out, 2, hooks=hooks, env=env).ended(138, 138)
    assert calls.read_text() == "requeue 77\n"
    assert "Slurm will start job 77 again." in ranks.said[0]
    assert ranks.said[1] == ""
    assert saved_steps(out) == [3, 5]
    runs.start_ranks(config, out, 2, env={**env, "SLURM_RESTART_COUNT": "1"}).ended()
    assert calls.read_text() == "requeue 77\n"
    assert digest(out) == digest(whole(2)[0])


def test_a_requeue_that_slurm_refuses_is_told(
    scontrol: tuple[dict[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho Job is not requeuable >&2\nexit 1\n")
    for name, value in scontrol[0].items():
        monkeypatch.setenv(name, value)
    assert "requeue job 77 and refused (Job is not requeuable): submit it again" in requeue()


# Before the first step, and without a run


@pytest.mark.parametrize("call", ["pretrain:open_images", "pretrain:build_state"])
def test_an_interrupt_while_a_run_is_made_leaves_without_a_traceback(
    runs: Runs, tmp_path: Path, call: str
) -> None:
    hooks = [at(f"adasim.train.{call}", 1, "interrupt")]
    run = runs.start(small(), tmp_path / "run", hooks=hooks, command=True).ended(130)
    assert run.said.endswith("adasim: Interrupted, leaving. Once more leaves at once.\n")
    assert "Traceback" not in run.said
    assert not (tmp_path / "run").exists()


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def workers(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def answers(pid: int) -> bool:
    """Whether the process has a handler for SIGUSR1: Python has none of its own."""
    caught = int(Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)


def test_interrupted_commands_leave_without_a_traceback(tmp_path: Path) -> None:
    """While Python still imports, and while an evaluation's loader processes are at work."""
    photos = tmp_path / "photos"
    for i in range(200):
        path = photos / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((64, 64 + i % 3, 3), i, np.uint8)).save(path)
    evaluation = ["eval", "knn", "resnet18", "--random-weights", "--data", str(photos)]
    moments: list[tuple[list[str], Callable[[int], bool], int]] = [
        (["pretrain", "demo"], answers, signal.SIGINT),
        (["pretrain", "demo"], lambda pid: "libtorch_cpu" in maps(pid), signal.SIGTERM),
        (evaluation, lambda pid: bool(workers(pid)), signal.SIGINT),
    ]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "adasim", *words],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd=tmp_path,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for words, _, _ in moments
    ]
    try:
        for process, (_, now, number) in zip(started, moments, strict=True):
            until(lambda process=process, now=now: now(process.pid))  # type: ignore[misc]
            os.killpg(process.pid, number)
        for process, (_, _, number) in zip(started, moments, strict=True):
            _, said = process.communicate(timeout=240)
            assert process.returncode == 128 + number, said
            assert said == "adasim: Interrupted, leaving. Once more leaves at once.\n"
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert not (tmp_path / "runs").exists()


# The mechanism


def interrupt_this_process() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)  # it is not waited for


def test_a_signal_is_remembered_from_one_context_to_the_next() -> None:
    """If a library swallowed the exception, the run that follows still knows that it is not wanted."""
    with Interrupts("", say=lambda text: None) as outer:
        with pytest.raises(Stopped, match="130"):
            interrupt_this_process()
        with StopRequests() as inner:
            assert inner.requested
        assert outer.received == signal.SIGINT


def test_an_answer_that_nobody_reads_does_not_keep_the_second_signal_waiting() -> None:
    """As in a pipe that is full, or on a connection that hangs."""
    if (child := os.fork()) == 0:
        with StopRequests(lambda text: time.sleep(60)):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.5)
            time.sleep(60)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130


def test_what_runs_under_nohup_stays_deaf_to_a_lost_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequests() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_to_a_forked_process_is_none_to_its_parent() -> None:
    """Ctrl-C reaches the loader's processes, too; it would count as a second one."""
    with StopRequests() as stop:
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
            os.kill(child, number)
        time.sleep(0.05)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not stop.requested


def test_its_threads_end_with_it_though_a_forked_process_lives_on() -> None:
    """As the loader's do at the end of a run; a thread that went on would free the networks while Python ends."""
    before, handlers = threading.enumerate(), [signal.getsignal(number) for number in STOP]
    with StopRequests():
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
    try:
        assert threading.enumerate() == before
        assert [signal.getsignal(number) for number in STOP] == handlers
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)

    def enter() -> None:
        with StopRequests() as stop:
            assert signal.getsignal(signal.SIGINT) is before
            assert not stop.requested

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
