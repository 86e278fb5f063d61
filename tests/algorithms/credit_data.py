"""Small groups for the credit tests."""

from typing import Any

import numpy as np

from cuajax.types import Completion, Group, Outcome, Step, Task, Trajectory


def step(index, tokens, *, reason: Any = "stop", logprobs=None):
    logprobs = np.full(tokens, -1.0, np.float32) if logprobs is None else np.asarray(logprobs, np.float32)
    completion = Completion(
        token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=logprobs,
        versions=np.zeros(tokens, np.int32),
        finish_reason=reason,
    )
    return Step(index=index, prompt_ids=np.arange(3, dtype=np.int32), image_hashes=(), completion=completion)


def group(*attempts, state=None):
    """Attempts are (reward, [tokens of each step]); reward None is an invalid attempt. Steps may be given as Step."""
    trajectories = []
    for slot, (reward, steps) in enumerate(attempts):
        status = "invalid" if reward is None else "success" if reward == 1 else "failure"
        made = tuple(s if isinstance(s, Step) else step(i, s) for i, s in enumerate(steps))
        outcome = Outcome(status, 0.0 if reward is None else reward)
        trajectories.append(Trajectory(f"g/{slot}", "task", "g", slot, made, outcome))
    return Group("g", Task("task", "suite", "family", "do it"), tuple(trajectories), state=state)


def total(credit):
    """Sum of A * u over every token: the coefficient of the group's policy gradient, before the denominator."""
    return sum(float((a * u).sum()) for a, u in pairs(credit))


def pairs(credit):
    return [(a, u) for x, y in zip(*credit[:2], strict=True) for a, u in zip(x, y, strict=True)]
