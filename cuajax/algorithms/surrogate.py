"""The loss half of every algorithm: per-token functions, and their weighted sums over a packed batch.

Denominators live in `w` (cuajax.types.Sample), so every loss here is a plain sum and microbatches add up.
Metrics are two dicts: `sums` add over microbatches, `maxima` combine by maximum; `summary` turns them into figures.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from cuajax.types import PackedBatch

LIMIT = 20.0  # a log-ratio is clipped to [-20, 20] before exp
CORRECTIONS = ("none", "decoupled")
# Edges of the log-ratio histogram: symmetric, logarithmic in |log-ratio|, one bin around 0.
EDGES = np.concatenate([-np.geomspace(LIMIT, 1e-5, 73), np.geomspace(1e-5, LIMIT, 73)]).astype(np.float32)


@dataclass(frozen=True, slots=True)
class PolicyHyper:
    """Hyper-parameters of `policy_loss`; raises ValueError with value and limit. Building one checks a config early."""

    eps_low: float = 0.2
    eps_high: float = 0.28
    dual_clip: float = 0.0  # c of arXiv:1912.09729; 0: off
    kl_beta: float = 0.0
    entropy_coef: float = 0.0
    correction: str = "none"  # or "decoupled"
    truncate: float = 2.0  # C of the decoupled importance weight

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "correction":
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{field.name} is {value!r}, expected a finite number >= 0")
        if self.eps_low >= 1:
            raise ValueError(f"eps_low is {self.eps_low}, expected < 1")
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip is {self.dual_clip}, expected 0 (off) or > 1")
        if self.truncate <= 0:
            raise ValueError(f"truncate is {self.truncate}, expected > 0")
        if self.correction not in CORRECTIONS:
            raise ValueError(f"correction is {self.correction!r}, expected one of {', '.join(CORRECTIONS)}")

    @property
    def needs_prox(self) -> bool:
        """Whether `prox_logp` must be scored before the update."""
        return self.correction == "decoupled"

    @property
    def needs_ref(self) -> bool:
        """Whether `ref_logp` must be scored before the update."""
        return self.kl_beta > 0


# ------------------------------------------------------------------------------------------------ one token
def log_ratio(logp: jax.Array, old_logp: jax.Array) -> jax.Array:
    """Clipped log-ratio of one token, float32[] in [-20, 20]."""
    chex.assert_rank([logp, old_logp], 0)
    chex.assert_type([logp, old_logp], float)
    return jnp.clip(logp - old_logp, -LIMIT, LIMIT)


def clipped_surrogate(
    logp: jax.Array,
    behaviour_logp: jax.Array,
    advantage: jax.Array,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float = 0.0,
) -> jax.Array:
    """max(-A rho, -A clip(rho, 1-eps_low, 1+eps_high)) of one token; with dual_clip c, for A < 0 at most -A c.

    All float32[]. Source: PPO (arXiv:1707.06347, eq. 7), asymmetric as in ACuRL; dual clip arXiv:1912.09729.
    """
    chex.assert_rank(advantage, 0)
    chex.assert_type(advantage, float)
    rho = jnp.exp(log_ratio(logp, behaviour_logp))
    loss = jnp.maximum(-advantage * rho, -advantage * jnp.clip(rho, 1.0 - eps_low, 1.0 + eps_high))
    if dual_clip > 0:
        loss = jnp.where(advantage < 0, jnp.minimum(loss, -advantage * dual_clip), loss)
    return loss


def k3(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """e^d - d - 1 of one token with d = ref_logp - logp in [-20, 20]: an estimate >= 0 of KL(policy, reference).

    float32[]. Source: Schulman 2020, as in GRPO (arXiv:2402.03300, eq. 4) and PRO-CUA.
    """
    d = log_ratio(ref_logp, logp)
    return jnp.expm1(d) - d


def truncated_weight(prox_logp: jax.Array, behaviour_logp: jax.Array, *, truncate: float = 2.0) -> jax.Array:
    """Detached min(exp(prox - behaviour), C) of one token, float32[]. Source: decoupled PPO, arXiv:2110.00641."""
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio(prox_logp, behaviour_logp)), truncate))


# -------------------------------------------------------------------------------------------- a packed batch
def policy_loss(
    logp: jax.Array, entropy: jax.Array, batch: PackedBatch, **hyper: Any
) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
    """Sum over tokens of w * (surrogate + kl_beta * k3 - entropy_coef * H), and metrics.

    logp, entropy: float32[B,K]. hyper: the fields of PolicyHyper. Tokens of weight 0 are masked before any
    arithmetic, so what padding holds (NaN too) reaches neither loss nor gradient.
    correction 'none' takes the ratio against behaviour_logp; 'decoupled' against prox_logp, times truncated_weight.
    """
    h = PolicyHyper(**hyper)
    b = _masked(logp, entropy, batch)
    anchor = b["prox"] if h.needs_prox else b["behaviour"]
    surrogate = _tokens(clipped_surrogate, eps_low=h.eps_low, eps_high=h.eps_high, dual_clip=h.dual_clip)
    loss = surrogate(b["logp"], anchor, b["advantage"])
    if h.needs_prox:
        loss = loss * _tokens(truncated_weight, truncate=h.truncate)(b["prox"], b["behaviour"])
    kl = {"kl_behaviour": _tokens(k3)(b["behaviour"], b["logp"])}  # drawn from the behaviour policy: KL(it, policy)
    if h.needs_ref:
        kl["kl_ref"] = _tokens(k3)(b["logp"], b["ref"])
        loss = loss + h.kl_beta * kl["kl_ref"]
    if h.entropy_coef:
        loss = loss - h.entropy_coef * b["entropy"]

    ratio = _tokens(log_ratio)(b["logp"], anchor)
    high = (b["advantage"] > 0) & (jnp.exp(ratio) > 1.0 + h.eps_high)
    low = (b["advantage"] < 0) & (jnp.exp(ratio) < 1.0 - h.eps_low)
    metrics = _metrics(b, clip_high=high, clip_low=low, **kl)
    metrics["sums"]["log_ratio"] = _histogram(ratio, b["mask"])
    return jnp.sum(b["weight"] * loss), jax.lax.stop_gradient(metrics)


def sft_loss(
    logp: jax.Array, entropy: jax.Array, batch: PackedBatch, *, entropy_coef: float = 0.0
) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
    """Sum over tokens of w * (-logp - entropy_coef * H), and metrics. logp, entropy: float32[B,K]."""
    b = _masked(logp, entropy, batch)
    loss = -b["logp"] - entropy_coef * b["entropy"]
    return jnp.sum(b["weight"] * loss), jax.lax.stop_gradient(_metrics(b, nll=-b["logp"]))


def _masked(logp: jax.Array, entropy: jax.Array, batch: PackedBatch) -> dict[str, jax.Array]:
    weight = batch.weight
    tokens = [logp, entropy, batch.behaviour_logp, batch.advantage, batch.prox_logp, batch.ref_logp, weight]
    chex.assert_rank(tokens, 2)
    chex.assert_equal_shape(tokens)
    chex.assert_type(tokens, float)
    mask = weight > 0
    names = ("logp", "entropy", "behaviour", "advantage", "prox", "ref", "weight")
    values = {n: jnp.where(mask, jnp.asarray(v, jnp.float32), 0.0) for n, v in zip(names, tokens, strict=True)}
    return values | {"mask": mask}


def _tokens(function, **hyper):
    return jax.vmap(jax.vmap(lambda *args: function(*args, **hyper)))


def _metrics(b: dict[str, jax.Array], **extra: jax.Array) -> dict[str, dict[str, jax.Array]]:
    gap = jnp.abs(b["logp"] - b["behaviour"])
    values = {"entropy": b["entropy"], "logp_gap": gap, **extra}
    sums = {name: jnp.sum(jnp.where(b["mask"], v, 0), dtype=jnp.float32) for name, v in values.items()}
    sums["tokens"] = jnp.sum(b["mask"], dtype=jnp.int32)
    sums["weight"] = jnp.sum(b["weight"])
    return {"sums": sums, "maxima": {"logp_gap": jnp.max(gap, initial=0.0)}}


def _histogram(ratio: jax.Array, mask: jax.Array) -> jax.Array:
    bins = jnp.clip(jnp.searchsorted(EDGES, ratio.ravel(), side="right") - 1, 0, len(EDGES) - 2)
    return jnp.zeros(len(EDGES) - 1, jnp.int32).at[bins].add(mask.ravel().astype(jnp.int32))


# ------------------------------------------------------------------------------------------------- on the host
def summary(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Flat figures from a step's metrics: means over trained tokens, maxima, ratio quantiles, and the step's scalars.

    `logp_gap` means and maxima are the mismatch of sampler and learner when the batch's lag is 0.
    """
    sums = {k: np.asarray(v) for k, v in metrics["sums"].items()}
    tokens = float(sums.pop("tokens"))
    figures = {k: float(v) for k, v in metrics.items() if k not in ("sums", "maxima")}
    figures |= {"tokens": tokens, "weight": float(sums.pop("weight"))}
    if "log_ratio" in sums:
        quantiles = histogram_quantiles(sums.pop("log_ratio"), (0.01, 0.5, 0.99))
        figures |= dict(zip(("ratio_p1", "ratio_p50", "ratio_p99"), np.exp(quantiles).tolist(), strict=True))
    figures |= {k: float(v) / max(tokens, 1.0) for k, v in sums.items()}
    return figures | {f"{k}_max": float(v) for k, v in metrics["maxima"].items()}


def histogram_quantiles(counts: np.ndarray, quantiles: tuple[float, ...]) -> np.ndarray:
    """Log-ratio at each quantile from counts int[len(EDGES)-1], linear inside a bin; 0 when there are no counts."""
    counts = np.asarray(counts, np.float64)
    if not counts.sum():
        return np.zeros(len(quantiles))
    cumulative = np.concatenate([[0.0], np.cumsum(counts)]) / counts.sum()
    return np.interp(quantiles, cumulative, EDGES)
