"""Demonstrations: a suite's oracle acts instead of a policy, and its attempts are stored like any others.

What is recorded is what was run: the oracle's action is said in the dialect, read back, and then performed. Nothing
was sampled, so logprobs are 0 and every token has version 0.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cuajax.agent.actions import ParseError
from cuajax.agent.harness import Harness
from cuajax.rollout.episode import Agent, Name, Record, Stages, attempt
from cuajax.rollout.host import LoopThread, nap
from cuajax.rollout.ledger import LEARNER, GroupStore
from cuajax.rollout.plan import Plan, Stats
from cuajax.serving.client import PolicyError
from cuajax.tasks import curriculum as dtac
from cuajax.types import Action, Completion, Env, Group, Prompt, Sampling, Suite, Task, Trajectory

AT_ONCE = 64  # demonstrations of one transaction
Images = dict[str, np.ndarray]
Oracle = Callable[[Any], Action]  # a sandbox of the suite -> the next right action, terminate included


class _Teacher:
    """An attempt's policy and sandbox in one: the oracle must see the sandbox itself."""

    def __init__(self, suite: Suite, harness: Harness, oracle: Oracle) -> None:
        self._suite, self._dialect, self._oracle = suite, harness.dialect, oracle
        self._env: Env | None = None

    async def acquire(self) -> Env:
        self._env = await self._suite.provision()
        return self._env

    async def give_back(self, env: Env, *, healthy: bool) -> None:
        del healthy
        await env.close()

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Completion:
        try:
            ids = np.array(self._dialect.format(self._oracle(self._env)), np.int32)
        except ParseError as error:
            raise PolicyError(f"the oracle's action cannot be said: {error}") from error
        if len(ids) > sampling.max_tokens:
            raise PolicyError(f"the oracle's answer takes {len(ids)} tokens, the limit is {sampling.max_tokens}")
        return Completion(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop")


async def demonstrate(
    task: Task, suite: Suite, *, oracle: Oracle, harness: Harness, name: Name, record: Record | None = None
) -> tuple[Trajectory, Images]:
    """One whole attempt of the oracle, scored as any other; `invalid` where the dialect cannot say an action."""
    teacher, plan = _Teacher(suite, harness, oracle), Plan()
    agent = Agent.of(teacher, harness)
    return await attempt(
        task, suite, agent=agent, name=name, envs=teacher, stages=Stages(plan.limits), record=record
    )  # fmt: skip


class Demonstrations:
    """Writes demonstrations at training seeds, one a group, for as long as a learner reads them.

    `start`, `stop` and `check` are RolloutService's. The n-th group of a store is a pure function of `plan.seed` and
    n, so a restart goes on where the store ends. At most `plan.ahead` groups wait for the learner, whose position
    `consumed()` tells; None polls the store's learner record.
    """

    done = False  # there is always another

    def __init__(
        self, suite: Suite, store: GroupStore, *, oracle: Oracle, harness: Harness, curriculum: dtac.Curriculum,
        plan: Plan, consumed: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        self.plan = plan
        self.stats = Stats()
        self._suite, self._store, self._oracle, self._harness = suite, store, oracle, harness
        self._curriculum = curriculum
        self._consumed = consumed or self._told
        self._stopping, self._wake = False, asyncio.Event()
        self._head = self._read = 0
        self._store_s = 0.0
        self._host = LoopThread("demonstrations")

    # ---------------------------------------------------------------------------------------- other threads
    def start(self) -> None:
        """Start the loop's thread. Raises RuntimeError when called twice."""
        self._host.run(self._main())

    def stop(self, *, drain: bool = True, timeout: float = 60.0) -> None:
        """End it after the transaction under way. Raises what broke it, if anything did."""
        del drain, timeout
        self._host.call(self._begin_stop)
        self._host.join()

    def check(self) -> None:
        """Raise what broke it, if anything did."""
        self._host.check()

    def snapshot(self) -> dict[str, float]:
        """Stats plus seconds in the store and how many groups wait."""
        return {**dataclasses.asdict(self.stats), "store_s": self._store_s, "ready": self._head - self._read}

    # ------------------------------------------------------------------------------------------------- loop
    def _begin_stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def _told(self) -> int:
        return int((self._store.get(LEARNER) or {"consumed": 0})["consumed"])

    async def _main(self) -> None:
        self._head = await asyncio.to_thread(self._store.head)
        number = self._head
        while not self._stopping:
            self._read = await asyncio.to_thread(self._consumed)
            room = min(AT_ONCE, self.plan.ahead - (self._head - self._read))
            if room <= 0:
                await nap(self._wake, self.plan.poll_seconds)
                continue
            made = [await self._group(number + i) for i in range(room)]
            number += room
            images = {digest: pixels for _, seen, _ in made for digest, pixels in seen.items()}
            began = time.perf_counter()
            await asyncio.to_thread(self._store.append, [g for g, _, _ in made], images, [d for _, _, d in made])
            self._head = await asyncio.to_thread(self._store.head)
            self._store_s += time.perf_counter() - began

    async def _group(self, number: int) -> tuple[Group, Images, dict[str, Any]]:
        rng = np.random.default_rng([self.plan.seed, number])
        family, seed = dtac.sample(dtac.initial(), rng, self._curriculum, index=number)
        task, group_id = self._suite.task(family, seed), f"demonstration-{number}"
        record = Record(Name(f"{group_id}/0.0", group_id, 0))
        trajectory, images = await demonstrate(
            task, self._suite, oracle=self._oracle, harness=self._harness, name=record.name, record=record
        )  # fmt: skip
        self.stats.count(record, trajectory)
        self.stats.groups += 1
        group = Group(group_id, task, (trajectory,))
        return group, images, dtac.delta(group, family, seed)
