"""Many attempts at once, without lockstep: from a curriculum to groups in a store, paced by the learner.

One asyncio loop in a thread of its own holds one task per slot. Groups are started only while what is in flight and
what the learner has not read yet will still be fresh when it is trained; finished groups are committed together, one
transaction a drain.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cuajax.agent.harness import Harness
from cuajax.data.journal import Attempt, Journal
from cuajax.data.store import Store
from cuajax.rollout.envs import EnvPool
from cuajax.rollout.episode import Agent, Name, Record, Stages, attempt, clock
from cuajax.rollout.groups import OpenGroup, add, backoff
from cuajax.rollout.host import LoopThread, close, nap
from cuajax.rollout.ledger import GroupStore, Ledger, count_start
from cuajax.rollout.plan import Plan, Stats
from cuajax.rollout.watchdog import OnStall, Watchdog, tell
from cuajax.tasks import curriculum as dtac
from cuajax.types import Group, PolicyClient, Suite, Trajectory

Images = dict[str, np.ndarray]
SAVE_EVERY = 64  # groups between two records of the curriculum's state


@dataclass(slots=True)
class _Open:
    state: OpenGroup
    family: str
    seed: int
    images: dict[int, Images] = field(default_factory=dict)  # by slot


class NoValidAttempts(RuntimeError):
    """Group after group closed without one valid attempt; the message has the last reason."""


class RolloutService:
    """Runs attempts until stopped. `start` returns at once; `stop` drains or cancels, and raises what went wrong.

    `consumed()` tells how many groups the learner has read (called in the loop, so it must be quick); None polls the
    store's 'learner' record {"consumed": n}. `on_stall` is called from the watchdog's thread or the loop's.
    """

    def __init__(
        self,
        suite: Suite,
        client: PolicyClient,
        store: GroupStore,
        *,
        harness: Harness,
        curriculum: dtac.Curriculum,
        plan: Plan | None = None,
        consumed: Callable[[], int] | None = None,
        on_stall: OnStall = tell,
    ) -> None:
        self.plan = plan = plan or Plan()
        self.stats = Stats()
        self.curriculum_state: dtac.State = dtac.initial()
        self._suite, self._curriculum = suite, curriculum
        self._agent = Agent.of(client, harness, temperature=plan.temperature, top_p=plan.top_p, top_k=plan.top_k)
        self._ledger = Ledger(store, ahead=plan.ahead, consumed=consumed, useless=self._is_useless)
        self._on_stall = on_stall
        self._live: dict[asyncio.Task, Record] = {}
        self._open: dict[str, _Open] = {}
        self._wake = asyncio.Event()
        self._stages = Stages(plan.limits)
        self._envs = EnvPool(suite, reuse=plan.reuse_envs, keep=plan.limits.attempts)
        self._serial = self._dead = self._head = self._saved = 0
        self._stopping = False
        self._journal: Journal | None = None
        self._lost: list[_Open] = []  # groups an earlier start was working on
        self._host = LoopThread("rollout")

    # ---------------------------------------------------------------------------------------- other threads
    def start(self) -> None:
        """Start the loop's thread. Raises RuntimeError when called twice."""
        self._host.run(self._main())

    def stop(self, *, drain: bool = True, timeout: float = 60.0) -> None:
        """End the service: `drain` finishes and commits the groups in flight, for at most `timeout` seconds.

        What is left (or all of it, without `drain`) is cancelled; closed groups are committed. Raises what broke the
        service, if anything did.
        """
        self._host.call(self._begin_stop, drain, timeout)
        self._host.join()

    def check(self) -> None:
        """Raise what broke the service, if anything did; call it where its groups are waited for."""
        self._host.check()

    def snapshot(self) -> dict[str, float]:
        """Stats plus seconds in the store and gauges: groups in flight, unread groups, live attempts."""
        ledger = self._ledger
        gauges = {"in_flight": ledger.in_flight, "ready": ledger.ready, "live": len(self._live)}
        return {**dataclasses.asdict(self.stats), "store_s": ledger.store_s, **gauges}

    # ------------------------------------------------------------------------------------------------- loop
    def _begin_stop(self, drain: bool, timeout: float) -> None:
        self._stopping = True
        asyncio.get_running_loop().call_later(timeout if drain else 0.0, self._cancel_attempts)
        self._wake.set()

    def _cancel_attempts(self) -> None:
        for task in list(self._live):
            task.cancel()

    async def _main(self) -> None:
        async with self._ledger as ledger:
            await ledger.call(self._restore)
            await self._envs.warm(self.plan.warm_envs)
            watchdog = Watchdog(self._live, seconds=self.plan.stall_seconds, on_stall=self._on_stall)
            watchdog.start()
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(ledger.write(self._committed), name="writer")
                    await self._feed(tasks)
                    while self._live:
                        await nap(self._wake, self.plan.poll_seconds)
                    ledger.finish()
                await ledger.call(self._save)
            finally:
                watchdog.stop()
                await close(self._agent.client)
                await self._envs.close()

    # ---------------------------------------------------------------------------------------------- pacing
    async def _feed(self, tasks: asyncio.TaskGroup) -> None:
        """Start groups while in flight + ready < (max_lag + 1) x groups per update."""
        while not self._stopping:
            if self._head - self._saved >= SAVE_EVERY:
                await self._ledger.call(self._save)
            fresh = [self._next_group() for _ in range(await self._ledger.room())]
            if fresh and self._journal is not None:
                await self._ledger.call(self._journal.claim, [a for group in fresh for a in _claims(group.state)])
            if self._stopping:
                return  # what was just claimed is for the next start
            for group in fresh:
                self._launch(group.state, tasks)
            began = clock()
            await nap(self._wake, self.plan.poll_seconds)
            self.stats.paced_s += 0.0 if self._live else clock() - began

    def _next_group(self) -> _Open:
        """A group an earlier start lost, or a new one of the curriculum's choice; counted as in flight from here."""
        if self._lost:
            group = self._lost.pop()
        else:
            busy = {dtac.unit_of(o.family, o.seed, self._curriculum) for o in self._open.values()}
            state, index = self.curriculum_state, self._serial
            family, seed = dtac.sample(state, self._rng, self._curriculum, index=index, busy=busy)
            # The seed is in the id, so that a restart can tell the curriculum what a lost group was about.
            group_id = f"{self._prefix}.{self._serial}-{seed}"
            self._serial += 1
            task = self._suite.task(family, seed)
            group = _Open(OpenGroup(group_id, task, self.plan.group_size, retries=self.plan.retries), family, seed)
        self._open[group.state.id] = group
        self._ledger.start()
        return group

    def _launch(self, group: OpenGroup, tasks: asyncio.TaskGroup) -> None:
        for slot in range(group.size):
            running = tasks.create_task(self._fill(group.id, slot), name=f"{group.id}/{slot}")
            self._live[running] = Record(Name(f"{group.id}/{slot}.0", group.id, slot))
            running.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        self._live.pop(task, None)
        self._wake.set()

    # ---------------------------------------------------------------------------------------------- attempts
    async def _fill(self, group_id: str, slot: int) -> None:
        """Try one slot until its group takes the result."""
        me = asyncio.current_task()
        assert me is not None
        tries, verdict = 0, "requeue"
        while verdict == "requeue":
            if tries:
                self.stats.requeued += 1
                await asyncio.sleep(backoff(tries))
            record = self._live[me] = Record(Name(f"{group_id}/{slot}.{tries}", group_id, slot))
            trajectory, images = await attempt(
                self._open[group_id].state.task,
                self._suite,
                agent=self._agent,
                name=record.name,
                envs=self._envs,
                stages=self._stages,
                record=record,
            )
            self.stats.count(record, trajectory)
            verdict = self._take(trajectory, images)
            tries += 1

    def _take(self, trajectory: Trajectory, images: Images) -> str:
        """Count a finished attempt; a group that closes goes to the writer."""
        entry = self._open[trajectory.group_id]
        added = add(entry.state, trajectory)
        entry.state = added.open
        if added.verdict == "duplicate":
            self.stats.duplicates += 1
        elif added.verdict != "requeue":
            entry.images[trajectory.slot] = images
        if added.group is not None:
            del self._open[trajectory.group_id]
            self._watch_dead(added.group)
            merged = {digest: pixels for some in entry.images.values() for digest, pixels in some.items()}
            self._ledger.close(added.group, merged, dtac.delta(added.group, entry.family, entry.seed))
        return added.verdict

    def _is_useless(self, delta: Mapping[str, Any]) -> bool:
        """Whether the learner drops the group of a delta: too few valid attempts, or nothing to tell them apart."""
        return delta.get("valid", 2) < 2 or (self.plan.replace_zero_variance and not delta.get("varied", True))

    def _watch_dead(self, group: Group) -> None:
        valid = len(group.valid)
        self.stats.groups += 1
        self.stats.short_groups += valid < self.plan.group_size
        self._dead = 0 if valid else self._dead + 1
        if self._dead >= self.plan.dead_groups:
            raise NoValidAttempts(
                f"{self._dead} groups in a row without one valid attempt; the last, {group.id} ({group.task.id}),"
                f" ended with: {group.trajectories[-1].outcome.reason}"
            )

    # ------------------------------------------------------------------------------------------------ store
    def _committed(self, head: int, deltas: list[dict[str, Any]]) -> None:
        for delta in deltas:
            self.curriculum_state = dtac.fold(self.curriculum_state, delta, self._curriculum)
        self._head = head
        self._wake.set()

    def _restore(self) -> None:
        """Fold what the store holds; count this start, so that no group id comes twice."""
        store, actor = self._ledger.store, self.plan.actor
        self._head = self._ledger.head
        saved = store.get("curriculum") or {"seq": 0, "state": dtac.initial()}
        state = saved["state"]
        for delta in store.deltas_from(saved["seq"], self._head):
            state = dtac.fold(state, delta, self._curriculum)
        self.curriculum_state, self._saved = state, saved["seq"]
        self._prefix, self._rng = count_start(store, "rollout", seed=self.plan.seed, actor=actor)
        if self.plan.journal:
            if not isinstance(store, Store):
                raise TypeError(f"a journal needs a Store, not a {type(store).__name__}; or set journal=False")
            self._journal = Journal(store)
            self._reissue(self._journal)

    def _reissue(self, journal: Journal) -> None:
        """Take up the groups that earlier starts of this actor claimed and did not store."""
        mine = re.compile(re.escape(self.plan.actor) + r"\d+\.\d+-(\d+)")
        groups: dict[str, list[Attempt]] = {}
        for one in journal.pending():
            groups.setdefault(one.group_id, []).append(one)
        for group_id, attempts in groups.items():
            match = mine.fullmatch(group_id)
            if match is None:
                continue  # another actor's, which may be alive
            if sorted(a.slot for a in attempts) != list(range(len(attempts))):
                journal.abandon(attempts, "incomplete")
                continue
            task = attempts[0].task
            state = OpenGroup(group_id, task, len(attempts), retries=self.plan.retries)
            self._lost.append(_Open(state, task.family, int(match[1])))

    def _save(self) -> None:
        head, state = self._head, self.curriculum_state
        self._ledger.store.put("curriculum", {"seq": head, "state": state})
        self._saved = head


def _claims(group: OpenGroup) -> list[Attempt]:
    return [Attempt(f"{group.id}/{slot}.0", group.id, slot, group.task) for slot in range(group.size)]
