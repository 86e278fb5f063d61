import itertools
from typing import Any

import pytest

from cuajax.rollout import states
from cuajax.types import Action, Call, Outcome, Step, Task, Trajectory
from tests.rollout.scripted import completion

TASK = Task("sim/check1/1", "sim", "check1", "check red", budget=20)
fresh = itertools.count()


def step(answer=None, *, screen=None, kind: Any = "click", error=None, calls=None):
    """A step with its own answer and screen unless told otherwise."""
    n = next(fresh)
    made = () if error else (Call(Action(kind, x=0.5, y=0.5)),) if calls is None else calls
    screen = screen or f"s{n}"
    ids = [1, n] if answer is None else [2, answer]
    return Step(0, completion([9]).token_ids, (screen,), completion(ids), made, error, screen)


def test_format_errors():
    assert states.format_errors([step(), step(error="no verb"), step()]) == {1}


@pytest.mark.parametrize(
    ("answers", "want"),
    [
        ([7, 7], set()),
        ([7, 7, 7], {0, 1, 2}),
        ([1, 7, 7, 7, 7, 2], {1, 2, 3, 4}),
        ([7, 7, 1, 7], set()),
        ([7, 7, 7, 1, 8, 8, 8], {0, 1, 2, 4, 5, 6}),
    ],
)
def test_repeated_answers(answers, want):
    assert states.repeated_answers([step(a) for a in answers]) == want


def test_long_scrolls():
    four = [step(kind="scroll") for _ in range(4)]
    assert states.long_scrolls(four) == set()
    assert states.long_scrolls([step(), *four, step(kind="scroll"), step()]) == {1, 2, 3, 4, 5}
    assert states.long_scrolls([*four, step(), step(kind="scroll")]) == set()


def test_still_frames_drop_both_sides():
    screens = ["a", "b", "b", "c", "d", "d", "d", "e", "a"]
    assert states.still_frames([step(screen=s) for s in screens]) == {1, 2, 4, 5, 6}
    assert states.still_frames([step()]) == set()


def test_empty_actions():
    assert states.empty_actions([step(), step(calls=()), step(error="x")]) == {1}


def trajectory(*steps, status: Any = "failure"):
    return Trajectory("t", TASK.id, "g", 0, steps, Outcome(status))


def shown(*steps):
    return {h for s in steps for h in s.image_hashes}


def test_surviving_combines_them_and_counts():
    steps = [step(), step(error="x"), step(7), step(7), step(7), step(screen="q"), step(screen="q"), step()]
    kept, dropped = states.surviving(trajectory(*steps), TASK, shown(*steps))
    assert kept == [0, 7]
    assert dropped == {
        "format_errors": 1,
        "repeated_answers": 3,
        "still_frames": 2,
        "long_scrolls": 0,
        "empty_actions": 0,
    }


def test_whole_trajectories_are_dropped():
    steps = [step() for _ in range(3)]
    images = shown(*steps)
    assert states.surviving(trajectory(*steps, status="success"), TASK, images)[0] == [0, 1, 2]  # successful or not
    assert states.surviving(trajectory(*steps, status="invalid"), TASK, images) == ([], {"invalid": 1})
    assert states.surviving(trajectory(*steps), TASK, images - {steps[1].screen_hash}) == ([], {"capture_gap": 1})
    short = Task(TASK.id, "sim", "check1", "check red", budget=3)
    assert states.surviving(trajectory(*steps), short, images) == ([], {"used_budget": 1})
    longer = Task(TASK.id, "sim", "check1", "check red", budget=4)
    assert states.surviving(trajectory(*steps), longer, images)[0] == [0, 1, 2]


def test_distinct_keeps_the_first_of_equal_prompts():
    one, two = trajectory(step(screen="a"), step(screen="b")), trajectory(step(screen="b"), step(screen="c"))
    other = Task("sim/check1/2", "sim", "check1", "check red")
    every = [(TASK, one, 0), (TASK, one, 1), (TASK, two, 0), (TASK, two, 1), (other, two, 0)]
    assert states.distinct(every) == [every[0], every[1], every[3], every[4]]
