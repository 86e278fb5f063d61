"""Names what stands still: an attempt stuck in one stage, or an event loop that does not turn.

It runs in its own thread, because a stuck event loop cannot report itself.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cuajax.rollout.episode import Record, clock

log = logging.getLogger(__name__)
QUIET = ("queued", "done")  # waiting for a turn is not a stall: whoever holds the turn is


@dataclass(frozen=True, slots=True)
class Stall:
    """One thing that has not moved for `seconds`; `stack` is where it stands."""

    attempt: str  # "" for the event loop itself
    stage: str  # prepare, prompt, policy, env, evaluate, or "event loop"
    seconds: float
    stack: str


OnStall = Callable[[Stall], None]


def tell(stall: Stall) -> None:
    """The default report: one warning in the log."""
    who = f"attempt {stall.attempt} has stood" if stall.attempt else "the rollout event loop has stood"
    log.warning("%s in %s for %.1f s at\n%s", who, stall.stage, stall.seconds, stall.stack)


class Watchdog:
    """Reports each stall once, `seconds` after the last sign of life. Start it inside the event loop it watches."""

    def __init__(self, live: Mapping[asyncio.Task, Record], *, seconds: float, on_stall: OnStall = tell) -> None:
        self._live, self._seconds, self._on_stall = live, seconds, on_stall
        self._told: set[tuple[str, str, float]] = set()
        self._end = threading.Event()
        self._beat = clock()
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="rollout-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join(timeout=5.0)

    def _watch(self) -> None:
        loop_told = False
        while not self._end.wait(min(self._seconds / 4, 5.0)):
            late = clock() - self._beat
            if late <= self._seconds:
                loop_told = False
                try:
                    self._loop.call_soon_threadsafe(self._look)
                except RuntimeError:  # the loop has closed
                    return
            elif not loop_told:
                loop_told = True
                frame = sys._current_frames().get(self._loop_thread)
                stack = "".join(traceback.format_stack(frame)) if frame else ""
                self._on_stall(Stall("", "event loop", late, stack))

    def _look(self) -> None:
        """In the loop: beat, and look at every attempt."""
        self._beat = clock()
        current: set[tuple[str, str, float]] = set()
        for task, record in self._live.items():
            still = self._beat - record.since
            if record.stage in QUIET or still <= self._seconds:
                continue
            key = (record.name.id, record.stage, record.since)
            current.add(key)
            if key not in self._told:
                self._on_stall(Stall(record.name.id, record.stage, still, _stack(task)))
        self._told = current


def _stack(task: asyncio.Task) -> str:
    """Where a task waits: its chain of coroutines, innermost last (Task.get_stack gives the outermost only)."""
    lines, waits = [], task.get_coro()
    while waits is not None:
        frame = getattr(waits, "cr_frame", None) or getattr(waits, "ag_frame", None)
        if frame is not None:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}\n')
        waits = getattr(waits, "cr_await", None) or getattr(waits, "ag_await", None)
    return "".join(lines)
