from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuajax.rollout.groups import OpenGroup, add
from cuajax.types import Outcome, Task, Trajectory

TASK = Task("sim/check1/1", "sim", "check1", "check red")


def attempt(slot, *, tried=0, status: Any = "success", group="g"):
    return Trajectory(f"{group}/{slot}.{tried}", TASK.id, group, slot, (), Outcome(status))


def test_full_group_closes_in_slot_order():
    group = OpenGroup("g", TASK, 3)
    for slot in (2, 0):
        added = add(group, attempt(slot))
        group = added.open
        assert added.verdict == "waiting" and added.group is None
    added = add(group, attempt(1, status="failure"))
    assert (
        added.verdict == "closed"
        and added.group is not None
        and [t.slot for t in added.group.trajectories] == [0, 1, 2]
    )
    assert added.group.task is TASK and added.group.id == "g"


def test_a_duplicate_changes_nothing():
    group = add(OpenGroup("g", TASK, 2), attempt(0)).open
    again = add(group, attempt(0, tried=1, status="failure"))
    assert again.verdict == "duplicate" and again.open is group


def test_invalid_is_requeued_to_the_limit_then_closes_short():
    group = OpenGroup("g", TASK, 2, retries=2)
    verdicts = []
    for tried in range(3):
        added = add(group, attempt(0, tried=tried, status="invalid"))
        group = added.open
        verdicts.append(added.verdict)
    assert verdicts == ["requeue", "requeue", "waiting"]
    added = add(group, attempt(1, status="invalid"))
    assert (
        added.verdict == "closed"
        and added.group is not None
        and len(added.group.trajectories) == 2
        and added.group.valid == ()
    )
    assert add(added.open, attempt(0, tried=0, status="invalid")).verdict == "duplicate"


def test_strangers_are_refused():
    group = OpenGroup("g", TASK, 2)
    with pytest.raises(ValueError, match=r"of group 'h' slot 0.*group 'g' with slots 0..1"):
        add(group, attempt(0, group="h"))
    with pytest.raises(ValueError, match="slot 2"):
        add(group, attempt(2))
    with pytest.raises(ValueError, match="group of 0"):
        OpenGroup("g", TASK, 0)


@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_a_group_always_closes_exactly_once(size, retries, seed):
    """Any order of arrivals, with duplicates and any mix of outcomes, ends in one Group of `size` distinct slots."""
    random = Random(seed)
    group, closed, requeued = OpenGroup("g", TASK, size, retries=retries), [], 0
    waiting = [(slot, 0) for slot in range(size)]
    arrived = []
    while waiting or (arrived and random.random() < 0.5):
        if waiting and (not arrived or random.random() < 0.7):
            slot, tried = waiting.pop(random.randrange(len(waiting)))
            trajectory = attempt(slot, tried=tried, status=random.choice(["success", "failure", "invalid"]))
        else:
            trajectory = random.choice(arrived)
        added = add(group, trajectory)
        if any(t.id == trajectory.id for t in arrived):
            assert added.verdict == "duplicate" and added.open is group
        arrived.append(trajectory)
        group = added.open
        if added.verdict == "requeue":
            requeued += 1
            waiting.append((slot, tried + 1))
        closed += [added.group] if added.group else []
    assert len(closed) == 1 and [t.slot for t in closed[0].trajectories] == list(range(size))
    assert requeued <= retries and len({t.id for t in closed[0].trajectories}) == size
