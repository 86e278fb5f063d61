"""Rounds of one-step candidates scored by a process reward model (PRO-CUA, arXiv:2605.29119, section 3.1).

A round: (1) the current policy runs live attempts; (2) their surviving steps become states; (3) without any sandbox,
G candidates are sampled at each state's recorded prompt and scored 0 or 1, and go to the store as a group; (4) the
next round begins when the learner has trained on them and published.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cuajax.agent.actions import ParseError
from cuajax.agent.harness import Harness
from cuajax.judge.checks import judged
from cuajax.rollout.envs import EnvPool
from cuajax.rollout.episode import Agent, Name, Record, Stages, attempt, clock, usable
from cuajax.rollout.groups import OpenGroup, add, backoff
from cuajax.rollout.host import LoopThread, close, nap
from cuajax.rollout.ledger import GroupStore, Ledger, count_start
from cuajax.rollout.plan import Plan
from cuajax.rollout.states import distinct, surviving
from cuajax.rollout.watchdog import Watchdog
from cuajax.serving.client import PolicyError
from cuajax.tasks import curriculum as dtac
from cuajax.types import Image, Outcome, PolicyClient, ProcessRewardModel, Prompt, Step, Suite, Task, Trajectory

log = logging.getLogger(__name__)
ROUND = "round"  # the store's record of the round under way


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Sizes of the rounds; `rollout` holds those of groups, pacing and sandboxes.

    `tasks` attempts are collected a round, one each. With `deduplicate`, equal prompts of one task are one state.
    The next round also begins, with a warning, when the learner has not moved for `settle_seconds`.
    """

    rollout: Plan
    rounds: int = 10
    tasks: int = 256
    scoring: int = 64  # calls of the reward model at once
    score_seconds: float = 60.0  # of one call
    settle_seconds: float = 300.0
    deduplicate: bool = False
    empty_rounds: int = 3  # rounds in a row with nothing to train on: stop

    def __post_init__(self) -> None:
        for name in ("rounds", "tasks", "scoring", "score_seconds", "settle_seconds", "empty_rounds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"RoundPlan.{name} is {getattr(self, name)}, must be positive")


class Learner(NamedTuple):
    """How far the learner is, in groups; called in the loop, so both must be quick."""

    consumed: Callable[[], int]  # read
    published: Callable[[], int]  # in the newest policy that serves


class EmptyRounds(RuntimeError):
    """Round after round left nothing to train on; the message says what became of the steps and candidates."""


@dataclass(slots=True)
class RoundStats:
    """Counts since the start; `dropped` by filter."""

    round: int = 0
    collected: int = 0
    passed: int = 0  # collected attempts that succeeded: the outcome beside the process reward
    states: int = 0
    groups: int = 0
    candidates: int = 0
    correct: int = 0
    unparseable: int = 0
    judged: int = 0
    invalid: int = 0
    requeued: int = 0
    policy_s: float = 0.0
    judge_s: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)


class _State(NamedTuple):
    task: Task
    trajectory: Trajectory
    index: int
    prompt: Prompt

    @property
    def step(self) -> Step:
        return self.trajectory.steps[self.index]


