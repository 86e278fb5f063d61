"""The train step: sums over microbatches, the non-finite guard, donation, dtypes, scoring."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cuajax.algorithms import surrogate
from cuajax.train import optimizer, state, step
from tests.train import toys

LOSS = functools.partial(surrogate.policy_loss, kl_beta=0.01, entropy_coef=0.01)


@functools.cache
def build(name="adamw", loss=LOSS):
    """(train step, a function that makes its first state), compiled once."""
    tx = optimizer.make_optimizer(1e-2, name=name, axes=toys.AXES, weight_decay=0.01)
    return step.make_train_step(toys.logprobs, loss, tx), lambda: state.create(toys.params(), tx)


def host(tree):
    return jax.tree.map(np.array, tree)


def assert_bitwise(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(host(a)), jax.tree.leaves(host(b)), strict=True):
        assert x.tobytes() == y.tobytes()


def test_one_step_is_the_optimizer_on_the_plain_gradient():
    # Plain SGD: params - lr * d loss / d params, with the loss summed over everything at once.
    tx = optax.sgd(0.1)
    train = step.make_train_step(toys.logprobs, LOSS, tx)
    batch = toys.microbatches(count=4)
    flat = jax.tree.map(lambda x: x[0], toys.regroup(batch, 1))
    loss, grads = jax.jit(jax.value_and_grad(lambda p: LOSS(*toys.logprobs(p, flat), flat)[0]))(toys.params())
    got, metrics = train(state.create(toys.params(), tx), batch)
    for x, p, g in zip(*map(jax.tree.leaves, (got.params, toys.params(), grads)), strict=True):
        np.testing.assert_allclose(x, p - 0.1 * g, rtol=1e-5, atol=1e-6)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-5)
    assert float(metrics["update_norm"]) == pytest.approx(0.1 * float(optax.tree.norm(grads)), rel=1e-5)
    assert (int(got.step), int(got.skipped)) == (1, 0)


def test_the_number_of_microbatches_changes_nothing():
    batch, (train, first) = toys.microbatches(count=1, rows=8), build()
    want, expected = train(first(), batch)
    for count in (2, 8):
        got, metrics = train(first(), toys.regroup(batch, count))
        for x, y in zip(jax.tree.leaves(want.params), jax.tree.leaves(got.params), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
        assert surrogate.summary(metrics) == pytest.approx(surrogate.summary(expected), rel=1e-4)


@pytest.mark.parametrize(("name", "count"), [("adamw", 1), ("muon", 2)])
def test_a_non_finite_update_changes_nothing_bit_for_bit(name, count):
    train, first = build(name)
    current = first()
    batch = toys.microbatches(count=count)
    current, _ = train(current, batch)
    before = host(current)
    bad = batch._replace(advantage=batch.advantage * np.nan)
    for i in (1, 2):
        current, metrics = train(current, bad)
        assert not np.isfinite(metrics["loss"])
        assert_bitwise((current.params, current.opt_state), (before.params, before.opt_state))
        assert (int(current.step), int(current.skipped), int(metrics["skipped"])) == (1 + i, i, i)
        assert float(metrics["update_norm"]) == 0
    current, metrics = train(current, batch)  # a good one resets the count
    assert int(current.skipped) == 0
    assert not np.array_equal(current.params["w"], before.params["w"])


def test_a_finite_loss_with_a_non_finite_gradient_is_skipped():
    def loss(logp, entropy, batch):
        total, metrics = surrogate.sft_loss(logp, entropy, batch)
        return total + jnp.sqrt(jnp.sum(logp) * 0), metrics  # value 0, slope 0 * inf

    train, first = build(loss=loss)
    current = first()
    before = host(current)
    current, metrics = train(current, toys.microbatches())
    assert np.isfinite(metrics["loss"])
    assert not np.isfinite(metrics["grad_norm"])
    assert_bitwise(current.params, before.params)
    assert int(current.skipped) == 1


def test_the_state_is_donated_and_nothing_recompiles():
    train, first = build()
    current, _ = train(first(), toys.microbatches(count=2, seed=9))
    old, compiled = jax.tree.leaves(current), train._cache_size()
    for seed in range(3):
        current, _ = train(current, toys.microbatches(count=2, seed=seed))
    assert all(x.is_deleted() for x in old)
    assert train._cache_size() == compiled


def test_bfloat16_computes_and_float32_keeps():
    seen = []

    def logprobs(params, batch):
        seen.append({p.dtype for p in jax.tree.leaves(params)})
        return toys.logprobs(params, batch)

    tx = optax.adam(1e-2)
    train = step.make_train_step(logprobs, LOSS, tx, compute_dtype=jnp.bfloat16)
    half, metrics = train(state.create(toys.params(), tx), toys.microbatches(count=2))
    assert all(dtypes == {jnp.dtype(jnp.bfloat16)} for dtypes in seen)
    assert {x.dtype for x in jax.tree.leaves((half.params, half.opt_state[0].mu))} == {jnp.dtype(jnp.float32)}
    train = step.make_train_step(toys.logprobs, LOSS, tx)
    _, full = train(state.create(toys.params(), tx), toys.microbatches(count=2))
    assert float(metrics["grad_norm"]) == pytest.approx(float(full["grad_norm"]), rel=0.05)


def test_the_step_learns():
    # Supervised on fixed targets: the negative log-likelihood falls by more than half.
    tx = optimizer.make_optimizer(optimizer.make_schedule(3e-2, warmup_steps=5), axes=toys.AXES)
    train = step.make_train_step(toys.logprobs, surrogate.sft_loss, tx)
    current, batch = state.create(toys.params(), tx), toys.microbatches()
    losses = []
    for _ in range(60):
        current, metrics = train(current, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]


def test_score_step_is_logprobs_of_every_microbatch():
    batch = toys.microbatches(count=3)
    got = step.make_score_step(toys.logprobs)(toys.params(), batch)
    assert got.shape == (3, 4, 5)
    for i in range(3):
        want, _ = toys.logprobs(toys.params(), jax.tree.map(lambda x, i=i: x[i], batch))
        np.testing.assert_allclose(got[i], want, rtol=1e-5)


def test_decoupled_through_scoring_equals_none_at_lag_zero():
    # Scored by the same params, prox / behaviour only rescales by a ratio that is 1 when behaviour is prox.
    batch = toys.microbatches(count=2)
    prox = step.make_score_step(toys.logprobs)(toys.params(), batch)
    batch = batch._replace(prox_logp=prox, behaviour_logp=prox)
    results = []
    for correction in ("none", "decoupled"):
        train, first = build(loss=functools.partial(surrogate.policy_loss, correction=correction))
        results.append(train(first(), batch))
    assert_bitwise(results[0][0].params, results[1][0].params)
    assert float(results[0][1]["maxima"]["logp_gap"]) < 1e-5


def test_state_splits_and_joins():
    current = build()[1]()
    assert_bitwise(state.join(*state.split(current)), current)
