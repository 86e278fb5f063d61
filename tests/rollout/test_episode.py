import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest

from cuajax.data.images import image_hash
from cuajax.rollout.envs import EnvPool
from cuajax.rollout.episode import Agent, Limits, Name, Record, Stages, attempt
from cuajax.sandbox.env import SandboxLost
from cuajax.serving.client import Unavailable
from cuajax.types import Action, Outcome
from tests.rollout.scripted import DIALECT, HARNESS, Faulty, Knowing, Scripted, completion, say

NAME = Name("g/0.0", "g", 0)
ANY: Any = lambda value: value  # noqa: E731 (what no type checker would let through)


def run(suite, client, task, *, limits=None, harness=HARNESS, record=None):
    async def main():
        envs = EnvPool(suite, reuse=False, keep=0)
        agent = Agent.of(client, harness)
        stages = Stages(limits or Limits())
        return await attempt(task, suite, agent=agent, name=NAME, envs=envs, stages=stages, record=record)

    return asyncio.run(main())


def kind(step):
    return step.calls[0].action.kind


@pytest.mark.parametrize("family", ["check2", "type", "form", "infeasible", "slider", "put"])
def test_the_oracle_succeeds_through_the_whole_path(family):
    sim = Knowing()
    task = sim.task(family, 3)
    trajectory, images = run(sim, sim, task)
    assert trajectory.outcome == Outcome("success", 1.0, trajectory.outcome.reason)
    assert (trajectory.id, trajectory.group_id, trajectory.slot, trajectory.task_id) == (*NAME, task.id)
    assert kind(trajectory.steps[-1]) == "terminate"
    assert len(trajectory.steps) == sim.suite.oracle_length(task) + 1
    for i, step in enumerate(trajectory.steps):
        assert step.index == i and step.parse_error is None
        assert step.image_hashes == (step.screen_hash,) and step.screen_hash in images
        assert set(step.timings) == {"prompt", "policy", "env"} and min(step.timings.values()) >= 0
        assert step.prompt_ids.tobytes() == DIALECT.prompt_ids(task.instruction, (), 16).tobytes()
    assert all(image_hash(pixels) == digest for digest, pixels in images.items())
    assert {"prepare", "execute", "evaluate"} <= set(trajectory.timings)


def test_what_was_sent_is_what_is_recorded():
    sim = Knowing()
    client = Scripted(say("<wait>"), say("a", "b"), say("<done>"))
    trajectory, images = run(sim, client, sim.task("check1", 1))
    for step, (prompt, sampling) in zip(trajectory.steps, client.calls, strict=True):
        assert step.prompt_ids is prompt.token_ids
        assert step.image_hashes == tuple(image.hash for image in prompt.images)
        assert all(np.array_equal(images[image.hash], image.pixels) for image in prompt.images)
        assert sampling.stop_ids == DIALECT.stop_ids and sampling.max_tokens == DIALECT.max_tokens


def test_a_window_of_two_with_history():
    sim = Knowing()
    answers = [say("<x1>", "<y2>", "<move>"), say("a", "b"), say("<key:tab>"), say("<done>")]
    harness = dataclasses.replace(HARNESS, window=2, history=True)
    trajectory, images = run(sim, Scripted(*answers), sim.task("type", 1), harness=harness)
    screens = [step.screen_hash for step in trajectory.steps]
    assert [len(step.image_hashes) for step in trajectory.steps] == [1, 2, 2, 2]
    assert trajectory.steps[2].image_hashes == trajectory.steps[1].image_hashes  # nothing new to see after a misparse
    assert trajectory.steps[3].image_hashes == (screens[2], screens[3])
    for n, step in enumerate(trajectory.steps):
        past = np.concatenate([np.zeros(0, np.int32), *(a.token_ids for a in answers[:n])])
        assert step.prompt_ids[len(step.prompt_ids) - 1 - len(past) : -1].tolist() == past.tolist()
        assert (step.prompt_ids == 1).sum() == 16 * len(step.image_hashes) and set(step.image_hashes) <= images.keys()


def test_a_parse_error_is_a_step_and_the_attempt_goes_on():
    sim = Knowing()
    trajectory, _ = run(
        sim, Scripted(say("a", "b"), completion([], finish="length"), say("<done>")), sim.task("check1", 1)
    )
    first, second, third = trajectory.steps
    assert "no verb" in str(first.parse_error) and first.calls == () and "empty" in str(second.parse_error)
    assert first.screen_hash == second.screen_hash == third.screen_hash
    assert trajectory.outcome.status == "failure"


def test_the_budget_ends_it_and_it_is_scored_once():
    sim = Knowing(budget=4)
    trajectory, _ = run(sim, Scripted(say("<wait>")), sim.task("check1", 1))
    assert len(trajectory.steps) == 4 and trajectory.outcome.status == "failure"


