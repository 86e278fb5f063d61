"""What a sandbox may raise, and what it may offer beyond cuajax.types.Env."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from cuajax.types import Observation


class SandboxError(RuntimeError):
    """The world failed, not the policy: the attempt becomes `invalid`, never a reward of 0."""


class SandboxTimeout(SandboxError):
    """The sandbox did not answer within its limit; it may still be alive."""


class SandboxLost(SandboxError):
    """The sandbox is gone: dead container, closed channel, or used before reset."""


class SetupError(SandboxError):
    """The task's start state could not be made."""


@runtime_checkable
class Restorable(Protocol):
    """An Env that can go back: `restore(await snapshot())` shows the same screen again."""

    async def snapshot(self) -> Any: ...
    async def restore(self, snapshot: Any) -> Observation: ...
