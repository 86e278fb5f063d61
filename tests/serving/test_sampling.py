"""Sampling against a NumPy reference: what is kept, what is reported, what is drawn."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cuajax.serving.sampling import Draw, Knobs, sample

V, VALID, WIDTH = 40, 36, 12
CASES = [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.6, 0), (1.0, 1.0, 5), (1.3, 0.8, 7), (0.5, 0.999, 0), (1.0, 1e-6, 0)]


MANY = 4000
KINDS = [(width, *case) for width in (0, WIDTH) for case in CASES if width or case[1:] == (1.0, 0)]


@functools.partial(jax.jit, static_argnames="width")
def draws(logits: jax.Array, knobs: Knobs, start: int = 0, *, width: int) -> Draw:
    """Tokens `start`..`start`+MANY of one request that always meets the same logits."""
    positions = start + jnp.arange(MANY)
    return jax.vmap(lambda p: sample(logits, knobs, p, valid=VALID, width=width))(positions)


def knobs(temperature: float, top_p: float = 1.0, top_k: int = 0, seed: int = 3) -> Knobs:
    return Knobs(jnp.float32(temperature), jnp.float32(top_p), jnp.int32(top_k), jnp.array([0, seed], jnp.uint32))


def reference(logits: np.ndarray, temperature: float, top_p: float, top_k: int, width: int) -> np.ndarray:
    """float64 log-probabilities of the truncated distribution, -inf where cut."""
    scaled = logits.astype(np.float64)
    scaled[VALID:] = -np.inf
    scaled = scaled / (temperature or 1.0)
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    if temperature and (top_k or top_p < 1):
        order = np.argsort(-p, kind="stable")
        order = order[: min(top_k or width, width)]
        share = p[order] / (p[order].sum() if top_k else 1.0)
        keep = order[np.cumsum(share) - share < top_p]
        cut = np.zeros_like(p)
        cut[keep] = p[keep]
        p = cut / cut.sum()
    with np.errstate(divide="ignore"):
        return np.log(p)


@pytest.mark.parametrize(("width", "temperature", "top_p", "top_k"), KINDS)
def test_matches_numpy(width: int, temperature: float, top_p: float, top_k: int) -> None:
    logits = np.random.default_rng(0).normal(size=V).astype(np.float32) * 2
    out = draws(jnp.array(logits), knobs(temperature, top_p, top_k), width=width)
    logp = reference(logits, temperature, top_p, top_k, WIDTH)
    tokens = np.asarray(out.token)
    assert np.abs(np.asarray(out.logprob) - logp[tokens]).max() < 1e-5
    frequency = np.bincount(tokens, minlength=V) / len(tokens)
    p = np.exp(logp)
    assert (np.abs(frequency - p) <= 5 * np.sqrt(p * (1 - p) / len(tokens)) + 1e-9).all()
    if width and (top_k or top_p < 1):
        kept = np.flatnonzero(np.isfinite(logp))
        assert int(out.count[0]) == len(kept)
        assert set(np.asarray(out.support[0])[: len(kept)].tolist()) == set(kept.tolist())
        assert (np.asarray(out.support[0])[len(kept) :] == -1).all()
    elif width:
        assert int(out.count[0]) == 0


def test_greedy_takes_the_first_maximum_and_reports_temperature_one() -> None:
    logits = np.zeros(V, np.float32)
    logits[[4, 9]] = 3.0
    logits[VALID] = 50.0  # past the tokenizer
    for width in (0, WIDTH):
        out = draws(jnp.array(logits), knobs(0.0, 0.1, 1), width=width)
        assert np.asarray(out.token).tolist() == [4] * MANY
        assert np.allclose(out.logprob, reference(logits, 0.0, 1.0, 0, WIDTH)[4], atol=1e-5)
        assert int(out.count[0]) == 0


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = jnp.array(np.random.default_rng(1).normal(size=V), jnp.float32)
    whole = draws(logits, knobs(1.0), width=0).token
    assert (draws(logits, knobs(1.0), 10, width=0).token[:-10] == whole[10:]).all()
    assert (draws(logits, knobs(1.0), width=WIDTH).token == whole).all()
    assert (draws(logits, knobs(1.0, seed=4), width=0).token != whole).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_unusable_logits_are_flagged(bad: float) -> None:
    logits = np.zeros(V, np.float32)
    logits[VALID + 1] = bad  # of an id that is never sampled: no matter
    assert bool(draws(jnp.array(logits), knobs(1.0), width=0).finite[0])
    logits[3] = bad
    assert not bool(draws(jnp.array(logits), knobs(1.0), width=0).finite[0])
