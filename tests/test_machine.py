"""Threads that wait do not spin for long, and the demo says when others use the cores."""

import os
import subprocess
import sys
import time

import pytest

from adasim.cli.demo import tell_if_busy
from adasim.util import machine

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
SET = {"GOMP_SPINCOUNT": str(machine.SPINS), "KMP_BLOCKTIME": str(machine.SPIN_MILLISECONDS)}


def chosen() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has neither imported torch nor been told how to wait."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def test_importing_adasim_makes_threads_spin_briefly_in_this_process_and_in_those_it_starts() -> None:
    child = f"import os; print([os.environ.get(name) for name in {list(SET)}])"
    code = f"import sys, subprocess, adasim; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    env = {name: value for name, value in os.environ.items() if name not in NAMES}
    shown = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == str(list(SET.values()))


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_has_set_stays_and_nothing_is_added(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.spin_briefly()
    assert chosen() == SET
    for each in SET:
        monkeypatch.delenv(each)
    monkeypatch.setenv(name, "7")
    machine.spin_briefly()
    assert chosen() == {name: "7"}


@pytest.mark.usefixtures("untouched")
def test_nothing_is_set_once_torch_is_there_and_would_not_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    machine.spin_briefly()
    assert chosen() == {}


def test_the_demo_says_when_others_use_the_cores(capsys: pytest.CaptureFixture[str]) -> None:
    tell_if_busy(0.4, 2)
    assert capsys.readouterr().out == ""
    tell_if_busy(1.31, 2)
    shown = capsys.readouterr().out
    assert "Other processes use 1.3 of this machine's 2 cores" in shown
    assert "will take longer" in shown


def test_what_this_process_and_its_children_compute_is_not_counted_as_anothers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used, own = iter([100.0, 104.0]), iter([(9.0, 1.0, 0.0, 0.0, 0.0), (9.2, 1.2, 0.5, 0.1, 0.0)])
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(machine, "_used", lambda: next(used))
    monkeypatch.setattr(os, "times", lambda: next(own))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert machine.OtherProcesses().cores() == pytest.approx((4 - 1) / 2)


def test_busy_seconds_are_read_and_nobody_is_busy_where_the_system_does_not_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = machine._used()
    assert before is None or 0 < before <= (machine._used() or 0)
    monkeypatch.setattr(machine, "_used", lambda: None)
    monkeypatch.setattr(machine, "_SHORTEST", 0)
    assert machine.OtherProcesses().cores() == 0
