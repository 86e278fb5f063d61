"""Held-out evaluation: every task once or a few times, all at once under the stage limits, nothing stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cuajax.agent.harness import Harness
from cuajax.rollout.envs import EnvPool
from cuajax.rollout.episode import Agent, Limits, Name, Stages, attempt
from cuajax.types import PolicyClient, Suite, Task, Trajectory


async def evaluate(
    suite: Suite,
    client: PolicyClient,
    tasks: Sequence[Task],
    *,
    harness: Harness,
    samples: int = 1,
    temperature: float = 0.0,
    retries: int = 2,
    limits: Limits | None = None,
) -> list[Trajectory]:
    """`samples` attempts of each task, in the order of `tasks`; greedy at temperature 0.

    A fault of the world is tried again, `retries` times; what stays `invalid` is returned as such and must be
    counted apart from failures.
    """
    agent = Agent.of(client, harness, temperature=temperature)
    limits = limits or Limits()
    stages, envs = Stages(limits), EnvPool(suite, reuse=False, keep=0)

    async def one(task: Task, slot: int) -> Trajectory:
        for tried in range(retries + 1):
            name = Name(f"{task.id}/{slot}.{tried}", task.id, slot)
            trajectory, _ = await attempt(task, suite, agent=agent, name=name, envs=envs, stages=stages)
            if trajectory.outcome.status != "invalid":
                break
        return trajectory

    async with asyncio.TaskGroup() as running:
        every = [running.create_task(one(task, slot)) for task in tasks for slot in range(samples)]
    return [task.result() for task in every]
