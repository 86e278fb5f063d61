import contextlib
import dataclasses
import threading
import time

import pytest

from cuajax.data.journal import Attempt, Journal
from cuajax.data.store import Store
from cuajax.rollout.episode import Limits
from cuajax.rollout.service import NoValidAttempts, Plan, RolloutService
from cuajax.sandbox.env import SandboxLost
from cuajax.serving.client import Unavailable
from cuajax.tasks.curriculum import TRAIN_SEEDS, Curriculum, fold, initial
from tests.rollout.scripted import HARNESS, Faulty, Knowing, Memory, Scripted, say

CURRICULUM = Curriculum(("press1", "check1", "infeasible"), infeasible=("infeasible",), infeasible_share=0.25)
PLAN = Plan(
    group_size=3, groups_per_update=2, max_lag=1, journal=False, reuse_envs=True, poll_seconds=0.002,
    replace_zero_variance=False,
)  # fmt: skip


def service(suite, client, store, plan=PLAN, **options):
    return RolloutService(suite, client, store, harness=HARNESS, curriculum=CURRICULUM, plan=plan, **options)


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)


def test_pacing_bounds_what_is_unread_and_in_flight():
    sim, store, read = Knowing(), Memory(), 0
    rollout = service(sim, sim, store, consumed=lambda: read)
    rollout.start()
    until(lambda: store.head() == PLAN.ahead == 4)
    time.sleep(0.05)
    assert store.head() == 4 and rollout.snapshot()["in_flight"] == 0 and rollout.snapshot()["ready"] == 4
    for read in (2, 4, 7):
        until(lambda r=read: store.head() == r + 4)
    time.sleep(0.05)
    assert store.head() == 11
    rollout.stop()
    assert store.head() == 11


def test_groups_are_complete_and_their_images_are_there():
    sim, store = Knowing(wrong=0.2), Memory()
    rollout = service(sim, sim, store, consumed=lambda: store.head())
    rollout.start()
    until(lambda: store.head() >= 20)
    rollout.stop()
    ids = [t.id for g in store.groups for t in g.trajectories]
    assert len(ids) == len(set(ids)) and len({g.id for g in store.groups}) == len(store.groups)
    for group, delta in zip(store.groups, store.all_deltas, strict=True):
        assert [t.slot for t in group.trajectories] == [0, 1, 2] and {t.group_id for t in group.trajectories} == {
            group.id
        }
        assert delta["passed"] == sum(t.outcome.status == "success" for t in group.trajectories)
        assert group.task.id == f"sim/{delta['family']}/{delta['seed']}" and delta["seed"] < TRAIN_SEEDS[1]
        assert all(h in store.images for t in group.trajectories for s in t.steps for h in s.image_hashes)
    families = [g.task.family for g in sorted(store.groups, key=lambda g: int(g.id.split(".")[1].split("-")[0]))]
    assert families[3::4] == ["infeasible"] * len(families[3::4])
    state = initial()
    for delta in store.all_deltas:
        state = fold(state, delta, CURRICULUM)
    assert rollout.curriculum_state == state == store.records["curriculum"]["state"]
    stats = rollout.snapshot()
    assert stats["attempts"] == 3 * stats["groups"] == 3 * store.head() and stats["in_flight"] == stats["live"] == 0
    assert stats["decisions"] == sum(len(t.steps) for g in store.groups for t in g.trajectories)
    assert stats["policy_s"] > 0 and stats["env_s"] > 0 and stats["prompt_s"] > 0


def test_slow_commits_are_shared():
    sim, store = Knowing(), Memory()
    inner = store.append

    def append(*args):
        time.sleep(0.03)
        return inner(*args)

    store.append = append  # type: ignore[method-assign]
    rollout = service(sim, sim, store, consumed=lambda: store.head())
    rollout.start()
    until(lambda: store.head() >= 12)
    rollout.stop()
    assert max(store.appends) > 1 and sum(store.appends) == store.head()


def test_invalid_attempts_are_requeued():
    sim, store = Knowing(), Memory()
    suite = Faulty(sim, lambda n: SandboxLost("gone") if n % 7 == 3 else None)
    rollout = service(suite, sim, store, consumed=lambda: store.head())
    rollout.start()
    until(lambda: store.head() >= 12)
    rollout.stop()
    stats = rollout.snapshot()
    assert stats["requeued"] > 0 and stats["invalid"] >= stats["requeued"]
    assert all(len(g.valid) == 3 for g in store.groups) and stats["short_groups"] == 0
    assert suite.opened - suite.closed <= 0  # every sandbox was closed in the end


