"""PRM-GRPO: one-step candidates of one state, scored by a process reward model (PRO-CUA, arXiv:2605.29119)."""

from __future__ import annotations

from cuajax.algorithms import advantages
from cuajax.types import Credit, Group

AGGREGATES = ("token", "candidate")


def credit(group: Group, *, aggregate: str = "token", delta: float = 1e-6) -> Credit:
    """A_k = (r_k - mean) / (std + delta) over the G valid candidates of one state.

    token: u = 1, mass = response tokens (as the authors' code). candidate: u = 1/(G K), mass = 1 (equation 1).
    A zero-variance group keeps its mass with A = 0: it still pays KL.
    Raises ValueError without a state or with candidates of several steps, RewardError on a reward not in {0, 1}.
    """
    advantages.choice("aggregate", aggregate, AGGREGATES)
    advantages.positive("delta", delta)
    if group.state is None:
        raise ValueError(f"group {group.id} has no state, expected the candidates of one state (trajectory id, step)")
    for trajectory in group.valid:
        if len(trajectory.steps) != 1:
            raise ValueError(f"candidate {trajectory.id} has {len(trajectory.steps)} steps, expected 1")
        if advantages.reward(trajectory) not in (0.0, 1.0):
            raise advantages.RewardError(
                f"candidate {trajectory.id}: reward {trajectory.outcome.reward!r} is not 0 or 1"
            )
    if not advantages.trainable(group):
        return advantages.empty(group)
    advantages.check_logprobs(group)
    size = len(group.valid)
    tokens = sum(k for t in group.valid for k in advantages.lengths(t))

    def unit(lengths: list[int]) -> list[float]:
        return [1.0 if aggregate == "token" else 1.0 / (size * k) if k else 0.0 for k in lengths]

    result = advantages.spread(group, advantages.relative(group, delta=delta), unit)
    return result._replace(mass=float(tokens) if aggregate == "token" else 1.0)
