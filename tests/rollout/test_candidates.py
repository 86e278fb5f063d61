import asyncio
import dataclasses
import time
from typing import Any

import pytest

from cuajax.data.images import image_hash
from cuajax.rollout.candidates import CandidateRounds, EmptyRounds, Learner, RoundPlan
from cuajax.rollout.plan import Plan
from cuajax.sandbox.env import SandboxLost
from cuajax.sandbox.sim.prm import SimPRM
from cuajax.tasks.curriculum import Curriculum
from cuajax.types import Outcome
from tests.rollout.scripted import HARNESS, Knowing, Memory, Scripted, say

CURRICULUM = Curriculum(("check2", "form"))
ROLLOUT = Plan(group_size=4, groups_per_update=4, max_lag=1, reuse_envs=True, poll_seconds=0.002)
PLAN = RoundPlan(ROLLOUT, rounds=2, tasks=12)


class Judging:
    """The sim's exact reward model, noting its calls; `fault(n)` returns what goes wrong with the n-th."""

    def __init__(self, sim, fault=lambda n: None):
        self.exact, self.fault, self.calls = SimPRM(sim.suite), fault, []

    async def score(self, task, history, screenshot, candidate) -> Any:
        self.calls.append((task, history, screenshot, candidate))
        fault = self.fault(len(self.calls))
        if fault == "hang":
            await asyncio.sleep(3600)
        if isinstance(fault, BaseException):
            raise fault
        return fault or await self.exact.score(task, history, screenshot, candidate)


