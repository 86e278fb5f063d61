"""Supervised learning on recorded responses: mid-training, demonstrations and filtered behaviour cloning."""

from __future__ import annotations

import numbers

from cuajax.algorithms import advantages
from cuajax.types import Credit, Group

AGGREGATES = ("response", "token")


def credit(group: Group, *, aggregate: str = "response", min_reward: float = 1.0) -> Credit:
    """Weights the responses of every valid trajectory with reward >= min_reward; A is 1 and the loss ignores it.

    response: u = 1/K, mass = responses. token: u = 1, mass = response tokens. A group of one will do.
    Raises RewardError on a bad reward, ValueError on a bad hyper-parameter.
    """
    advantages.choice("aggregate", aggregate, AGGREGATES)
    if isinstance(min_reward, bool) or not isinstance(min_reward, numbers.Real) or not 0.0 <= min_reward <= 1.0:
        raise ValueError(f"min_reward is {min_reward!r}, expected a number in [0, 1]")
    kept = {
        i: 1.0
        for i, t in enumerate(group.trajectories)
        if t.outcome.status != "invalid" and advantages.reward(t) >= min_reward
    }

    def unit(lengths: list[int]) -> list[float]:
        return [1.0 if aggregate == "token" else 1.0 / k if k else 0.0 for k in lengths]

    counts = [k for i in kept for k in advantages.lengths(group.trajectories[i])]
    mass = sum(counts) if aggregate == "token" else sum(k > 0 for k in counts)
    return advantages.spread(group, kept, unit)._replace(mass=float(mass))
