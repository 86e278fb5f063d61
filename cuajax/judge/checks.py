"""The door every verdict passes: whatever a validator does wrong makes an attempt `invalid`, never a reward."""

from __future__ import annotations

import asyncio
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuajax.types import Action, Env, Outcome, ProcessRewardModel, Step, Suite, Task

# A validator is anyone's code. These are what ordinary mistakes raise; cancellation and exit are not among them.
VALIDATOR_FAULTS = (
    ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, ImportError, LookupError, MemoryError,
    NameError, OSError, RuntimeError, StopAsyncIteration, StopIteration, SyntaxError, TypeError, ValueError,
)  # fmt: skip


def checked(outcome: Any) -> Outcome:
    """The outcome itself, or an `invalid` one when it is no outcome, of no known status or not in [0,1]."""
    if not isinstance(outcome, Outcome):
        return Outcome("invalid", reason=f"the validator returned {type(outcome).__name__}, not an Outcome")
    if outcome.status not in ("success", "failure", "invalid"):
        return Outcome("invalid", reason=f"the validator returned status {outcome.status!r}")
    if not isinstance(outcome.reward, numbers.Real) or not 0.0 <= outcome.reward <= 1.0:
        return Outcome("invalid", reason=f"the validator returned reward {outcome.reward!r}, must lie in 0..1")
    return outcome


async def judged(
    prm: ProcessRewardModel,
    task: Task,
    history: Sequence[Step],
    *,
    screenshot: np.ndarray,
    candidate: Step,
    seconds: float,
) -> Outcome:
    """A process reward model's 0 or 1 for a candidate; its faults, delays and other rewards are `invalid`."""
    try:
        async with asyncio.timeout(seconds):
            outcome = checked(await prm.score(task, history, screenshot, candidate))
    except TimeoutError:
        return Outcome("invalid", reason=f"the reward model did not answer within {seconds:g} s")
    except VALIDATOR_FAULTS as error:
        return Outcome("invalid", reason=f"reward model: {type(error).__name__}: {error}")
    if outcome.status != "invalid" and outcome.reward not in (0.0, 1.0):
        return Outcome("invalid", reason=f"the reward model returned {outcome.reward!r}, must be 0 or 1")
    return outcome


async def verdict(suite: Suite, task: Task, env: Env, *, last: Action | None) -> Outcome:
    """Score an end state; what the validator raises is an `invalid` outcome that names it."""
    try:
        return checked(await suite.evaluate(task, env, last))
    except VALIDATOR_FAULTS as error:
        return Outcome("invalid", reason=f"validator: {type(error).__name__}: {error}")
