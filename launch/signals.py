"""How a serving or acting process is told to end: SIGTERM, or Ctrl-C. No jax."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Stop:
    """`with Stop() as stop: while not stop.wait(1.0): ...` ends the loop at the first signal; main thread only."""

    def __init__(self, *signals: signal.Signals) -> None:
        self._event = threading.Event()
        self._signals = signals or (signal.SIGTERM, signal.SIGINT)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        for number in self._signals:
            self._before[number] = signal.signal(number, lambda *_: self._event.set())
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> bool:
        """Whether the signal came, looked for during `seconds`."""
        return self._event.wait(seconds)
