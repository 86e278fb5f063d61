"""STEPO: step-level policy optimisation of EvoCUA-1.5 (arXiv:2607.09773, section 4)."""

from __future__ import annotations

from cuajax.algorithms import advantages
from cuajax.types import Credit, Group


def credit(group: Group, *, delta: float = 1e-6) -> Credit:
    """A_i on every token, u = 1 / (T_i K_it): each trajectory weighs the same however many steps it took.

    The paper divides the advantage, A_it = A_i / T_i; min and clip are positively homogeneous, so the division
    sits in the weight. Summed over a group's steps A_i / T_i is 0. mass: the valid trajectories.
    Raises CreditError on a bad reward or logprob, ValueError on a bad hyper-parameter.
    """
    advantages.positive("delta", delta)
    if not advantages.trainable(group):
        return advantages.empty(group)
    advantages.check_logprobs(group)
    return advantages.spread(group, advantages.relative(group, delta=delta), _unit)._replace(
        mass=float(len(group.valid))
    )


def _unit(lengths: list[int]) -> list[float]:
    steps = sum(k > 0 for k in lengths)
    return [1.0 / (steps * k) if k else 0.0 for k in lengths]
