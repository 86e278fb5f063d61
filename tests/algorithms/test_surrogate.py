"""The loss half: per-token goldens, gradients, masks, and metrics that add up over microbatches."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from cuajax.algorithms import surrogate
from cuajax.types import PackedBatch

LN2, LN3 = math.log(2), math.log(3)


@functools.cache
def jitted(**hyper):
    return jax.jit(functools.partial(surrogate.policy_loss, **hyper))


def policy_loss(*arguments, **hyper):
    """surrogate.policy_loss, compiled once a set of hyper-parameters and shapes: op by op is slow."""
    return jitted(**hyper)(*arguments)


sft_loss = jax.jit(surrogate.sft_loss, static_argnames="entropy_coef")


def batch(behaviour, advantage, weight, *, prox=None, ref=None):
    """A PackedBatch [B,K] with only what a loss reads."""
    behaviour = jnp.asarray(behaviour, jnp.float32)
    rest: dict[str, Any] = dict.fromkeys(PackedBatch._fields)
    fill = {"behaviour_logp": behaviour, "advantage": advantage, "weight": weight, "prox_logp": prox, "ref_logp": ref}
    zeros = jnp.zeros_like(behaviour)
    rest |= {k: zeros if v is None else jnp.asarray(v, jnp.float32) for k, v in fill.items()}
    return PackedBatch(**rest)


def random_batch(seed=0, shape=(3, 5)):
    rng = np.random.default_rng(seed)
    logp = -rng.uniform(0.1, 3, shape)
    near = lambda scale: logp + rng.normal(0, scale, shape)  # noqa: E731
    made = batch(near(0.2), rng.normal(size=shape), rng.uniform(0.01, 1, shape), prox=near(0.1), ref=near(0.5))
    return jnp.asarray(logp, jnp.float32), jnp.asarray(rng.uniform(0, 2, shape), jnp.float32), made


# ------------------------------------------------------------------------------------------------- one token
@pytest.mark.parametrize(
    ("rho", "advantage", "dual_clip", "loss", "slope"),  # slope: d loss / d logp = -A * rho unless clipped away
    [
        (1.0, 1.0, 0.0, -1.0, -1.0),
        (1.0, -2.0, 0.0, 2.0, 2.0),
        (1.2, 1.0, 0.0, -1.2, -1.2),  # inside 1 + 0.28
        (1.5, 1.0, 0.0, -1.28, 0.0),  # max(-1.5, -1.28)
        (1.5, -1.0, 0.0, 1.5, 1.5),  # max(1.5, 1.28): a bad token that grew is pulled back in full
        (0.5, 1.0, 0.0, -0.5, -0.5),  # max(-0.5, -0.8)
        (0.5, -1.0, 0.0, 0.8, 0.0),  # max(0.5, 0.8)
        (0.75, -1.0, 0.0, 0.8, 0.0),
        (5.0, -1.0, 3.0, 3.0, 0.0),  # min(5, 3)
        (5.0, 1.0, 3.0, -1.28, 0.0),  # dual clip is for A < 0
        (2.0, -1.0, 3.0, 2.0, 2.0),
        (1.0, 0.0, 3.0, 0.0, 0.0),
    ],
)
def test_clipped_surrogate_golden(rho, advantage, dual_clip, loss, slope):
    def f(logp):
        return surrogate.clipped_surrogate(logp, jnp.float32(-1), jnp.float32(advantage), dual_clip=dual_clip)

    value, grad = jax.value_and_grad(f)(jnp.float32(-1 + math.log(rho)))
    assert float(value) == pytest.approx(loss, rel=1e-5)
    assert float(grad) == pytest.approx(slope, rel=1e-5, abs=1e-6)


def test_k3_golden():
    # d = ref - logp = ln 2: e^d - d - 1 = 2 - ln 2 - 1; d = -ln 2: 1/2 + ln 2 - 1; slope in logp is 1 - e^d.
    value, slope = jax.value_and_grad(surrogate.k3)(jnp.float32(-1), jnp.float32(-1 + LN2))
    assert float(value) == pytest.approx(1 - LN2, rel=1e-5)
    assert float(slope) == pytest.approx(-1, rel=1e-5)
    assert float(surrogate.k3(jnp.float32(-1), jnp.float32(-1 - LN2))) == pytest.approx(LN2 - 0.5, rel=1e-5)
    assert float(surrogate.k3(jnp.float32(-1), jnp.float32(-1))) == 0
    # A float32 e^d - d - 1 would lose this to rounding: d^2/2.
    assert float(surrogate.k3(jnp.float32(0), jnp.float32(1e-3))) == pytest.approx(5.0017e-7, rel=1e-3)


def test_truncated_weight_golden():
    weight = lambda prox: surrogate.truncated_weight(prox, jnp.float32(-2))  # noqa: E731
    assert float(weight(jnp.float32(-2 + math.log(1.5)))) == pytest.approx(1.5, rel=1e-5)
    assert float(weight(jnp.float32(-2 + LN3))) == 2
    assert float(jax.grad(weight)(jnp.float32(-2.1))) == 0


def test_extreme_ratios_stay_finite():
    for logp, behaviour in ((0.0, -1e4), (-1e4, 0.0)):
        for advantage in (1.0, -1.0):
            got = jax.value_and_grad(surrogate.clipped_surrogate)(*map(jnp.float32, (logp, behaviour, advantage)))
            assert all(np.isfinite(g) for g in got)
        assert np.isfinite(surrogate.k3(jnp.float32(logp), jnp.float32(behaviour)))


def test_batched_arrays_are_refused_at_the_door():
    with pytest.raises(AssertionError, match="rank"):
        surrogate.clipped_surrogate(jnp.zeros(3), jnp.zeros(3), jnp.zeros(3))
    logp, entropy, made = random_batch()
    with pytest.raises(AssertionError):
        surrogate.policy_loss(logp[0], entropy[0], made)


# ---------------------------------------------------------------------------------------------------- policy_loss
def test_policy_loss_golden():
    # Tokens: rho 1 with A 2, w .5; rho 2 with A 1 clipped at 1.28, w .25; padding.
    made = batch([[-1, -2, 7]], [[2, 1, 9]], [[0.5, 0.25, 0]], ref=[[-1 + LN2, -2 + LN2, 3]])
    logp = jnp.array([[-1, -2 + LN2, -5]])
    entropy = jnp.array([[0.4, 0.8, 2.0]])
    loss, metrics = policy_loss(logp, entropy, made)
    assert float(loss) == pytest.approx(0.5 * -2 + 0.25 * -1.28, rel=1e-5)
    # d = ln 2 and 0: k3 = 1 - ln 2 and 0. w * (beta k3 - c H) on top.
    loss, metrics = policy_loss(logp, entropy, made, kl_beta=0.1, entropy_coef=0.01)
    extra = 0.5 * (0.1 * (1 - LN2) - 0.004) + 0.25 * (0 - 0.008)
    assert float(loss) == pytest.approx(-1.32 + extra, rel=1e-5)
    got = surrogate.summary(metrics)
    # KL(behaviour, policy) by k3 on behaviour samples: ratio 1 gives 0, ratio 2 gives 2 - ln 2 - 1.
    want = {
        "tokens": 2, "weight": 0.75, "entropy": 0.6, "logp_gap": LN2 / 2, "logp_gap_max": LN2, "clip_high": 0.5,
        "clip_low": 0, "kl_ref": (1 - LN2) / 2, "kl_behaviour": (1 - LN2) / 2,
    }  # fmt: skip
    assert {k: got[k] for k in want} == pytest.approx(want, rel=1e-5, abs=1e-7)
    assert set(got) == {*want, "ratio_p1", "ratio_p50", "ratio_p99"}


def test_clip_fractions_by_side():
    # rho 2, .5, 2, .5 with A +, -, -, +: only the first two are cut off.
    logs = [[LN2, -LN2, LN2, -LN2]]
    made = batch([[0, 0, 0, 0]], [[1, -1, -1, 1]], [[1, 1, 1, 1]])
    got = surrogate.summary(policy_loss(jnp.array(logs), jnp.zeros((1, 4)), made)[1])
    assert (got["clip_high"], got["clip_low"]) == (0.25, 0.25)


def test_ratio_one_is_the_plain_policy_gradient():
    logp, entropy, made = random_batch()
    made = made._replace(behaviour_logp=logp)
    for hyper in ({}, {"dual_clip": 3.0}):
        grad = jax.grad(lambda x, h=hyper: policy_loss(x, entropy, made, **h)[0])(logp)
        np.testing.assert_allclose(grad, -made.weight * made.advantage, rtol=1e-6)


def test_decoupled_golden():
    # prox/behaviour = 1.5, policy/prox = 1.2: -A * 1.2 * 1.5; prox/behaviour = 3 is cut to C = 2.
    made = batch([[-2, -2]], [[1, 1]], [[1, 1]], prox=[[-2 + math.log(1.5), -2 + LN3]])
    logp = made.prox_logp + math.log(1.2)
    loss, _ = policy_loss(logp, jnp.zeros((1, 2)), made, correction="decoupled")
    assert float(loss) == pytest.approx(-1.2 * 1.5 - 1.2 * 2, rel=1e-5)
    loss, _ = policy_loss(logp, jnp.zeros((1, 2)), made, correction="decoupled", truncate=5)
    assert float(loss) == pytest.approx(-1.2 * 1.5 - 1.2 * 3, rel=1e-5)


def test_decoupled_is_none_when_prox_is_behaviour():
    logp, entropy, made = random_batch()
    made = made._replace(prox_logp=made.behaviour_logp)
    plain = jax.value_and_grad(lambda x: policy_loss(x, entropy, made)[0])(logp)
    other = jax.value_and_grad(lambda x: policy_loss(x, entropy, made, correction="decoupled")[0])(logp)
    np.testing.assert_allclose(plain[0], other[0], rtol=1e-6)
    np.testing.assert_allclose(plain[1], other[1], rtol=1e-6)


@pytest.mark.parametrize(
    "hyper",
    [{}, {"dual_clip": 3.0}, {"kl_beta": 0.1}, {"entropy_coef": 0.1}, {"correction": "decoupled", "kl_beta": 0.01}],
)
def test_gradients_match_finite_differences(hyper):
    logp, entropy, made = random_batch(3)
    anchor = made.prox_logp if hyper.get("correction") else made.behaviour_logp
    edges = jnp.array([0.8, 1.28])
    distance = jnp.abs(jnp.exp(logp - anchor)[..., None] - edges).min()
    assert distance > 5e-3  # no kink within the finite difference
    f = lambda x, h: policy_loss(x, h, made, **hyper)[0]  # noqa: E731
    check_grads(f, (logp, entropy), order=1, modes=["rev"], atol=1e-2, rtol=1e-2, eps=1e-3)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_masked_tokens_reach_neither_loss_nor_gradient(poison):
    logp, entropy, made = random_batch()
    mask = jnp.asarray(np.random.default_rng(1).uniform(size=logp.shape) < 0.5)
    clean = made._replace(weight=jnp.where(mask, made.weight, 0))
    dirt = lambda x: jnp.where(mask, x, poison)  # noqa: E731
    names = ("behaviour_logp", "advantage", "prox_logp", "ref_logp")
    dirty = clean._replace(**{n: dirt(getattr(made, n)) for n in names})
    hyper = {"correction": "decoupled", "kl_beta": 0.1, "entropy_coef": 0.1}
    for loss in (lambda x, h, b: policy_loss(x, h, b, **hyper), sft_loss):
        grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        want, got = grad(logp, entropy, clean), grad(dirt(logp), dirt(entropy), dirty)
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            np.testing.assert_array_equal(a, b)
        assert all((g[~mask] == 0).all() for g in got[1])


def test_loss_and_metrics_add_up_over_microbatches():
    logp, entropy, made = random_batch(shape=(4, 6))
    whole = policy_loss(logp, entropy, made, kl_beta=0.1)
    parts = [
        policy_loss(logp[i : i + 1], entropy[i : i + 1], jax.tree.map(lambda x, i=i: x[i : i + 1], made),
                              kl_beta=0.1)
        for i in range(4)
    ]  # fmt: skip
    np.testing.assert_allclose(sum(p[0] for p in parts), whole[0], rtol=1e-6)
    sums = jax.tree.map(lambda *x: sum(x), *[p[1]["sums"] for p in parts])
    maxima = jax.tree.map(lambda *x: max(x), *[p[1]["maxima"] for p in parts])
    merged, single = surrogate.summary({"sums": sums, "maxima": maxima}), surrogate.summary(whole[1])
    assert merged == pytest.approx(single, rel=1e-5)


def test_sft_golden():
    made = batch([[0, 0]], [[0, 0]], [[0.5, 0.25]])
    loss, metrics = sft_loss(jnp.array([[-1.0, -2.0]]), jnp.array([[1.0, 2.0]]), made, entropy_coef=0.1)
    assert float(loss) == pytest.approx(0.5 * (1 - 0.1) + 0.25 * (2 - 0.2), rel=1e-6)
    assert surrogate.summary(metrics)["nll"] == pytest.approx(1.5)


def test_policy_gradient_with_unit_advantage_at_ratio_one_is_sft():
    # What makes filtered behaviour cloning comparable with the policy losses: sft credit hands out A = 1.
    logp, entropy, made = random_batch()
    made = made._replace(advantage=jnp.ones_like(logp), behaviour_logp=logp)
    grads = [jax.grad(lambda x, f=f: f(x, entropy, made)[0])(logp) for f in (policy_loss, sft_loss)]
    np.testing.assert_allclose(*grads, rtol=1e-6)


# -------------------------------------------------------------------------------------------------------- metrics
@pytest.mark.parametrize("scale", [1e-4, 0.05, 1.0])
def test_histogram_quantiles_are_within_a_bin(scale):
    ratio = np.random.default_rng(0).normal(0, scale, (40, 100)).astype(np.float32)
    made = batch(np.zeros_like(ratio), np.ones_like(ratio), np.ones_like(ratio))
    _, metrics = policy_loss(jnp.asarray(ratio), jnp.zeros(ratio.shape), made)
    assert int(metrics["sums"]["log_ratio"].sum()) == ratio.size
    got = surrogate.histogram_quantiles(metrics["sums"]["log_ratio"], (0.01, 0.5, 0.99))
    want = np.quantile(ratio, [0.01, 0.5, 0.99])
    step = surrogate.EDGES[-1] / surrogate.EDGES[-2]  # ratio of neighbouring edges
    np.testing.assert_allclose(got, want, rtol=step - 1, atol=0.1 * scale)


def test_histogram_keeps_what_is_clipped_and_an_empty_one_is_zero():
    made = batch([[-1e3, 1e3, 0.0]], [[1, 1, 1]], [[1, 1, 1]])
    _, metrics = policy_loss(jnp.zeros((1, 3)), jnp.zeros((1, 3)), made)
    counts = np.asarray(metrics["sums"]["log_ratio"])
    assert (counts[0], counts[-1], counts.sum()) == (1, 1, 3)
    assert (surrogate.histogram_quantiles(np.zeros_like(counts), (0.5,)) == 0).all()
    _, metrics = policy_loss(jnp.zeros((1, 3)), jnp.zeros((1, 3)), made._replace(weight=jnp.zeros((1, 3))))
    assert all(np.isfinite(v) for v in surrogate.summary(metrics).values())


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"eps_low": 1.5}, "eps_low is 1.5, expected < 1"),
        ({"eps_high": -0.1}, "eps_high is -0.1, expected a finite number >= 0"),
        ({"eps_high": "0.2"}, "eps_high is '0.2', expected a finite number"),
        ({"kl_beta": float("nan")}, "kl_beta is nan"),
        ({"dual_clip": 0.5}, r"dual_clip is 0.5, expected 0 \(off\) or > 1"),
        ({"correction": "both"}, "correction is 'both', expected one of none, decoupled"),
        ({"truncate": 0}, "truncate is 0, expected > 0"),
    ],
)
def test_bad_hyper_parameters_are_named(hyper, message):
    with pytest.raises(ValueError, match=message):
        surrogate.PolicyHyper(**hyper)
    with pytest.raises(ValueError, match=message):
        surrogate.policy_loss(*random_batch(), **hyper)


def test_hyper_says_which_logprobs_to_score():
    assert not surrogate.PolicyHyper().needs_prox
    assert not surrogate.PolicyHyper().needs_ref
    assert surrogate.PolicyHyper(correction="decoupled").needs_prox
    assert surrogate.PolicyHyper(kl_beta=1e-3).needs_ref