def test_success_needs_no_terminate():
    sim = Knowing()
    task = sim.task("press1", 2)
    sim = Knowing(budget=sim.suite.oracle_length(task))
    trajectory, _ = run(sim, sim, sim.task("press1", 2))
    assert trajectory.outcome.reward == 1.0 and kind(trajectory.steps[-1]) != "terminate"


@pytest.mark.parametrize(
    ("fault", "at", "reason"),
    [
        (SandboxLost("gone"), 0, "SandboxLost: gone"),
        (SandboxLost("gone"), 2, "SandboxLost: gone"),
        ("hang", 0, "prepare"),
        ("hang", 1, "execute"),
    ],
)
def test_a_fault_of_the_sandbox_is_invalid_never_a_zero(fault, at, reason):
    sim = Knowing()
    suite = Faulty(sim, lambda n: fault if n == at else None)
    limits = Limits(prepare=0.05, execute=0.05)
    trajectory, _ = run(suite, Scripted(say("<wait>")), sim.task("check1", 1), limits=limits)
    assert trajectory.outcome.status == "invalid" and reason in trajectory.outcome.reason
    assert suite.opened == suite.closed == 1
    if at == 2:
        assert len(trajectory.steps) == 1  # the decision that was answered before is kept


@pytest.mark.parametrize("answer", [Unavailable("down"), say("<done>", finish="cancelled")])
def test_a_fault_of_the_policy_server_is_invalid(answer):
    sim = Knowing()
    trajectory, _ = run(sim, Scripted(say("<wait>"), answer), sim.task("check1", 1))
    assert trajectory.outcome.status == "invalid" and len(trajectory.steps) == 1


def test_logprobs_that_are_not_finite_are_refused():
    sim = Knowing()
    bad = say("<done>")
    bad.logprobs[0] = np.nan
    trajectory, _ = run(sim, Scripted(bad), sim.task("check1", 1))
    assert trajectory.outcome.status == "invalid" and "nan" in trajectory.outcome.reason


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (Outcome("success", float("nan")), "reward nan"),
        (Outcome("success", 1.5), "reward 1.5"),
        (Outcome("success", ANY("1")), "reward '1'"),
        (Outcome(ANY("won"), 1.0), "status 'won'"),
        (1.0, "returned float"),
        (KeyError("file"), "KeyError"),
        ("hang", "evaluate"),
    ],
)
def test_a_validator_that_misbehaves_is_invalid(verdict, reason):
    sim = Knowing()

    async def evaluate(task, env, last):
        if verdict == "hang":
            await asyncio.sleep(3600)
        if isinstance(verdict, BaseException):
            raise verdict
        return verdict

    sim.evaluate = evaluate  # type: ignore[method-assign]
    trajectory, _ = run(sim, Scripted(say("<done>")), sim.task("check1", 1), limits=Limits(evaluate=0.05))
    assert trajectory.outcome.status == "invalid" and reason in trajectory.outcome.reason
    assert trajectory.outcome.reward == 0.0


def test_cancelling_an_attempt_closes_its_sandbox():
    sim = Knowing()
    suite = Faulty(sim, lambda n: "hang" if n == 1 else None)

    async def main():
        envs, record = EnvPool(suite, reuse=False, keep=0), Record(NAME)
        agent = Agent.of(Scripted(say("<wait>")), HARNESS)
        running = asyncio.create_task(
            attempt(
                sim.task("check1", 1), suite, agent=agent, name=NAME, envs=envs, stages=Stages(Limits()), record=record
            )
        )
        while record.stage != "env":
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert suite.opened == suite.closed == 1


def test_the_pool_reuses_healthy_sandboxes_only():
    sim = Knowing()
    suite = Faulty(sim, lambda n: None)

    async def main():
        pool = EnvPool(suite, reuse=True, keep=2)
        await pool.warm(5)
        assert suite.opened == 2
        one, two, three = [await pool.acquire() for _ in range(3)]
        await pool.give_back(one, healthy=True)
        await pool.give_back(two, healthy=False)
        assert await pool.acquire() is one and suite.closed == 1
        await pool.give_back(one, healthy=True)
        await pool.give_back(three, healthy=True)
        await pool.close()

    asyncio.run(main())
    assert suite.opened == suite.closed == 3


def test_an_action_of_no_kind_the_attempt_knows():
    sim = Knowing()
    trajectory, _ = run(
        sim, Scripted(lambda p: completion(DIALECT.format(Action("move", x=0.5, y=0.5)))), sim.task("tab", 1)
    )
    assert all(kind(step) == "move" for step in trajectory.steps)