def eager(store):
    """A learner that has always read and published every full batch."""
    return Learner(*[lambda: store.head() // 4 * 4] * 2)


def rounds(sim, store, *, prm=None, client=None, plan=PLAN, learner=None):
    return CandidateRounds(
        sim,
        client or sim,
        store,
        prm=prm or Judging(sim),
        harness=HARNESS,
        curriculum=CURRICULUM,
        plan=plan,
        learner=learner or eager(store),
    )


def finish(made, seconds=20.0):
    made.start()
    until(lambda: made.done, seconds)
    made.stop()
    return made.snapshot()


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


def test_rounds_end_to_end():
    sim, store = Knowing(wrong=0.3), Memory()
    prm = Judging(sim)
    stats = finish(rounds(sim, store, prm=prm))
    assert stats["round"] == 2 and stats["collected"] == 24 and stats["in_flight"] == stats["live"] == 0
    assert stats["groups"] == stats["states"] == store.head() and store.head() % 4 == 0 and store.head() >= 8
    assert stats["candidates"] == 4 * store.head() == stats["judged"] and stats["invalid"] == stats["requeued"] == 0
    assert [d["round"] for d in store.all_deltas] == sorted(d["round"] for d in store.all_deltas)
    assert {d["round"] for d in store.all_deltas} == {1, 2} and store.records["round"]["round"] == 2
    assert 0 < stats["correct"] < stats["candidates"]
    assert len({g.id for g in store.groups}) == store.head() == len({g.state for g in store.groups})
    for group, delta in zip(store.groups, store.all_deltas, strict=True):
        _name, index = group.state
        assert len(group.trajectories) == 4 and delta["scored"] == 4
        assert delta["correct"] == sum(t.outcome.reward for t in group.trajectories)
        for t in group.trajectories:
            (step,) = t.steps
            assert step.index == index and t.id.startswith(group.id) and t.outcome.reward in (0.0, 1.0)
            assert step.prompt_ids is group.trajectories[0].steps[0].prompt_ids
            assert all(h in store.images for h in step.image_hashes)


def test_the_reward_model_sees_only_what_came_before():
    sim, store = Knowing(wrong=0.3), Memory()
    prm = Judging(sim)
    finish(rounds(sim, store, prm=prm))
    for task, history, screenshot, candidate in prm.calls:
        assert [s.index for s in history] == list(range(candidate.index))
        assert image_hash(screenshot) == candidate.screen_hash and task.suite == "sim"


def test_the_next_round_waits_for_the_learner_to_publish():
    sim, store, at = Knowing(), Memory(), {"consumed": 0, "published": 0}
    made = rounds(sim, store, learner=Learner(lambda: at["consumed"], lambda: at["published"]))
    made.start()
    until(lambda: store.head() == 8)  # (max_lag + 1) x groups_per_update
    time.sleep(0.05)
    assert store.head() == 8

    def follow():
        at["consumed"] = store.head() // 4 * 4
        return made.stats.groups == made.stats.states > 8 and at["consumed"] == store.head()

    until(follow)
    time.sleep(0.05)
    assert made.stats.round == 1
    at["published"] = store.head() - 4
    time.sleep(0.05)
    assert made.stats.round == 1
    at["published"] = store.head()
    until(lambda: made.stats.round == 2)
    made.stop()


def test_unparseable_is_zero_without_asking_the_reward_model():
    sim, store = Knowing(), Memory()

    class Babbling:
        async def generate(self, prompt, sampling):
            if len(store.records) > 1 and made.stats.collected:
                return say("a", "b")
            return await sim.generate(prompt, sampling)

    prm = Judging(sim)
    made = rounds(sim, store, prm=prm, client=Babbling(), plan=dataclasses.replace(PLAN, rounds=1))
    stats = finish(made)
    assert stats["unparseable"] == stats["candidates"] > 0 and prm.calls == []
    assert all(t.outcome == Outcome("failure", 0.0, "unparseable") for g in store.groups for t in g.trajectories)
    assert all(t.steps[0].parse_error for g in store.groups for t in g.trajectories)


@pytest.mark.parametrize(
    "fault",
    [
        SandboxLost("gone"),
        ConnectionResetError("reset"),
        Outcome("invalid", reason="503"),
        Outcome("success", 0.5),
        "hang",
    ],
)
def test_a_fault_of_the_reward_model_is_retried_never_zero(fault):
    sim, store = Knowing(), Memory()
    prm = Judging(sim, lambda n: fault if n % 9 == 0 else None)
    plan = dataclasses.replace(PLAN, rounds=1, score_seconds=0.05)
    stats = finish(rounds(sim, store, prm=prm, plan=plan))
    assert stats["requeued"] == stats["invalid"] > 0
    assert all(t.outcome.status == "success" for g in store.groups for t in g.trajectories)  # the oracle's candidates
    assert stats["judged"] == stats["candidates"] == 4 * stats["groups"] + stats["invalid"]


def test_a_group_without_candidates_is_replaced():
    sim, store = Knowing(), Memory()
    prm = Judging(sim, lambda n: SandboxLost("gone") if n <= 6 else None)
    plan = dataclasses.replace(PLAN, rounds=1, rollout=dataclasses.replace(ROLLOUT, retries=0))
    stats = finish(rounds(sim, store, prm=prm, plan=plan, learner=Learner(store.head, store.head)))
    trainable = [g for g in store.groups if len(g.valid) >= 2]
    assert len(trainable) == stats["states"] and len(trainable) % 4 == 0 and store.head() > len(trainable)


def test_rounds_that_leave_nothing_stop_by_name():
    store = Memory()
    sim = Knowing(budget=3)
    plan = dataclasses.replace(PLAN, empty_rounds=2)
    made = rounds(sim, store, client=Scripted(say("<wait>")), plan=plan)
    made.start()
    until(lambda: made.done)
    with pytest.raises(EmptyRounds, match=r"2 rounds in a row .* an update takes 4 states.*'used_budget': 24"):
        made.stop()
    down = rounds(Knowing(), Memory(), prm=Judging(Knowing(), lambda n: OSError("down")), plan=plan)
    down.plan = dataclasses.replace(plan, rollout=dataclasses.replace(ROLLOUT, retries=0))
    down.start()
    until(lambda: down.done)
    with pytest.raises(EmptyRounds, match=r"candidates invalid, the last: .*OSError: down"):
        down.stop()


def test_stop_in_the_middle_and_go_on():
    sim, store = Knowing(delay=0.002), Memory()
    plan = dataclasses.replace(PLAN, rounds=50)
    made = rounds(sim, store, plan=plan)
    made.start()
    until(lambda: store.head() >= 6)
    made.stop()
    first, at = store.head(), made.stats.round
    assert all(len(g.trajectories) == 4 for g in store.groups) and made.snapshot()["in_flight"] == 0
    again = rounds(sim, store, plan=plan)
    again.start()
    until(lambda: store.head() > first)
    again.stop(drain=False)
    assert again.stats.round > at and len({g.id for g in store.groups}) == store.head()


def test_equal_states_can_be_merged():
    sim, store = Knowing(), Memory()
    curriculum = Curriculum(("check2",), tasks_per_family=1)
    made = {}
    for merge in (False, True):
        plan = dataclasses.replace(PLAN, rounds=1, tasks=8, deduplicate=merge)
        plan = dataclasses.replace(plan, rollout=dataclasses.replace(ROLLOUT, groups_per_update=1))
        store = Memory()
        service = CandidateRounds(
            sim, sim, store, prm=Judging(sim), harness=HARNESS, curriculum=curriculum, plan=plan,
            learner=Learner(store.head, store.head),
        )  # fmt: skip
        made[merge] = finish(service)["states"]
    assert made[False] == 8 * made[True]
