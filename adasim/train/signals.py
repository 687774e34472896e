"""SIGINT and SIGTERM ask a run to stop: it finishes its step, saves, and ends."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequests:
    """While the context is open, the first signal sets `requested` and further ones change nothing.

    So a second Ctrl-C cannot cut a save short. Outside the main thread, where Python allows no handlers,
    signals keep their usual effect.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._request) for s in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # None: it was not Python's, and cannot be put back
                signal.signal(number, handler)  # type: ignore[arg-type]

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
