"""Results on their way from the scheduler thread to the coroutine of a call."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from cuajax.serving.messages import PolicyError, Result, Sink

CODES = {code.name: code for code in grpc.StatusCode}


class Mailbox:
    """Results of one call, handed from the scheduler thread to the call's coroutine."""

    def __init__(self) -> None:
        self._results: list[tuple[int, Result]] = []
        self._ready = asyncio.Event()

    def put(self, index: int, result: Result) -> None:
        self._results.append((index, result))
        self._ready.set()

    async def take(self) -> list[tuple[int, Result]]:
        await self._ready.wait()
        self._ready.clear()
        results, self._results = self._results, []
        return results


def sink_into(loop: asyncio.AbstractEventLoop) -> Sink:
    """A sink for requests whose handles are (Mailbox, index), all of them read on `loop`."""

    def spread(results: list[tuple[Any, Result]]) -> None:
        for (mailbox, index), result in results:
            mailbox.put(index, result)

    def sink(results: list[tuple[Any, Result]]) -> None:
        try:
            loop.call_soon_threadsafe(spread, results)
        except RuntimeError:  # the server's loop closed: nobody waits any more
            return

    return sink


async def abort(context: grpc.aio.ServicerContext, error: PolicyError) -> None:
    """Ends a call with the status a fault stands for."""
    await context.abort(CODES[error.code], str(error))