def test_a_hanging_slot_closes_its_group_short():
    sim, store = Knowing(), Memory()
    suite = Faulty(sim, lambda n: "hang" if n % 5 == 0 else None)
    plan = Plan(
        journal=False,
        group_size=3,
        groups_per_update=2,
        max_lag=1,
        retries=0,
        limits=Limits(prepare=0.05, execute=0.05),
    )
    rollout = service(suite, sim, store, plan, consumed=lambda: store.head())
    rollout.start()
    until(lambda: store.head() >= 6)
    rollout.stop()
    assert any(len(g.valid) < 3 for g in store.groups) and all(len(g.trajectories) == 3 for g in store.groups)
    assert rollout.snapshot()["short_groups"] == sum(len(g.valid) < 3 for g in store.groups)


def test_a_fault_that_does_not_pass_stops_the_service_by_name():
    store = Memory()
    plan = Plan(journal=False, group_size=2, groups_per_update=2, retries=0, dead_groups=3)
    rollout = service(Knowing(), Scripted(Unavailable("nobody listens")), store, plan, consumed=lambda: store.head())
    rollout.start()
    until(lambda: rollout._host.done)
    with pytest.raises(NoValidAttempts, match=r"3 groups in a row .* nobody listens"):
        rollout.check()
    for _ in range(2):
        with pytest.raises(NoValidAttempts):
            rollout.stop()


def test_drain_finishes_what_was_started_and_cancel_does_not():
    for drain in (True, False):
        sim, store = Knowing(delay=0.01), Memory()
        rollout = service(sim, sim, store, consumed=lambda: 0)
        rollout.start()
        until(lambda sim=sim: sim.asked > 3)
        started = rollout.snapshot()["in_flight"]
        rollout.stop(drain=drain)
        assert started == 4 and store.head() == (4 if drain else 0)


def test_drain_gives_up_at_its_timeout():
    store = Memory()
    suite = Faulty(Knowing(), lambda n: "hang")
    rollout = service(suite, Scripted(say("<done>")), store, consumed=lambda: 0)
    rollout.start()
    until(lambda: suite.opened == 12)
    began = time.monotonic()
    rollout.stop(timeout=0.1)
    assert time.monotonic() - began < 2.0 and suite.closed == 12


def test_a_restart_goes_on_where_the_store_is():
    store, states = Memory(), []
    for _ in range(2):
        sim = Knowing(wrong=0.5)
        rollout = service(sim, sim, store, consumed=lambda: store.head())
        rollout.start()
        goal = store.head() + 8
        until(lambda goal=goal: store.head() >= goal)
        rollout.stop()
        states.append(rollout.curriculum_state)
        store.records.pop("curriculum")  # as if killed before it was written: the deltas are enough
    state = initial()
    for delta in store.all_deltas:
        state = fold(state, delta, CURRICULUM)
    assert states[1] == state
    assert len({g.id for g in store.groups}) == len(store.groups) and len({g.task.id for g in store.groups}) > 12


def test_pacing_by_the_learners_record():
    sim, store = Knowing(), Memory()
    rollout = service(sim, sim, store)
    rollout.start()
    until(lambda: store.head() == 4)
    store.put("learner", {"consumed": 3})
    until(lambda: store.head() == 7)
    rollout.stop()


@pytest.mark.parametrize(("call", "stage"), [("reset", "prepare"), ("step", "env")])
def test_the_watchdog_names_the_stage_that_stalls(call, stage):
    sim, store, stalls = Knowing(), Memory(), []
    suite = Faulty(sim, lambda n: "hang", on=(call,))
    plan = Plan(journal=False, group_size=3, groups_per_update=2, max_lag=1, stall_seconds=1.0, reuse_envs=True)
    rollout = service(suite, sim, store, plan, consumed=lambda: 0, on_stall=stalls.append)
    rollout.start()
    until(lambda: len(stalls) >= 3)
    time.sleep(0.1)
    rollout.stop(drain=False)
    assert {s.stage for s in stalls} == {stage} and len(stalls) == len({s.attempt for s in stalls}) <= 12
    assert "in strike" in stalls[0].stack and "in attempt" in stalls[0].stack and stalls[0].seconds > 1.0


