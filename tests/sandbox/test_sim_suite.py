"""The suite's contract: tasks, sandboxes, scores, any screen size."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cuajax.sandbox.env import Restorable, SandboxError, SandboxLost
from cuajax.sandbox.sim.families import NAMES
from cuajax.sandbox.sim.suite import SimEnv, SimSuite
from cuajax.types import Action, Env, Suite, Task
from tests.sandbox.sim_world import binned


def test_one_attempt_through_the_protocols() -> None:
    async def attempt(suite: Suite, task: Task) -> float:
        env: Env = await suite.provision()
        seen = await env.reset(task)
        assert isinstance(env, SimEnv) and isinstance(env, Restorable)
        action = None
        for _ in range(task.budget):
            action = env_oracle(suite, env)
            if action.kind == "terminate":
                break
            before, seen = seen, await env.step(action)
            assert seen.screenshot is not before.screenshot
            assert (seen.screenshot != before.screenshot).any(), "every right action shows"
        outcome = await suite.evaluate(task, env, action)
        await env.close()
        with pytest.raises(SandboxLost):
            await env.step(Action("wait"))
        return outcome.reward

    def env_oracle(suite: Suite, env: Env) -> Action:
        assert isinstance(suite, SimSuite) and isinstance(env, SimEnv)
        return suite.oracle(env)

    suite = SimSuite(families=("check2", "form"))
    for name in suite.families:
        assert asyncio.run(attempt(suite, suite.task(name, 5))) == 1.0


def test_task_record() -> None:
    suite = SimSuite()
    task = suite.task("check2", 17)
    assert (task.id, task.suite, task.family, task.feasible) == ("sim/check2/17", "sim", "check2", True)
    assert task.budget == 7 and SimSuite(budget=5).task("form", 0).budget == 5
    assert suite.task("form", 0).budget == 12 and suite.task("press1", 0).budget == 6
    assert suite.task("check2", 18).instruction != task.instruction


def test_unknown_family_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no sim family 'chek2'.*check2"):
        SimSuite().task("chek2", 0)
    with pytest.raises(ValueError, match="radiocheck"):
        SimSuite(families=("radiochek",))


@pytest.mark.parametrize(
    ("width", "height", "scale"), [(64, 64, 1), (128, 96, 1), (128, 128, 2), (200, 149, 1), (300, 210, 3), (65, 79, 1)]
)
def test_any_screen_size(width: int, height: int, scale: int) -> None:
    suite = SimSuite(width, height, scale=scale)
    for name in (*NAMES, "form+dialog", "tabcheck+menu"):
        for seed in range(12):
            task, env = suite.task(name, seed), SimEnv(suite)
            shot = env.reset_now(task).screenshot
            assert shot.shape == (height, width, 3) and shot.dtype == np.uint8 and shot.flags.c_contiguous
            action = suite.oracle(env)
            while action.kind != "terminate":
                env.step_now(action)
                action = suite.oracle(env)
            assert suite.evaluate_now(task, env, action).reward == 1


def test_scale_enlarges_pixel_by_pixel() -> None:
    one, three = SimSuite(64, 64), SimSuite(192, 192, scale=3)
    for name in NAMES:
        a, b = (s.screenshot(s.scene(s.task(name, 4)).desktop) for s in (one, three))
        assert (b == a.repeat(3, 0).repeat(3, 1)).all()


def test_small_screens_are_refused() -> None:
    for width, height, scale in ((63, 64, 1), (64, 64, 2), (64, 64, 0)):
        with pytest.raises(ValueError, match="4x4 cells"):
            SimSuite(width, height, scale=scale)


def test_attempts_at_one_task_do_not_meet() -> None:
    suite = SimSuite()
    task = suite.task("check1", 3)
    one, two = SimEnv(suite), SimEnv(suite)
    first = one.reset_now(task).screenshot.copy()
    one.step_now(binned(suite.oracle(one)))
    assert (two.reset_now(task).screenshot == first).all()


def test_snapshot_and_restore() -> None:
    async def go() -> None:
        suite = SimSuite()
        env = await suite.provision()
        await env.reset(suite.task("form", 2))
        saved = await env.snapshot()
        before = env.observe().screenshot
        for _ in range(3):
            await env.step(suite.oracle(env))
        assert (await env.restore(saved)).screenshot.tobytes() == before.tobytes()

    asyncio.run(go())
    assert issubclass(SandboxLost, SandboxError)
