"""GRPO over whole attempts (arXiv:2402.03300) with the aggregations in use for computer-use agents."""

from __future__ import annotations

from cuajax.algorithms import advantages
from cuajax.types import Credit, Group

AGGREGATES = ("trajectory", "token", "naive_step")


def credit(group: Group, *, aggregate: str = "trajectory", delta: float = 1e-6) -> Credit:
    """A_i on every token; the aggregate decides what weighs the same.

    trajectory: u = 1/N_i, mass = valid trajectories (NorthCUA's mean over complete attempts).
    token: u = 1, mass = response tokens (verl's token mean).
    naive_step: u = 1/K_it, mass = step samples (long trajectories dominate: the bias STEPO corrects, for ablation).
    Raises CreditError on a bad reward or logprob, ValueError on a bad hyper-parameter.
    """
    advantages.choice("aggregate", aggregate, AGGREGATES)
    advantages.positive("delta", delta)
    if not advantages.trainable(group):
        return advantages.empty(group)
    advantages.check_logprobs(group)
    result = advantages.spread(group, advantages.relative(group, delta=delta), _UNITS[aggregate])
    counts = [k for t in group.valid for k in advantages.lengths(t)]
    mass = {"trajectory": len(group.valid), "token": sum(counts), "naive_step": sum(k > 0 for k in counts)}
    return result._replace(mass=float(mass[aggregate]))


def _trajectory(lengths: list[int]) -> list[float]:
    total = sum(lengths)
    return [1.0 / total if k else 0.0 for k in lengths]


def _token(lengths: list[int]) -> list[float]:
    return [1.0] * len(lengths)


def _step(lengths: list[int]) -> list[float]:
    return [1.0 / k if k else 0.0 for k in lengths]


_UNITS = {"trajectory": _trajectory, "token": _token, "naive_step": _step}
