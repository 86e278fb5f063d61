"""Group-relative advantages and the parts every credit function shares. NumPy only: rollout hosts import this."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cuajax.types import Credit, Group, Step, Trajectory

LEAST = 2  # valid trajectories a group-relative baseline needs


class CreditError(ValueError):
    """A group that must not be trained on; the pipeline quarantines it by name."""


class RewardError(CreditError):
    """A reward that is not a finite number in [0,1]."""


class LogprobError(CreditError):
    """A response whose behaviour logprobs are missing or not finite."""


def reward(trajectory: Trajectory) -> float:
    """The trajectory's reward as a float. Raises RewardError unless it is a finite number in [0,1]."""
    value: Any = trajectory.outcome.reward
    if not isinstance(value, numbers.Real):
        raise RewardError(f"{trajectory.id}: reward {value!r} is {type(value).__name__}, expected a number in [0, 1]")
    value = float(value)
    if not 0.0 <= value <= 1.0:  # also catches NaN
        raise RewardError(f"{trajectory.id}: reward {value!r} is outside [0, 1]")
    return value


def group_advantages(rewards: np.ndarray | Sequence[float], *, delta: float = 1e-6) -> np.ndarray:
    """Standardises the rewards of one group: A_i = (R_i - mean) / (std + delta), sample std (ddof 1).

    rewards: float[G], each trajectory once, G >= 2. Returns float32[G]; identical rewards give exactly 0.
    Raises RewardError on a non-finite reward, ValueError on a wrong shape or delta.
    Source: GRPO, arXiv:2402.03300; std and delta as in PRO-CUA's and ACuRL's code.
    """
    positive("delta", delta)
    values = np.asarray(rewards, np.float64)
    if values.ndim != 1 or values.size < LEAST:
        raise ValueError(f"rewards has shape {values.shape}, expected [G] with G >= {LEAST}")
    if not np.isfinite(values).all():
        raise RewardError(f"rewards {values.tolist()} are not all finite")
    if (values == values[0]).all():  # the mean of equal floats can differ from them in the last bit
        return np.zeros(values.size, np.float32)
    centred = values - values.mean()
    return (centred / (values.std(ddof=1) + delta)).astype(np.float32)


def in_loss(step: Step) -> bool:
    """Whether a step enters the loss: a cancelled or empty response is no decision of the policy."""
    return step.completion.finish_reason != "cancelled" and len(step.completion.token_ids) > 0


def trainable(group: Group, *, least: int = LEAST) -> bool:
    """Whether the group has enough valid trajectories for a baseline; one that has not is stored, not trained."""
    return len(group.valid) >= least


def has_signal(group: Group) -> bool:
    """Whether the group is trainable and its valid rewards differ. Raises RewardError."""
    return trainable(group) and len({reward(t) for t in group.valid}) > 1


def empty(group: Group) -> Credit:
    """The credit of a group that is stored, not trained: nothing to learn and no mass."""
    return Credit([[] for _ in group.trajectories], [[] for _ in group.trajectories], 0.0)


def relative(group: Group, *, delta: float) -> dict[int, float]:
    """Advantage of each valid trajectory by its index in `group.trajectories`, each counted once."""
    index = [i for i, t in enumerate(group.trajectories) if t.outcome.status != "invalid"]
    values = group_advantages([reward(group.trajectories[i]) for i in index], delta=delta)
    return dict(zip(index, values.tolist(), strict=True))


def lengths(trajectory: Trajectory) -> list[int]:
    """Response tokens of each step, 0 for a step that stays out of the loss."""
    return [len(s.completion.token_ids) if in_loss(s) else 0 for s in trajectory.steps]


def spread(group: Group, advantages: Mapping[int, float], unit: Callable[[list[int]], list[float]]) -> Credit:
    """Gives every token of a trajectory its advantage and every token of a step its step's weight; mass is left 0.

    advantages: by index in `group.trajectories`; the others get empty lists.
    unit: maps a trajectory's step lengths (0: outside the loss) to one weight a step.
    """
    result = empty(group)
    for i, advantage in advantages.items():
        trajectory = group.trajectories[i]
        counts = lengths(trajectory)
        for step, count, weight in zip(trajectory.steps, counts, unit(counts), strict=True):
            size = len(step.completion.token_ids)
            result.advantages[i].append(np.full(size, advantage, np.float32))
            result.weights[i].append(np.full(size, weight if count else 0.0, np.float32))
    return result


def check_logprobs(group: Group) -> None:
    """Raises LogprobError unless every trained response carries one finite behaviour logprob a token."""
    for trajectory in group.valid:
        used = [s for s in trajectory.steps if in_loss(s)]
        for step in used:
            tokens, found = len(step.completion.token_ids), len(step.completion.logprobs)
            if tokens != found:
                raise LogprobError(f"{trajectory.id} step {step.index}: {found} logprobs for {tokens} tokens")
        if used and not np.isfinite(np.concatenate([s.completion.logprobs for s in used])).all():
            raise LogprobError(f"{trajectory.id}: behaviour logprobs are not all finite")


def positive(name: str, value: float) -> None:
    """Raises ValueError unless value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not (0 < value < math.inf):
        raise ValueError(f"{name} is {value!r}, expected a finite number > 0")


def choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises ValueError unless value is one of choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
