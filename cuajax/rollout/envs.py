"""Sandboxes ready for attempts: kept warm where a reset is enough, made anew for each attempt where it is not."""

from __future__ import annotations

import asyncio
import collections
import logging

from cuajax.sandbox.env import SandboxError
from cuajax.types import Env, Suite

log = logging.getLogger(__name__)
CLOSE_SECONDS = 30.0


class EnvPool:
    """Hands out sandboxes of a suite.

    With `reuse`, a healthy one returned goes to the next attempt (its `reset` must leave no trace of the last one),
    and at most `keep` wait idle; without, each is closed after its attempt.
    """

    def __init__(self, suite: Suite, *, reuse: bool, keep: int) -> None:
        self._suite, self._reuse, self._keep = suite, reuse, keep
        self._idle: collections.deque[Env] = collections.deque()
        self.provisioned = 0
        self.lost = 0  # closes that failed or hung

    async def warm(self, count: int) -> None:
        """Provision up to `count` sandboxes at once, before the first attempt. Raises SandboxError."""
        wanted = max(0, min(count, self._keep) - len(self._idle))
        self._idle.extend(await asyncio.gather(*(self._suite.provision() for _ in range(wanted))))
        self.provisioned += wanted

    async def acquire(self) -> Env:
        if self._idle:
            return self._idle.popleft()
        self.provisioned += 1
        return await self._suite.provision()

    async def give_back(self, env: Env, *, healthy: bool) -> None:
        if healthy and self._reuse and len(self._idle) < self._keep:
            self._idle.append(env)
            return
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await env.close()
        except (SandboxError, TimeoutError, OSError) as error:
            self.lost += 1  # its provider's reaper ends it
            log.warning("a sandbox did not close: %s: %s", type(error).__name__, error)

    async def close(self) -> None:
        """Close all idle sandboxes."""
        self._reuse = False
        idle = list(self._idle)
        self._idle.clear()
        await asyncio.gather(*(self.give_back(env, healthy=False) for env in idle))
