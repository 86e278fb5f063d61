"""Drawing one token from one row of logits, unbatched; the engine vmaps it.

Order of operations: drop ids past the tokenizer, temperature, top-k, top-p, renormalise, draw. The reported
logprob belongs to exactly the distribution that was drawn from.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Knobs(NamedTuple):
    """Per-request sampling parameters; leading axes are free."""

    temperature: jax.Array  # float32[], 0: greedy
    top_p: jax.Array  # float32[], 1: off
    top_k: jax.Array  # int32[], 0: off
    seed: jax.Array  # uint32[2] high and low word


class Draw(NamedTuple):
    token: jax.Array  # int32[]
    logprob: jax.Array  # float32[]
    finite: jax.Array  # bool[], False: the logits were not usable and `token` means nothing
    support: jax.Array  # int32[W] kept ids in falling probability, padded with -1; W=0 without truncation
    count: jax.Array  # int32[] kept ids, 0 where nothing was truncated


def _kept(scaled: jax.Array, knobs: Knobs, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(mask bool[V], ids int32[W], count) of the ids that top-k, then top-p, leave."""
    top, ids = jax.lax.top_k(scaled, width)  # ties: the lower id first
    rank = jnp.arange(width)
    inside = rank < jnp.where(knobs.top_k > 0, knobs.top_k, width)
    # top-p is a share of what top-k left, except that without top-k it is a share of everything
    whole = jnp.where(knobs.top_k > 0, jax.nn.logsumexp(top, where=inside), jax.nn.logsumexp(scaled))
    mass = jnp.where(inside, jnp.exp(top - whole), 0.0)
    before = jnp.cumsum(mass) - mass
    keep = inside & (before < knobs.top_p) & jnp.isfinite(top)
    keep = keep.at[0].set(True)
    mask = jnp.zeros(scaled.shape, bool).at[ids].set(keep)
    return mask, jnp.where(keep, ids, -1), keep.sum(dtype=jnp.int32)


def sample(logits: jax.Array, knobs: Knobs, position: jax.Array, *, valid: int, width: int = 0) -> Draw:
    """Draws one token; the result depends on (logits, knobs, position) alone, not on batch mates.

    logits float32[V]; `position` is the index of the token in its answer and is folded into the seed; ids >= `valid`
    are never drawn. `width` > 0 compiles truncation in and bounds the kept set: at most `width` ids survive top-k or
    top-p, so that the returned support is always exact. Greedy rows ignore truncation and report the logprob at
    temperature 1 (that of the point mass would always be 0).
    """
    size = logits.shape[-1]
    ids = jnp.arange(size)
    logits = logits.astype(jnp.float32)
    finite = jnp.all(jnp.where(ids < valid, jnp.isfinite(logits), True))
    logits = jnp.where(ids < valid, logits, -jnp.inf)
    greedy = knobs.temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, knobs.temperature)
    support, count = jnp.zeros((0,), jnp.int32), jnp.zeros((), jnp.int32)
    if width:
        mask, support, count = _kept(scaled, knobs, min(width, size))
        cut = ~greedy & ((knobs.top_k > 0) | (knobs.top_p < 1))
        scaled = jnp.where(mask | ~cut, scaled, -jnp.inf)
        support, count = jnp.where(cut, support, -1), jnp.where(cut, count, 0)
    logp = jax.nn.log_softmax(scaled)
    key = jax.random.fold_in(jax.random.wrap_key_data(knobs.seed, impl="threefry2x32"), position)
    # Inverse CDF in id order: one uniform a token, where Gumbel noise would need one per vocabulary entry.
    # A parallel prefix sum may wobble by an ulp, so ids without mass are excluded by name and the target stays
    # strictly below the highest step that has mass: one always exists above it.
    mass = jnp.exp(logp)
    ladder = jnp.where(mass > 0, jnp.cumsum(mass), 0.0)
    top = ladder.max()
    target = jnp.minimum(jax.random.uniform(key) * top, jnp.nextafter(top, 0.0))
    drawn = jnp.argmax(ladder > target)
    token = jnp.where(greedy, jnp.argmax(scaled), drawn).astype(jnp.int32)
    return Draw(token, logp[token], finite & jnp.isfinite(logp[token]), support, count)
