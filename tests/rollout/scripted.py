"""Stand-ins of the rollout tests: a policy that knows the answer, a store in memory, faults on a schedule."""

import asyncio
import itertools
import random
import threading
from typing import Any

import numpy as np

from cuajax.agent.dialects.compact import CompactDialect
from cuajax.agent.harness import Harness, see
from cuajax.inputs.processor import ImageSpec
from cuajax.inputs.tokenizer import CompactTokenizer
from cuajax.sandbox.sim.suite import SimSuite
from cuajax.types import Action, Completion

TOKENIZER = CompactTokenizer()
DIALECT = CompactDialect(TOKENIZER)
HARNESS = Harness(DIALECT, ImageSpec())


def completion(ids, *, version=0, finish: Any = "stop"):
    n = len(ids)
    return Completion(np.array(ids, np.int32), np.full(n, -0.5, np.float32), np.full(n, version, np.int32), finish)


def say(*tokens, **options):
    return completion([TOKENIZER.id(t) for t in tokens], **options)


class Scripted:
    """A PolicyClient that plays answers in turn (a callable gets the prompt), the last one for ever."""

    def __init__(self, *answers):
        self.answers, self.calls = answers, []

    async def generate(self, prompt, sampling) -> Any:
        self.calls.append((prompt, sampling))
        answer = self.answers[min(len(self.calls), len(self.answers)) - 1]
        if callable(answer):
            answer = answer(prompt)
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Knowing:
    """The sim, and a client that answers with its oracle: the sandboxes note what is right on each screen."""

    def __init__(self, *, wrong=0.0, delay=0.0, budget=None, **suite):
        self.suite = SimSuite(budget=budget, **suite)
        self.wrong, self.delay = wrong, delay
        self.random = random.Random(0)
        self.right = {}
        self.asked = 0
        self.name, self.families = self.suite.name, self.suite.families
        self.task = self.suite.task

    async def evaluate(self, task, env: Any, last):
        return await self.suite.evaluate(task, env.env, last)

    async def provision(self) -> Any:
        return _Noting(await self.suite.provision(), self)

    async def generate(self, prompt, sampling) -> Any:
        self.asked += 1
        await asyncio.sleep(self.delay)
        if self.random.random() < self.wrong:
            return say("<done>")
        return completion(self.right[prompt.images[-1].hash, prompt.token_ids.tobytes()])


class _Noting:
    def __init__(self, env, owner):
        self.env, self.owner = env, owner

    def __getattr__(self, name):
        return getattr(self.env, name)

    async def reset(self, task):
        self.instruction = task.instruction
        return self._note(await self.env.reset(task))

    async def step(self, action):
        return self._note(await self.env.step(action))

    def _note(self, observation):
        seen = see(observation, HARNESS)
        ids = DIALECT.prompt_ids(self.instruction, (), seen.tokens)
        self.owner.right[seen.image.hash, ids.tobytes()] = DIALECT.format(self.owner.suite.oracle(self.env))
        return observation


class Faulty:
    """A suite whose sandboxes fail: `fault(n)` is what the n-th call (of those in `on`) does (None: nothing)."""

    def __init__(self, suite, fault, *, on=("reset", "step")):
        self.suite, self.fault, self.on, self.calls = suite, fault, on, itertools.count()
        self.name, self.families = suite.name, suite.families
        self.task = suite.task
        self.closed = self.opened = 0

    async def provision(self) -> Any:
        self.opened += 1
        return _FaultyEnv(await self.suite.provision(), self)

    async def evaluate(self, task, env: Any, last):
        return await self.suite.evaluate(task, env.env, last)

    async def strike(self, call):
        fault = self.fault(next(self.calls)) if call in self.on else None
        if fault == "hang":
            await asyncio.sleep(3600)
        if isinstance(fault, BaseException):
            raise fault


class _FaultyEnv:
    def __init__(self, env, owner):
        self.env, self.owner = env, owner

    async def reset(self, task):
        await self.owner.strike("reset")
        return await self.env.reset(task)

    async def step(self, action):
        await self.owner.strike("step")
        return await self.env.step(action)

    async def close(self):
        self.owner.closed += 1
        await self.env.close()


class Memory:
    """A store in memory, as far as the rollout room sees one."""

    def __init__(self):
        self.groups, self.images, self.all_deltas, self.records, self.appends = [], {}, [], {}, []
        self.lock = threading.Lock()

    def append(self, groups, images, deltas):
        with self.lock:
            self.appends.append(len(groups))
            self.groups += groups
            self.all_deltas += deltas
            self.images |= images
            return list(range(len(self.groups) - len(groups), len(self.groups)))

    def head(self):
        return len(self.groups)

    def deltas_from(self, start, stop):
        return self.all_deltas[start:stop]

    def put(self, name, value):
        self.records[name] = value

    def get(self, name):
        return self.records.get(name)


WAIT = Action("wait", seconds=1.0)