def test_the_watchdog_names_a_blocked_event_loop():
    sim, store, stalls, release = Knowing(), Memory(), [], threading.Event()

    def block(prompt):
        release.wait(5.0)
        return say("<done>")

    plan = Plan(journal=False, group_size=3, groups_per_update=2, max_lag=1, stall_seconds=0.05)
    rollout = service(sim, Scripted(block), store, plan, consumed=lambda: 0, on_stall=stalls.append)
    rollout.start()
    until(lambda: stalls)
    release.set()
    rollout.stop()
    assert stalls[0].stage == "event loop" and "in block" in stalls[0].stack


def test_what_a_start_lost_the_next_one_takes_up(tmp_path):
    plan = dataclasses.replace(PLAN, journal=True)
    with contextlib.closing(Store.open(tmp_path, create=True)) as store:
        sim = Knowing(delay=0.05)
        rollout = service(sim, sim, store, plan, consumed=store.head)
        rollout.start()
        until(lambda: store.head() >= 4 and rollout._open)
        other = Attempt("b0.7-1/0.0", "b0.7-1", 0, sim.task("press1", 1))
        Journal(store).claim([other])  # of an actor that may be alive
        rollout.stop(drain=False)
        lost = {a.group_id: a.task for a in Journal(store).pending() if a.group_id != other.group_id}
        assert 1 <= len(lost) <= 4 and rollout._open.keys() == lost.keys()

    with contextlib.closing(Store.open(tmp_path)) as store:
        done = store.head()
        sim = Knowing()
        rollout = service(sim, sim, store, plan, consumed=lambda: done)
        rollout.start()
        until(lambda: store.head() == done + 4)
        rollout.stop()
        again = [store.read(seq) for seq in range(done, store.head())]
        assert {g.id: g.task for g in again if g.id in lost} == lost
        for seq, group in enumerate(again, done):
            delta = store.deltas(seq)
            assert group.task.id == f"sim/{delta['family']}/{delta['seed']}" and len(group.valid) == 3
            store.load_images({h for t in group.trajectories for s in t.steps for h in s.image_hashes})
        assert [a.id for a in Journal(store).pending()] == [other.id]
        state = initial()
        for delta in store.deltas_from(0, store.head()):
            state = fold(state, delta, CURRICULUM)
        assert store.get("curriculum") == {"seq": store.head(), "state": state}


def test_a_journal_needs_a_store():
    rollout = service(Knowing(), Knowing(), Memory(), Plan())
    rollout.start()
    with pytest.raises(TypeError, match="not a Memory"):
        rollout.stop()


def test_groups_nobody_trains_on_do_not_hold_new_ones_back():
    """A learner that reads in whole batches of varied groups must never wait for a service that waits for it."""
    plan = dataclasses.replace(PLAN, replace_zero_variance=True, max_lag=0)
    sim, store = Knowing(wrong=0.15), Memory()

    def batches():
        """Groups read by a learner that takes two varied groups a time, dropping the others on the way."""
        varied = [i for i, d in enumerate(store.all_deltas) if d["varied"]]
        return varied[len(varied) // 2 * 2 - 1] + 1 if len(varied) > 1 else 0

    rollout = service(sim, sim, store, plan, consumed=batches)
    rollout.start()
    until(lambda: sum(d["varied"] for d in store.all_deltas) >= 8)
    rollout.stop()
    assert sum(not d["varied"] for d in store.all_deltas) > 8
    again = service(Knowing(), sim, store, plan, consumed=lambda: 0)
    again.start()
    until(lambda: again.snapshot()["live"] == 0 and again.curriculum_state["units"])
    again.stop()
    assert again.snapshot()["ready"] == sum(d["varied"] for d in store.all_deltas)


def test_plan_is_checked():
    with pytest.raises(ValueError, match="actor 'a1' must not end in a digit"):
        Plan(actor="a1")
    with pytest.raises(ValueError, match="group_size is 1, must be at least 2"):
        Plan(group_size=1)
    assert Plan(groups_per_update=16, max_lag=2).ahead == 48
