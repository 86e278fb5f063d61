import asyncio
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from cuajax.judge.checks import VALIDATOR_FAULTS, checked, judged, verdict
from cuajax.types import Outcome, Step, Task

TASK = Task("t", "s", "f", "x")
NOTHING: Any = None
CANDIDATE = Step(0, np.zeros(1, np.int32), (), NOTHING)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.25, 1, True, np.float32(0.5), Fraction(1, 3)])
def test_sound_outcomes_pass(reward):
    outcome = Outcome("success", reward)
    assert checked(outcome) is outcome


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -0.1, 1.1, "1", None, 1j, [1.0], np.array([1.0, 0.0])])
def test_rewards_that_are_none(reward):
    outcome = checked(Outcome("success", reward))
    assert outcome.status == "invalid" and outcome.reward == 0.0 and "reward" in outcome.reason


@pytest.mark.parametrize("value", [None, 1.0, "success", ("success", 1.0)])
def test_what_is_no_outcome(value):
    assert checked(value).status == "invalid" and type(value).__name__ in checked(value).reason


def test_a_validator_that_raises():
    class Suite:
        async def evaluate(self, task, env, last):
            raise ZeroDivisionError("rate")

    outcome = asyncio.run(verdict(Suite(), TASK, None, last=None))  # type: ignore[arg-type]
    assert outcome == Outcome("invalid", reason="validator: ZeroDivisionError: rate")
    assert not any(issubclass(e, VALIDATOR_FAULTS) for e in (KeyboardInterrupt, SystemExit, asyncio.CancelledError))


def test_a_reward_model_is_binary_and_on_time():
    class Model:
        answer: Any = None

        async def score(self, task, history, screenshot, candidate):
            if isinstance(self.answer, float):
                await asyncio.sleep(self.answer)
            return self.answer

    def ask(answer):
        model: Any = Model()
        model.answer = answer
        asked = judged(model, TASK, [], screenshot=np.zeros((1, 1, 3), np.uint8), candidate=CANDIDATE, seconds=0.02)
        return asyncio.run(asked)

    assert ask(Outcome("success", 1.0)).reward == 1.0 and ask(Outcome("failure")).status == "failure"
    assert "0.5, must be 0 or 1" in ask(Outcome("failure", 0.5)).reason
    assert ask(5.0) == Outcome("invalid", reason="the reward model did not answer within 0.02 s")
