import collections
from typing import Any

import msgspec
import numpy as np
import pytest

from cuajax.tasks.curriculum import (
    EVALUATION_SEEDS,
    TRAIN_SEEDS,
    Curriculum,
    delta,
    evaluation_seeds,
    fold,
    initial,
    sample,
    wants_infeasible,
    weight,
)
from cuajax.types import Group, Outcome, Task, Trajectory

C = Curriculum(("a", "b", "c", "no"), infeasible=("no",), infeasible_share=0.25)


def told(family, passed, valid, seed=1):
    return {"family": family, "seed": seed, "passed": passed, "valid": valid, "varied": 0 < passed < valid}


def rng(seed=0):
    return np.random.default_rng(seed)


def test_ema_by_hand():
    state = initial()
    for passed, want in ((8, 0.65), (4, 0.605), (0, 0.4235)):
        state = fold(state, told("a", passed, 8), C)
        assert state["units"]["a"]["p"] == pytest.approx(want)
    assert state["units"]["a"]["n"] == 3
    assert fold(state, told("a", 0, 0), C) is state  # no valid attempt says nothing


def test_fold_is_pure_and_plain():
    first = fold(initial(), told("a", 1, 2), C)
    before = msgspec.msgpack.encode(first)
    fold(first, told("a", 0, 2), C)
    fold(first, told("b", 0, 2), C)
    assert msgspec.msgpack.encode(first) == before
    assert msgspec.msgpack.decode(before) == first


def test_vas_weights():
    assert [weight({"p": p}, C) for p in (0.5, 0.1, 0.0, 1.0)] == pytest.approx([1.0, 0.36, 0.05, 0.05])
    assert weight({"p": 0.0}, Curriculum(("a",), mode="uniform")) == 1.0


def test_varied_draws_what_teaches():
    """a is always or never done, b now and then: by pass rates a is drawn more, by groups that differ b."""
    for mode, more in (("vas", "a"), ("varied", "b")):
        c, state = Curriculum(("a", "b"), mode=mode, beta=0.5), initial()
        for passed in (8, 0, 8, 0):
            state = fold(state, told("a", passed, 8), c)
            state = fold(state, told("b", 7, 8), c)
        weights = {family: weight(unit, c) for family, unit in state["units"].items()}
        assert max(weights, key=weights.__getitem__) == more
    assert state["units"]["a"]["varied"] == pytest.approx(0.5**5)
    assert state["units"]["b"]["varied"] == pytest.approx(1 - 0.5**5)
    assert weights["a"] == c.floor and weights["b"] == pytest.approx(1 - 0.5**5)


def seen(**rates):
    return {"units": {family: {"p": p, "varied": 0.5, "n": 5} for family, p in rates.items()}}


def test_vas_draws_in_proportion():
    state, draws = seen(a=0.5, b=0.1, c=1.0), rng()
    count = collections.Counter(sample(state, draws, C, index=0)[0] for _ in range(4000))
    total = 1 + 0.36 + 0.05
    for family, w in (("a", 1.0), ("b", 0.36), ("c", 0.05)):
        assert count[family] / 4000 == pytest.approx(w / total, abs=0.03)


def test_uniform_ignores_pass_rates():
    c = Curriculum(("a", "b"), mode="uniform")
    state, draws = seen(a=0.5), rng()
    count = collections.Counter(sample(state, draws, c)[0] for _ in range(2000))
    assert count["a"] == pytest.approx(1000, abs=100)


def test_unseen_units_come_first_unless_being_tried():
    state, draws = seen(a=0.5, b=0.5), rng()
    assert {sample(state, draws, C)[0] for _ in range(20)} == {"c"}
    assert "c" not in {sample(initial(), draws, C, busy={"c"})[0] for _ in range(20)}


def test_infeasible_share_is_exact_and_even():
    families = [sample(seen(a=0.5, b=0.5, c=0.5, no=0.9), rng(i), C, index=i)[0] for i in range(400)]
    assert families.count("no") == 100
    assert all(families[i : i + 8].count("no") == 2 for i in range(0, 400, 8))
    assert sum(wants_infeasible(i, Curriculum(("a", "x"), infeasible=("x",))) for i in range(1000)) == 80
    assert not any(wants_infeasible(i, Curriculum(("a",))) for i in range(100))


def test_seeds_of_training_and_evaluation_never_meet():
    assert TRAIN_SEEDS[1] <= EVALUATION_SEEDS[0]
    draws = rng()
    assert all(TRAIN_SEEDS[0] <= sample(initial(), draws, C)[1] < TRAIN_SEEDS[1] for _ in range(200))
    held_out = evaluation_seeds(64, start=5)
    assert len(held_out) == 64 and held_out[0] == EVALUATION_SEEDS[0] + 5 and held_out[-1] < EVALUATION_SEEDS[1]
    with pytest.raises(ValueError, match="outside"):
        evaluation_seeds(2, start=EVALUATION_SEEDS[1] - EVALUATION_SEEDS[0] - 1)


def test_a_fixed_pool_keeps_rates_by_task():
    c = Curriculum(("a", "b"), tasks_per_family=2)
    state = initial()
    for family, s in (("a", 0), ("a", 1), ("b", 0)):
        state = fold(state, told(family, 1, 2, s), c)
    assert sample(state, rng(), c) == ("b", 1)
    state = fold(state, told("b", 1, 2, 1), c)
    assert {sample(state, rng(i), c) for i in range(50)} == {("a", 0), ("a", 1), ("b", 0), ("b", 1)}


def test_sampling_repeats_from_state_and_rng():
    state = seen(a=0.3, b=0.6, c=0.5)
    one, two = rng(7), rng(7)
    first = [sample(state, one, C, index=i) for i in range(50)]
    assert first == [sample(state, two, C, index=i) for i in range(50)] and len({s for _, s in first}) == 50


def test_delta_counts_invalid_apart():
    task = Task("sim/a/7", "sim", "a", "x")
    outcomes: list[Any] = ["success", "failure", "invalid", "success"]
    group = Group("g", task, tuple(Trajectory(str(i), task.id, "g", i, (), Outcome(o)) for i, o in enumerate(outcomes)))
    counts = {"passed": 2, "valid": 3, "invalid": 1, "varied": False}
    assert delta(group, "a", 7) == {"family": "a", "seed": 7, **counts}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(families=("a",), infeasible=("a",)), "no feasible family"),
        (dict(families=("a",), infeasible=("b",)), r"\['b'\] are not among"),
        (dict(families=("a",), beta=1.5), "beta is 1.5"),
        (dict(families=("a",), floor=0.0), "floor is 0.0"),
        (dict(families=("a",), mode="best"), "choose 'uniform', 'vas' or 'varied'"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Curriculum(**options)
