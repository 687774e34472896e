"""Threads that wait do not spin for long, and the demo says when others use the cores."""

import os
import subprocess
import sys

import pytest

from adasim.cli.demo import epochs_in_time, tell_if_busy, timed_epochs
from adasim.util import machine

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
SET = {"GOMP_SPINCOUNT": str(machine.SPINS), "KMP_BLOCKTIME": str(machine.SPIN_MILLISECONDS)}


def test_importing_adasim_makes_threads_spin_briefly_in_this_process_and_in_those_it_starts() -> None:
    child = f"import os; print([os.environ.get(name) for name in {list(SET)}])"
    code = f"import sys, subprocess, adasim; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    env = {name: value for name, value in os.environ.items() if name not in NAMES}
    shown = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == str(list(SET.values()))


@pytest.mark.parametrize("name", [*NAMES, "torch"])
def test_what_the_user_has_set_stays_and_nothing_is_set_once_torch_is_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in NAMES:
        monkeypatch.setenv(each, "")  # so that it is put back as it was
        monkeypatch.delenv(each)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    if name == "torch":
        monkeypatch.setitem(sys.modules, "torch", sys)
    else:
        monkeypatch.setenv(name, "7")
    machine.spin_briefly()
    assert {each: os.environ[each] for each in NAMES if each in os.environ} == (
        {} if name == "torch" else {name: "7"}
    )


def test_the_demo_says_when_others_use_the_cores(capsys: pytest.CaptureFixture[str]) -> None:
    tell_if_busy(0.4, 2)
    assert capsys.readouterr().out == ""
    tell_if_busy(1.31, 2)
    assert "1.3 of this machine's 2 cores" in capsys.readouterr().out


def test_the_demo_trains_fewer_epochs_where_all_would_take_much_more_than_three_minutes() -> None:
    assert epochs_in_time(1000, images=3000, most=60) == 60
    assert epochs_in_time(910, images=3000, most=60) == 60  # 198 s
    assert epochs_in_time(600, images=3000, most=60) == 30  # 150 s
    assert epochs_in_time(11, images=3000, most=60) == 20


def test_the_demo_times_again_before_it_calls_the_machine_slow() -> None:
    speeds = iter([138.0, 1758.0, 1.0])
    assert timed_epochs(lambda: next(speeds), 3000, 60) == (60, 1758.0)
    assert next(speeds) == 1.0  # not asked for
    slow = iter([100.0, 300.0, 200.0])
    assert timed_epochs(lambda: next(slow), 3000, 60) == (20, 300.0)
