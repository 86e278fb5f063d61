"""One attempt at one task: reset, then prompt -> generate -> parse -> step until it ends, then one verdict.

A fault of the world (sandbox, policy server, validator, deadline) makes the attempt `invalid`; only the end state
of a finished attempt makes a reward. A malformed answer is a step like any other: it changes nothing on the screen.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from cuajax.agent.actions import ParseError
from cuajax.agent.harness import Harness, Seen, prompt, see
from cuajax.judge.checks import verdict
from cuajax.sandbox.env import SandboxError
from cuajax.serving.client import PolicyError
from cuajax.types import (
    Action,
    Completion,
    Env,
    Observation,
    Outcome,
    PolicyClient,
    Sampling,
    Step,
    Suite,
    Task,
    Trajectory,
)

clock = time.perf_counter


class Agent(NamedTuple):
    """What decides: a client, the context policy it is prompted through, and how it samples."""

    client: PolicyClient
    harness: Harness
    sampling: Sampling

    @classmethod
    def of(
        cls, client: PolicyClient, harness: Harness, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
    ) -> Agent:
        """An agent whose answers end where its dialect's do; temperature 0 is greedy."""
        d = harness.dialect
        return cls(client, harness, Sampling(temperature, top_p, top_k, d.max_tokens, d.stop_ids))


class Name(NamedTuple):
    """Which attempt this is; the id joins case, workspace, record, verdict and training samples."""

    id: str
    group_id: str
    slot: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds each phase may take, waiting for its turn not counted; attempts alive, preparing and evaluating at once.

    `attempts` bounds the sandboxes that are held.
    """

    prepare: float = 120.0
    execute: float = 600.0
    evaluate: float = 120.0
    attempts: int = 1024
    preparing: int = 32
    evaluating: int = 64

    def __post_init__(self) -> None:
        for name in ("prepare", "execute", "evaluate", "attempts", "preparing", "evaluating"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Limits.{name} is {getattr(self, name)}, must be positive")


class Stages:
    """The turnstiles of a set of attempts that run in one event loop."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.attempts = asyncio.Semaphore(limits.attempts)
        self.prepare = asyncio.Semaphore(limits.preparing)
        self.evaluate = asyncio.Semaphore(limits.evaluating)


class Envs(Protocol):
    """Where sandboxes come from; `give_back` with healthy=False never hands that one out again."""

    async def acquire(self) -> Env: ...
    async def give_back(self, env: Env, *, healthy: bool) -> None: ...


@dataclass(slots=True)
class Record:
    """An attempt in progress, as far as it got; the watchdog reads `stage` and `since`."""

    name: Name
    stage: str = "queued"
    since: float = 0.0
    steps: list[Step] = field(default_factory=list)
    images: dict[str, np.ndarray] = field(default_factory=dict)
    last: Action | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # prepare, execute, evaluate; prompt, policy, env

    def enter(self, stage: str) -> float:
        self.stage, self.since = stage, clock()
        return self.since


@contextlib.asynccontextmanager
async def _phase(
    record: Record, stage: str, *, seconds: float, turnstile: asyncio.Semaphore | None = None
) -> AsyncIterator[None]:
    """Wait for a turn, then run the body under its deadline and time it."""
    record.enter("queued")
    async with turnstile or contextlib.nullcontext():
        start = record.enter(stage)
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise SandboxError(f"{record.stage} of phase {stage} outlived the phase's {seconds:g} s") from error
        finally:
            record.seconds[stage] = clock() - start


async def attempt(
    task: Task, suite: Suite, *, agent: Agent, name: Name, envs: Envs, stages: Stages, record: Record | None = None
) -> tuple[Trajectory, dict[str, np.ndarray]]:
    """Run one attempt to its verdict: (trajectory, pixels by hash of every image a prompt showed).

    Never raises for a fault of the world: the outcome is then `invalid` and names it.
    """
    record = record or Record(name)
    async with stages.attempts:
        try:
            outcome = await _run(task, suite, agent=agent, envs=envs, stages=stages, record=record)
        except (SandboxError, PolicyError) as error:
            outcome = Outcome("invalid", reason=f"{type(error).__name__}: {error}")
    record.stage = "done"
    steps, timings = tuple(record.steps), dict(record.seconds)
    trajectory = Trajectory(name.id, task.id, name.group_id, name.slot, steps, outcome, timings=timings)
    return trajectory, record.images


async def _run(task: Task, suite: Suite, *, agent: Agent, envs: Envs, stages: Stages, record: Record) -> Outcome:
    """The three phases; the sandbox goes back whatever happens, for reuse only after a verdict."""
    limits = stages.limits
    env: Env | None = None
    healthy = False
    try:
        async with _phase(record, "prepare", seconds=limits.prepare, turnstile=stages.prepare):
            env = await envs.acquire()
            first = await env.reset(task)
        async with _phase(record, "execute", seconds=limits.execute):
            await act(task, env, first, agent=agent, record=record)
        async with _phase(record, "evaluate", seconds=limits.evaluate, turnstile=stages.evaluate):
            outcome = await verdict(suite, task, env, last=record.last)
        healthy = outcome.status != "invalid"
        return outcome
    finally:
        if env is not None:
            await envs.give_back(env, healthy=healthy)


async def act(task: Task, env: Env, first: Observation, *, agent: Agent, record: Record) -> None:
    """Decide until terminate or the budget ends, adding each step to `record`; the hot loop.

    Raises SandboxError or PolicyError; the steps before it are in the record.
    """
    client, harness, sampling = agent
    parse, steps, images = harness.dialect.parse, record.steps, record.images
    spent_prompt = spent_policy = spent_env = 0.0
    start = clock()
    seen = [_show(first, harness, images)]
    now = clock()
    looking = now - start
    ended = False
    try:
        while not ended and len(steps) < task.budget:
            start = now
            request = prompt(task, steps, seen, harness)
            screen = seen[-1].screen_hash
            asked = record.enter("policy")
            completion = usable(await client.generate(request, sampling))
            answered = record.enter("env")
            problem, calls = None, ()
            try:
                calls = parse(completion.token_ids)
            except ParseError as error:
                problem = str(error)
            next_looking = 0.0
            for call in calls:
                action = call.action
                if action is None:
                    problem = f"tool {call.tool!r} was called, this attempt has none"
                    break
                record.last = action
                if action.kind == "terminate":
                    ended = True
                    break
                shot = await env.step(action)
                acted = clock()
                seen.append(_show(shot, harness, images))
                next_looking = clock() - acted
            del seen[: -harness.window]
            now = clock()
            took = {"prompt": asked - start + looking, "policy": answered - asked, "env": now - answered - next_looking}
            hashes = tuple([image.hash for image in request.images])
            steps.append(Step(len(steps), request.token_ids, hashes, completion, calls, problem, screen, took))
            spent_prompt += took["prompt"]
            spent_policy += took["policy"]
            spent_env += took["env"]
            looking = next_looking
    finally:
        record.seconds |= {"prompt": spent_prompt, "policy": spent_policy, "env": spent_env}


def usable(completion: Completion) -> Completion:
    """The completion itself. Raises PolicyError when it was cancelled or its logprobs are not finite."""
    if not math.isfinite(completion.logprobs.sum()) or completion.finish_reason == "cancelled":
        raise PolicyError(f"answer {completion.finish_reason}, logprobs {completion.logprobs[:8]}")
    return completion


def _show(observation: Observation, harness: Harness, images: dict[str, np.ndarray]) -> Seen:
    seen = see(observation, harness)
    images.setdefault(seen.image.hash, seen.image.pixels)
    return seen
