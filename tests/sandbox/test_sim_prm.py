"""The exact process reward model agrees with the oracle and with the outcome."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from cuajax.sandbox.sim.families import NAMES
from cuajax.sandbox.sim.goals import met, remaining
from cuajax.sandbox.sim.prm import SimPRM
from cuajax.sandbox.sim.state import apply
from cuajax.sandbox.sim.suite import SimEnv, SimSuite
from cuajax.types import Action, Call, Completion, ProcessRewardModel, Step
from tests.sandbox.sim_world import COMPOSED, random_action

SUITE = SimSuite()
SUCCESS, FAILURE = Action("terminate", status="success"), Action("terminate", status="failure")


def step(*actions: Action, error: str | None = None) -> Step:
    nothing = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "stop")
    return Step(0, nothing.token_ids, (), nothing, tuple(Call(a) for a in actions), error)


@pytest.mark.parametrize("name", NAMES + COMPOSED)
def test_it_agrees_with_the_oracle(name: str) -> None:
    rng, prm = random.Random(name), SimPRM(SUITE)
    for seed in range(20):
        task, env, history = SUITE.task(name, seed), SimEnv(SUITE), []
        env.reset_now(task)
        assert env.desktop is not None and env.goal is not None
        while True:
            right = SUITE.oracle(env)
            assert prm.score_now(task, history, step(right)).reward == 1
            assert prm.score_now(task, history, step(FAILURE)).reward == (not task.feasible)
            assert prm.score_now(task, history, step(SUCCESS)).reward == met(env.desktop, env.goal)
            assert prm.score_now(task, history, step(Action("wait"))).reward == 0
            guess = random_action(rng)
            twin = env.desktop.copy()
            apply(twin, guess)
            nearer = remaining(twin, env.goal) < remaining(env.desktop, env.goal)
            assert prm.score_now(task, history, step(guess)).reward == nearer
            if right.kind == "terminate":
                break
            history.append(step(right))
            env.step_now(right)


def test_dead_ends_earn_nothing() -> None:
    prm, task = SimPRM(SUITE), SUITE.task("order2", 0)
    second, first = SUITE.scene(task).goal.presses[::-1]
    widgets = SUITE.scene(task).desktop.widgets

    def press(index: int) -> Step:
        return step(Action("click", (widgets[index].x + 7) / 64, (widgets[index].y + 5) / 64))

    assert prm.score_now(task, (), press(first)).reward == 1
    assert prm.score_now(task, (), press(second)).reward == 0
    for candidate in (press(first), step(SUCCESS), step(FAILURE)):
        assert prm.score_now(task, (press(second),), candidate).reward == 0


def test_what_is_no_action_scores_zero_and_calls_run_in_order() -> None:
    prm, task = SimPRM(SUITE), SUITE.task("check1", 1)
    env = SimEnv(SUITE)
    env.reset_now(task)
    plan = []
    while (action := SUITE.oracle(env)).kind != "terminate":
        plan.append(action)
        env.step_now(action)
    assert prm.score_now(task, (), step()).reward == 0
    assert prm.score_now(task, (), step(plan[0], error="cut short")).reward == 0
    assert prm.score_now(task, (), step(*plan, SUCCESS)).reward == 1
    assert prm.score_now(task, (), step(plan[0], SUCCESS)).reward == 0
    assert prm.score_now(task, (step(plan[0]), step(error="unparsed")), step(plan[1])).reward == 1


def test_the_protocol() -> None:
    prm: ProcessRewardModel = SimPRM(SUITE)
    task = SUITE.task("infeasible", 0)
    outcome = asyncio.run(prm.score(task, (), np.zeros((64, 64, 3), np.uint8), step(FAILURE)))
    assert (outcome.status, outcome.reward) == ("success", 1.0)
