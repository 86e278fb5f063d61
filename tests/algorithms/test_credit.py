"""Credit of every algorithm against numbers worked out by hand, and the identities they are chosen for."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuajax.algorithms import advantages, grpo, prm_grpo, sft, stepo
from tests.algorithms.credit_data import group, pairs, step, total

# Two attempts, rewards 1 and 0: mean 1/2, sample std sqrt((1/4 + 1/4) / 1) = 1/sqrt(2), so A = +-0.5 / 0.70710678.
A2 = 0.5 / (math.sqrt(0.5) + 1e-6)
# Rewards 1, 0, 0, 0: mean 1/4, squares (9/16 + 3/16) / 3 = 1/4, std 1/2: A = 0.75/0.5 = 1.5 and -0.25/0.5 = -0.5.
A4 = 0.75 / (0.5 + 1e-6), -0.25 / (0.5 + 1e-6)


def close(rows, expected):
    assert len(rows) == len(expected)
    for row, want in zip(rows, expected, strict=True):
        np.testing.assert_allclose(row, np.asarray(want, np.float32), rtol=1e-6)
        assert row.dtype == np.float32


# ---------------------------------------------------------------------------------------------------- advantages
def test_group_advantages_golden():
    np.testing.assert_allclose(advantages.group_advantages([1, 0]), [A2, -A2], rtol=1e-6)
    np.testing.assert_allclose(advantages.group_advantages([1, 0, 0, 0]), [A4[0], A4[1], A4[1], A4[1]], rtol=1e-6)
    # Partial credit 0, 0.5, 1: mean 1/2, std sqrt((1/4 + 0 + 1/4) / 2) = 1/2.
    np.testing.assert_allclose(advantages.group_advantages([0, 0.5, 1]), [-1, 0, 1], atol=3e-6)
    # PRO-CUA's closed form for c of G correct: std = sqrt(G/(G-1) * p * (1-p)), p = c/G; here c = 3, G = 8.
    std = math.sqrt(8 / 7 * 3 / 8 * 5 / 8)
    got = advantages.group_advantages([1, 1, 1, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(got[[0, 7]], [5 / 8 / std, -3 / 8 / std], rtol=1e-5)


@given(st.floats(0, 1), st.integers(2, 16))
def test_identical_rewards_give_exactly_zero(reward, size):
    got = advantages.group_advantages([reward] * size)
    assert (got == 0).all()


@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=16))
def test_advantages_sum_to_zero_and_keep_the_order(rewards):
    got = advantages.group_advantages(rewards)
    assert abs(got.sum()) < 1e-5
    assert (np.diff(got[np.argsort(rewards)]) >= 0).all()


@pytest.mark.parametrize("bad", ["1", None, float("nan"), float("inf"), -0.1, 1.0001, [1]])
@pytest.mark.parametrize("algorithm", [stepo, grpo, sft])
def test_a_bad_reward_is_a_typed_error(bad, algorithm):
    broken = group((1, [2]), (0.5, [2]))
    object.__setattr__(broken.trajectories[1].outcome, "reward", bad)
    with pytest.raises(advantages.RewardError, match=r"g/1: reward .*\[0, 1\]"):
        algorithm.credit(broken)
    with pytest.raises(advantages.RewardError):
        advantages.has_signal(broken)


def test_numpy_rewards_are_numbers():
    assert advantages.reward(group((np.float32(0.5), [1])).trajectories[0]) == 0.5


@pytest.mark.parametrize("algorithm", [stepo, grpo])
def test_bad_logprobs_are_a_typed_error(algorithm):
    with pytest.raises(advantages.LogprobError, match="g/0: behaviour logprobs are not all finite"):
        algorithm.credit(group((1, [step(0, 2, logprobs=[-1, float("nan")])]), (0, [2])))
    with pytest.raises(advantages.LogprobError, match="g/0 step 0: 0 logprobs for 2 tokens"):
        algorithm.credit(group((1, [step(0, 2, logprobs=[])]), (0, [2])))


def test_trainable_and_signal():
    assert advantages.trainable(group((1, [1]), (1, [1])))
    assert not advantages.has_signal(group((1, [1]), (1, [1])))
    assert advantages.has_signal(group((1, [1]), (0, [1])))
    lonely = group((1, [1]), (None, [1]), (None, []))
    assert not advantages.trainable(lonely)
    assert not advantages.has_signal(lonely)
    assert advantages.trainable(lonely, least=1)


@pytest.mark.parametrize("algorithm", [stepo, grpo])
def test_fewer_than_two_valid_attempts_are_stored_not_trained(algorithm):
    for attempts in ([(1, [1, 2])], [(1, [1]), (None, [2])], [(None, [1]), (None, [1])]):
        got = algorithm.credit(group(*attempts))
        assert got.mass == 0
        assert got.advantages == got.weights == [[] for _ in attempts]


# -------------------------------------------------------------------------------------------------------- stepo
def test_stepo_golden():
    # Attempt 0 has 2 steps of 2 and 1 tokens: u = 1/(2*2), 1/(2*1). Attempt 1 has 1 step of 4: u = 1/(1*4). B = 2.
    got = stepo.credit(group((1, [2, 1]), (0, [4])))
    close(got.advantages[0], [[A2, A2], [A2]])
    close(got.advantages[1], [[-A2] * 4])
    close(got.weights[0], [[1 / 4, 1 / 4], [1 / 2]])
    close(got.weights[1], [[1 / 4] * 4])
    assert got.mass == 2


def test_stepo_leaves_out_what_does_not_enter_the_loss():
    # An empty and a cancelled step do not count: T_0 = 1. The invalid attempt is in neither baseline nor B.
    cut = step(3, 2, reason="length")
    got = stepo.credit(group((1, [step(0, 0), step(1, 2, reason="cancelled"), 4]), (None, [1]), (0, [cut])))
    close(got.advantages[0], [[], [A2, A2], [A2] * 4])
    close(got.weights[0], [[], [0, 0], [1 / 4] * 4])
    assert got.advantages[1] == got.weights[1] == []
    close(got.weights[2], [[1 / 2, 1 / 2]])  # cut by the length limit: a normal step
    assert got.mass == 2


GROUPS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.lists(st.integers(1, 7), min_size=1, max_size=6)),
    min_size=2,
    max_size=8,
)


@given(GROUPS)
def test_stepo_steps_sum_to_zero_over_the_group(attempts):
    # EvoCUA-1.5: sum_i sum_t A_i / T_i = 0, whatever the lengths: with the mean over a step's tokens, sum of A * u.
    got = stepo.credit(group(*attempts))
    assert abs(total(got)) < 1e-6 * max(1, len(attempts))


@given(GROUPS)
def test_weights_sum_to_the_mass(attempts):
    g = group(*attempts)
    for got in (stepo.credit(g), *(grpo.credit(g, aggregate=a) for a in grpo.AGGREGATES)):
        assert sum(float(u.sum()) for _, u in pairs(got)) == pytest.approx(got.mass, rel=1e-5)


@given(GROUPS)
def test_duplicating_a_step_changes_naive_step_but_not_stepo(attempts):
    (reward, steps), *others = attempts
    doubled = group((reward, steps + steps), *others)
    plain = group(*attempts)

    def coefficient(credit):
        return sum(float((a * u).sum()) for a, u in zip(credit.advantages[0], credit.weights[0], strict=True))

    assert coefficient(stepo.credit(doubled)) == pytest.approx(coefficient(stepo.credit(plain)), abs=1e-5)
    naive = [coefficient(grpo.credit(g, aggregate="naive_step")) for g in (plain, doubled)]
    assert naive[1] == pytest.approx(2 * naive[0], rel=1e-4, abs=1e-6)


def test_naive_step_breaks_the_zero_sum_that_stepo_keeps():
    # A success of 1 step, a failure of 3: naive sums to A - 3A = -2A (the long failure dominates), STEPO to 0.
    g = group((1, [2]), (0, [2, 2, 2]))
    assert total(grpo.credit(g, aggregate="naive_step")) == pytest.approx(-2 * A2, rel=1e-5)
    assert total(stepo.credit(g)) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("reward", [0.0, 1 / 3, 1.0])
def test_zero_variance_keeps_its_mass_and_has_exactly_zero_advantage(reward):
    for got in (stepo.credit(group((reward, [3]), (reward, [1, 2]), (reward, [5]))),):
        assert got.mass == 3
        assert all((a == 0).all() for a, _ in pairs(got))


# --------------------------------------------------------------------------------------------------------- grpo
def test_grpo_golden():
    g = group((1, [2, 1]), (0, [4]), (0, [1]), (0, [1]))
    expected = {
        # N = 3, 4, 1, 1: u = 1/N_i, B = 4.
        "trajectory": ([[1 / 3, 1 / 3], [1 / 3]], [[1 / 4] * 4], 4),
        # u = 1, nine tokens.
        "token": ([[1, 1], [1]], [[1] * 4], 9),
        # u = 1/K, five step samples.
        "naive_step": ([[1 / 2, 1 / 2], [1]], [[1 / 4] * 4], 5),
    }
    assert set(expected) == set(grpo.AGGREGATES)
    for aggregate, (first, second, mass) in expected.items():
        got = grpo.credit(g, aggregate=aggregate)
        close(got.advantages[0], [[A4[0]] * 2, [A4[0]]])
        close(got.advantages[1], [[A4[1]] * 4])
        close(got.weights[0], first)
        close(got.weights[1], second)
        assert got.mass == mass


# ----------------------------------------------------------------------------------------------------- prm_grpo
STATE = ("trajectory", 4)


def test_prm_grpo_golden():
    # Four candidates of 2, 1, 3 and 2 tokens, one right: A = 1.5, -0.5, -0.5, -0.5.
    g = group((1.0, [2]), (0.0, [1]), (0.0, [3]), (0.0, [2]), (None, [9]), state=STATE)
    got = prm_grpo.credit(g)  # as the code: every token 1 / (all response tokens of the batch)
    close([a[0] for a in got.advantages[:4]], [[A4[0]] * 2, [A4[1]], [A4[1]] * 3, [A4[1]] * 2])
    close([u[0] for u in got.weights[:4]], [[1, 1], [1], [1, 1, 1], [1, 1]])
    assert got.advantages[4] == []
    assert got.mass == 8
    got = prm_grpo.credit(g, aggregate="candidate")  # as equation 1: 1/(groups * G * K) with G = 4 valid
    close([u[0] for u in got.weights[:4]], [[1 / 8, 1 / 8], [1 / 4], [1 / 12] * 3, [1 / 8] * 2])
    assert got.mass == 1


def test_prm_grpo_keeps_zero_variance_groups():
    got = prm_grpo.credit(group((0.0, [2]), (0.0, [3]), state=STATE))
    assert got.mass == 5
    assert all((a == 0).all() and (u == 1).all() for a, u in pairs(got))


def test_prm_grpo_candidates_average_tokens_first():
    # The token aggregate weighs a candidate by its length, the candidate aggregate does not.
    g = group((1.0, [1]), (0.0, [9]), state=STATE)
    assert total(prm_grpo.credit(g, aggregate="token")) == pytest.approx(A2 - 9 * A2, rel=1e-5)
    assert total(prm_grpo.credit(g, aggregate="candidate")) == pytest.approx(0, abs=1e-7)


def test_prm_grpo_refuses_other_groups():
    with pytest.raises(ValueError, match="has no state"):
        prm_grpo.credit(group((1, [1]), (0, [1])))
    with pytest.raises(ValueError, match="g/1 has 2 steps, expected 1"):
        prm_grpo.credit(group((1, [1]), (0, [1, 1]), state=STATE))
    with pytest.raises(advantages.RewardError, match=r"g/1: reward 0\.5 is not 0 or 1"):
        prm_grpo.credit(group((1, [1]), (0.5, [1]), state=STATE))
    assert prm_grpo.credit(group((1, [1]), (None, [1]), state=STATE)).mass == 0


# ---------------------------------------------------------------------------------------------------------- sft
def test_sft_golden():
    g = group((1, [2, 1]), (0.5, [4]), (None, [3]), (0, [1]))
    got = sft.credit(g)
    close(got.weights[0], [[1 / 2, 1 / 2], [1]])
    assert got.weights[1:] == [[], [], []]
    close(got.advantages[0], [[1, 1], [1]])
    assert got.mass == 2
    got = sft.credit(g, aggregate="token", min_reward=0.5)
    close(got.weights[0] + got.weights[1], [[1, 1], [1], [1] * 4])
    assert got.mass == 7


def test_sft_needs_no_group_and_no_logprobs():
    got = sft.credit(group((1, [step(0, 2, logprobs=[])])))
    assert got.mass == 1
    assert sft.credit(group((0, [2]), (None, [1]))).mass == 0


# ----------------------------------------------------------------------------------------------- hyper-parameters
@pytest.mark.parametrize(
    ("algorithm", "hyper", "message"),
    [
        (stepo, {"delta": 0}, "delta is 0, expected a finite number > 0"),
        (grpo, {"delta": float("nan")}, "delta is nan"),
        (grpo, {"aggregate": "mean"}, "aggregate is 'mean', expected one of trajectory, token, naive_step"),
        (prm_grpo, {"aggregate": "mean"}, "aggregate is 'mean', expected one of token, candidate"),
        (sft, {"aggregate": "mean"}, "aggregate is 'mean', expected one of response, token"),
        (sft, {"min_reward": 2}, r"min_reward is 2, expected a number in \[0, 1\]"),
    ],
)
def test_bad_hyper_parameters_are_named(algorithm, hyper, message):
    with pytest.raises(ValueError, match=message):
        algorithm.credit(group((1, [1]), (0, [1]), state=STATE), **hyper)


def test_credit_imports_no_jax():
    code = (
        "import sys; from cuajax.algorithms import advantages, grpo, prm_grpo, sft, stepo; "
        "assert not {'jax', 'jaxlib', 'tensorflow', 'chex'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
