"""An event loop in a thread of its own, and how its one coroutine's end reaches the thread that started it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class LoopThread:
    """Runs one coroutine in a new event loop in a daemon thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._result: concurrent.futures.Future | None = None
        self._thread: threading.Thread | None = None

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Start it. Raises RuntimeError when called twice."""
        if self._loop is not None:
            main.close()
            raise RuntimeError(f"{self._name} was started before; make a new one")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
        self._thread.start()
        self._result = asyncio.run_coroutine_threadsafe(main, self._loop)

    @property
    def done(self) -> bool:
        """Whether the coroutine has ended, well or not."""
        return self._result is not None and self._result.done()

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function in the loop, soon; nothing when it does not run (any more)."""
        if self._loop is not None and not self._loop.is_closed() and not self.done:
            self._loop.call_soon_threadsafe(function, *args)

    def check(self) -> None:
        """Raise what ended the coroutine early, if anything did."""
        if self._result is not None and self._result.done():
            _raise(self._result)

    def join(self) -> None:
        """Wait for the coroutine, then end the thread. Raises what ended it early."""
        if self._loop is None or self._thread is None or self._result is None:
            return
        try:
            _raise(self._result)
        finally:
            if not self._loop.is_closed():
                asyncio.run_coroutine_threadsafe(_wind_up(), self._loop).result()
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()


async def close(client: Any) -> None:
    """Closes a policy client in the loop it was used in, if it is one that can be closed.

    gRPC's end of a call that is dropped reaches the loop later, and is told as an error when the loop is gone by then.
    """
    if (end := getattr(client, "close", None)) is not None:
        await end()


async def _wind_up() -> None:
    """Lets what is still running in the loop end; cancels what does not within a second."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        _, late = await asyncio.wait(left, timeout=1.0)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


async def nap(wake: asyncio.Event, seconds: float) -> None:
    """Until `wake` is set, at most `seconds`."""
    wake.clear()
    handle = asyncio.get_running_loop().call_later(seconds, wake.set)
    await wake.wait()
    handle.cancel()


def _raise(result: concurrent.futures.Future) -> None:
    """The first of a group of failures is raised, with the group as its cause."""
    try:
        result.result()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