class CandidateRounds:
    """Runs the rounds in a thread of its own. `start`, `stop` and `check` are RolloutService's.

    Tasks come from `curriculum`'s families evenly: pass rates are not folded here. Each group's stored delta is
    {"round", "correct", "scored"}; the first group of a round tells the learner to take its KL reference anew.
    """

    def __init__(
        self,
        suite: Suite,
        client: PolicyClient,
        store: GroupStore,
        *,
        prm: ProcessRewardModel,
        harness: Harness,
        curriculum: dtac.Curriculum,
        plan: RoundPlan,
        learner: Learner,
    ) -> None:
        self.plan = plan
        self.stats = RoundStats()
        rollout = plan.rollout
        self._suite, self._prm, self._curriculum, self._learner = suite, prm, curriculum, learner
        self._agent = Agent.of(
            client, harness, temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k
        )
        # Groups with equal rewards are trained here (they pay KL), so only the ones without candidates are not.
        self._ledger = Ledger(
            store, ahead=rollout.ahead, consumed=learner.consumed, useless=lambda delta: delta.get("scored", 2) < 2
        )
        self._stages = Stages(rollout.limits)
        self._scoring = asyncio.Semaphore(plan.scoring)
        self._live: dict[asyncio.Task, Record] = {}
        self._wake = asyncio.Event()
        self._stopping = False
        self._fault = ""  # why the last invalid candidate was
        self._serial = self._pending = self._good = 0  # groups: numbered, being filled, trainable in this round
        self._host = LoopThread("candidates")

    # ---------------------------------------------------------------------------------------- other threads
    def start(self) -> None:
        """Start the loop's thread. Raises RuntimeError when called twice."""
        self._host.run(self._main())

    def stop(self, *, drain: bool = True, timeout: float = 60.0) -> None:
        """End the rounds: `drain` finishes the candidate groups in flight, for at most `timeout` seconds.

        Raises what broke the rounds, if anything did.
        """
        self._host.call(self._begin_stop, timeout if drain else 0.0)
        self._host.join()

    def check(self) -> None:
        """Raise what broke the rounds, if anything did."""
        self._host.check()

    @property
    def done(self) -> bool:
        """Whether all rounds are over."""
        return self._host.done

    def snapshot(self) -> dict[str, Any]:
        """Stats plus seconds in the store and gauges."""
        gauges = {"in_flight": self._ledger.in_flight, "ready": self._ledger.ready}
        return {**dataclasses.asdict(self.stats), "store_s": self._ledger.store_s, "live": len(self._live), **gauges}

    # ------------------------------------------------------------------------------------------------- loop
    def _begin_stop(self, timeout: float) -> None:
        self._stopping = True
        asyncio.get_running_loop().call_later(timeout, self._cancel)
        self._wake.set()

    def _cancel(self) -> None:
        for task in list(self._live):
            task.cancel()

    async def _main(self) -> None:
        rollout = self.plan.rollout
        async with self._ledger as ledger:
            prefix, rng = await ledger.call(self._begin)
            watchdog = Watchdog(self._live, seconds=rollout.stall_seconds)
            watchdog.start()
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(ledger.write(lambda head, deltas: self._wake.set()), name="writer")
                    empty = 0
                    while self.stats.round < self.plan.rounds and not self._stopping:
                        self.stats.round += 1
                        found = await self._round(tasks, prefix=f"{prefix}.{self.stats.round}", rng=rng)
                        empty = 0 if found else empty + 1
                        if empty >= self.plan.empty_rounds and not self._stopping:
                            raise EmptyRounds(f"{empty} rounds in a row left nothing to train on; {self._account()}")
                    while self._live:
                        await self._nap()
                    ledger.finish()
            finally:
                watchdog.stop()
                await close(self._agent.client)

    def _begin(self) -> tuple[str, np.random.Generator]:
        """Go on after the last round that was begun: its states are gone, so it is not begun again."""
        store, rollout = self._ledger.store, self.plan.rollout
        self.stats.round = int((store.get(ROUND) or {"round": 0})["round"])
        return count_start(store, "candidates", seed=rollout.seed, actor=rollout.actor)

    def _account(self) -> str:
        s, per_update = self.stats, self.plan.rollout.groups_per_update
        return (
            f"an update takes {per_update} states; in all {s.collected} attempts left {s.states} usable states, steps"
            f" dropped {dict(s.dropped)}; {s.invalid} of {s.candidates} candidates invalid, the last: {self._fault!r}"
        )

    async def _nap(self) -> None:
        await nap(self._wake, self.plan.rollout.poll_seconds)

    def _spawn(self, tasks: asyncio.TaskGroup, work: Any, record: Record) -> asyncio.Task:
        running = tasks.create_task(work, name=record.name.id)
        self._live[running] = record
        running.add_done_callback(self._ended)
        return running

    def _ended(self, task: asyncio.Task) -> None:
        self._live.pop(task, None)
        self._wake.set()

    # --------------------------------------------------------------------------------------------- one round
    async def _round(self, tasks: asyncio.TaskGroup, *, prefix: str, rng: np.random.Generator) -> bool:
        """Collect, filter, score, wait; False when there was not one update's worth of states or nothing trainable."""
        await self._ledger.call(self._ledger.store.put, ROUND, {"round": self.stats.round, "head": self._ledger.head})
        states = await self._collect(tasks, prefix=prefix, rng=rng)
        per_update = self.plan.rollout.groups_per_update
        wanted = len(states) // per_update * per_update  # no update waits for a batch that never fills
        self.stats.states += wanted
        # A group without two valid candidates trains nothing: spare states, then states again, take its place.
        queue = collections.deque([*states, *states[:wanted]])
        self._good = 0
        while self._good < wanted and (queue or self._pending) and not self._stopping:
            room = min(await self._ledger.room(), wanted - self._good - self._pending, len(queue))
            for _ in range(room):
                self._start_group(tasks, queue.popleft(), f"{prefix}/{self._serial}")
                self._serial += 1
            await self._nap()
        if self._good < wanted and not self._stopping:
            log.warning("round %d: %d of %d groups are trainable", self.stats.round, self._good, wanted)
        if self._good:
            await self._settle(per_update)
        return self._good > 0

    async def _settle(self, per_update: int) -> None:
        """Until the learner has published what it could train of this round."""
        last, since = -1, clock()
        while not self._stopping:
            published, committed = self._learner.published(), self._ledger.in_flight == 0
            if committed and self._ledger.head - published < per_update:
                return
            if published != last:
                last, since = published, clock()
            if committed and clock() - since > self.plan.settle_seconds:
                log.warning(
                    "round %d: the learner stands at group %d of %d for %.0f s; collecting again",
                    self.stats.round, published, self._ledger.head, self.plan.settle_seconds,
                )  # fmt: skip
                return
            await asyncio.sleep(self.plan.rollout.poll_seconds)

    # ------------------------------------------------------------------------------------------- (1) and (2)
    async def _collect(self, tasks: asyncio.TaskGroup, *, prefix: str, rng: np.random.Generator) -> list[_State]:
        """Live attempts, one a task, and the states they leave, shuffled."""
        rollout = self.plan.rollout
        envs = EnvPool(self._suite, reuse=rollout.reuse_envs, keep=rollout.limits.attempts)
        await envs.warm(rollout.warm_envs)
        running: list[tuple[Task, asyncio.Task]] = []
        for i in range(self.plan.tasks):
            task = self._suite.task(*dtac.sample(dtac.initial(), rng, self._curriculum, index=i))
            record = Record(Name(f"{prefix}/{i}", prefix, i))
            work = attempt(
                task, self._suite, agent=self._agent, name=record.name, envs=envs, stages=self._stages, record=record
            )
            running.append((task, self._spawn(tasks, work, record)))
        while self._live and not self._stopping:
            await self._nap()
        await envs.close()
        if self._stopping:
            self._cancel()
            return []
        images: dict[str, np.ndarray] = {}
        found: list[tuple[Task, Trajectory, int]] = []
        for task, one in running:
            trajectory, seen = one.result()
            images |= seen
            indices, dropped = surviving(trajectory, task, seen)
            found += [(task, trajectory, i) for i in indices]
            self.stats.dropped += dropped
            self.stats.collected += 1
            self.stats.passed += trajectory.outcome.status == "success"
        if self.plan.deduplicate:
            found = distinct(found)
        order = rng.permutation(len(found))
        return [_state(found[i], images) for i in order]

    # ------------------------------------------------------------------------------------------------- (3)
    def _start_group(self, tasks: asyncio.TaskGroup, state: _State, group_id: str) -> None:
        rollout = self.plan.rollout
        box = [OpenGroup(group_id, state.task, rollout.group_size, retries=rollout.retries)]
        self._ledger.start()
        self._pending += 1
        for slot in range(rollout.group_size):
            record = Record(Name(f"{group_id}/{slot}.0", group_id, slot))
            self._spawn(tasks, self._fill(state, box, record), record)

    async def _fill(self, state: _State, box: list[OpenGroup], record: Record) -> None:
        """Try one slot until its group takes the candidate; `box` holds the group the slots share."""
        stats, tries, verdict = self.stats, 0, "requeue"
        while verdict == "requeue":
            if tries:
                stats.requeued += 1
                record.stage = "queued"
                await asyncio.sleep(backoff(tries))
                record.name = record.name._replace(id=f"{record.name.group_id}/{record.name.slot}.{tries}")
            candidate = await self._candidate(state, record)
            stats.candidates += 1
            if candidate.outcome.status == "invalid":
                stats.invalid += 1
                self._fault = candidate.outcome.reason
            stats.correct += candidate.outcome.reward == 1.0
            box[0], verdict, group = add(box[0], candidate)
            tries += 1
            if group is not None:
                stats.groups += 1
                self._pending -= 1
                self._good += len(group.valid) >= 2
                scored = [t.outcome.reward for t in group.valid]
                delta = {"round": stats.round, "correct": int(sum(scored)), "scored": len(scored)}
                images = {image.hash: image.pixels for image in state.prompt.images}
                group = dataclasses.replace(group, state=(state.trajectory.id, state.index))
                self._ledger.close(group, images, delta)

    async def _candidate(self, state: _State, record: Record) -> Trajectory:
        """One answer at the recorded prompt and its score, as a one-step trajectory."""
        client, harness, sampling = self._agent
        name, old = record.name, state.step
        start = record.enter("policy")
        try:
            completion = usable(await client.generate(state.prompt, sampling))
        except PolicyError as error:
            return self._done(state, name, None, Outcome("invalid", reason=f"{type(error).__name__}: {error}"))
        took = clock() - start
        self.stats.policy_s += took
        step = Step(
            old.index,
            old.prompt_ids,
            old.image_hashes,
            completion,
            screen_hash=old.screen_hash,
            timings={"policy": took},
        )
        try:
            step = dataclasses.replace(step, calls=harness.dialect.parse(completion.token_ids))
        except ParseError as error:
            self.stats.unparseable += 1
            step = dataclasses.replace(step, parse_error=str(error))
            return self._done(state, name, step, Outcome("failure", 0.0, "unparseable"))
        record.enter("queued")
        async with self._scoring:
            start = record.enter("judge")
            history, screenshot = state.trajectory.steps[: state.index], state.prompt.images[-1].pixels
            outcome = await judged(
                self._prm, state.task, history, screenshot=screenshot, candidate=step, seconds=self.plan.score_seconds
            )
            self.stats.judge_s += clock() - start
        self.stats.judged += 1
        return self._done(state, name, step, outcome)

    @staticmethod
    def _done(state: _State, name: Name, step: Step | None, outcome: Outcome) -> Trajectory:
        return Trajectory(name.id, state.task.id, name.group_id, name.slot, (step,) if step else (), outcome)


def _state(found: tuple[Task, Trajectory, int], images: dict[str, np.ndarray]) -> _State:
    task, trajectory, index = found
    step = trajectory.steps[index]
    prompt = Prompt(step.prompt_ids, tuple(Image(h, images[h]) for h in step.image_hashes))
    return _State(task, trajectory, index, prompt)
