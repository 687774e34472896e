"""Metrics to Weights & Biases or MLflow (`--log`), beside the run's own files.

A service may be slow, unreachable or out of order; a run neither waits for it nor ends by it. Lines go to a thread,
and what does not arrive is still in metrics.jsonl. Each service is set up as its users know it: by its own
environment variables, logins and offline modes.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from adasim.runs.folder import flatten
from adasim.util.errors import UserError

FILES = "files"
"""The word for no service."""
PROJECT = "adasim"
"""The project or experiment, where the service's own environment variable names none."""
WAIT_S = 30.0
"""Seconds that the end of a run waits for a service."""
_LINES = 10_000  # that may wait for a service; more are dropped
_TAG = "adasim.run"

Line = tuple[int, dict[str, Any]]


class Service(Protocol):
    """Where metrics go."""

    place: str
    """In words, where people find them."""

    def send(self, step: int, values: dict[str, Any]) -> None: ...

    def finish(self, complete: bool) -> None: ...


class Wandb:
    """A run of Weights & Biases whose id is the run's own, so that a resumed run goes on in it."""

    def __init__(self, identity: str, name: str, config: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=identity,
            name=name,
            resume="allow",
            config=config,
            settings=wandb.Settings(silent=True, console="off"),  # the terminal is the progress bar's
        )
        self._from = self._run.step  # steps below are there already
        offline = self._run.settings.mode == "offline"
        where = Path(self._run.dir).parent
        self.place = f"{where} (send it later with: wandb sync {where})" if offline else str(self._run.url)

    def send(self, step: int, values: dict[str, Any]) -> None:
        if step >= self._from:
            self._run.log(values, step=step)

    def finish(self, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)


class Mlflow:
    """A run of MLflow that bears the run's id as a tag, by which a resumed run finds it again."""

    def __init__(self, identity: str, name: str, config: dict[str, Any]) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = client = MlflowClient()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = client.get_experiment_by_name(experiment)
        number = client.create_experiment(experiment) if found is None else found.experiment_id
        known = client.search_runs([number], f"tags.`{_TAG}` = '{identity}'", max_results=1)
        self._last = -1
        if known:
            self._id = known[0].info.run_id
            self._last = max(
                (point.step for point in client.get_metric_history(self._id, "epoch")), default=-1
            )
            client.update_run(self._id, status="RUNNING")
        else:
            self._id = client.create_run(number, run_name=name, tags={_TAG: identity}).info.run_id
            settings = [Param(key, str(value)[:500]) for key, value in flatten(config).items()]
            for first in range(0, len(settings), 100):  # as many as it takes at once
                client.log_batch(self._id, params=settings[first : first + 100])
        self.place = f"{client.tracking_uri}, experiment {experiment}, run {self._id}"

    def send(self, step: int, values: dict[str, Any]) -> None:
        if step <= self._last:  # sent before the run was resumed from an earlier step
            return
        now = int(1000 * time.time())
        numbers = {name: float(value) for name, value in values.items()}
        metrics = [self._metric(name, x, now, step) for name, x in numbers.items() if math.isfinite(x)]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, complete: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if complete else "KILLED")


SERVICES: dict[str, Callable[[str, str, dict[str, Any]], Service]] = {"wandb": Wandb, "mlflow": Mlflow}


def check_installed(log: str) -> None:
    """Refuse, before a run begins, a service whose package is not there."""
    if log != FILES and not _is_installed(log):
        raise UserError(
            f"--log {log} needs {log}, which is not installed: pip install 'adasim[{log}]'. Without --log, metrics "
            f"go to the run folder alone."
        )


def open_tracker(
    log: str, identity: str, name: str, config: dict[str, Any], say: Callable[[str], None]
) -> Tracker:
    """A tracker of that service; one that only counts if the service cannot be reached, which is said."""
    try:
        service = SERVICES[log](identity, name, config)
    except Exception as error:  # of any make: networks, logins, disks
        say(f"Metrics do not go to {log}: {_reason(error)}. The run goes on; they are in its metrics.jsonl.")
        return Tracker(log, None, say)
    say(f"Metrics go to {log}, too: {service.place}")
    return Tracker(log, service, say)


class Tracker:
    """Hands lines to a service in a thread of its own."""

    def __init__(self, log: str, service: Service | None, say: Callable[[str], None]) -> None:
        self._log, self._say = log, say
        self._lines: queue.Queue[Line | bool] = queue.Queue()
        self._lost, self._problem, self._told = 0, "", False
        self._thread: threading.Thread | None = None
        if service is not None:
            self._thread = threading.Thread(
                target=self._send, args=(service,), name="adasim-log", daemon=True
            )
            self._thread.start()

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Send the numbers among the values, some time; returns at once."""
        if self._thread is None:
            return
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        if self._lines.qsize() < _LINES:
            self._lines.put((step, {name: float(value) for name, value in numbers.items()}))
        else:
            self._lost += 1
        if self._problem and not self._told:
            self._told = True
            self._say(f"{self._log} does not take metrics at the moment: {self._problem}. The run goes on.")

    def close(self, complete: bool = True) -> None:
        """Give the service some time for what it has not got yet."""
        if self._thread is None:
            return
        self._lines.put(complete)
        self._thread.join(WAIT_S)
        left = self._lines.qsize() if self._thread.is_alive() else 0
        if self._lost or left or self._thread.is_alive():
            why = f" ({self._problem})" if self._problem else ""
            self._say(
                f"{self._lost + left} lines of metrics did not reach {self._log}{why}; all are in metrics.jsonl."
            )
        self._thread = None

    def _send(self, service: Service) -> None:
        while True:
            line = self._lines.get()
            try:
                if isinstance(line, bool):
                    return service.finish(line)
                service.send(*line)
            except Exception as error:
                self._problem = _reason(error)
                self._lost += not isinstance(line, bool)
                if isinstance(line, bool):
                    return


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _reason(error: Exception) -> str:
    return (next(iter(str(error).strip().splitlines()), "") or type(error).__name__).rstrip(".")
