"""Which decisions of a live trajectory become states to sample candidates at (PRO-CUA, arXiv:2605.29119). Pure.

A dropped step is no state, but it stays in the history of the later ones.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from cuajax.types import Step, Task, Trajectory

SAME_ANSWERS = 3  # identical consecutive answers that make a loop
SCROLLS = 5  # consecutive scrolls that make wandering


# ------------------------------------------------------------------------------------------------ trajectories
def captured(trajectory: Trajectory, images: Container[str]) -> bool:
    """Whether every step's screen and images are known: nothing was lost while recording."""
    return all(s.screen_hash and s.image_hashes and all(h in images for h in s.image_hashes) for s in trajectory.steps)


def used_budget(trajectory: Trajectory, task: Task) -> bool:
    """Whether it took its last allowed decision; one that finished earlier is kept, successful or not."""
    return len(trajectory.steps) >= task.budget


# ------------------------------------------------------------------------------------------------------- steps
def _runs(steps: Sequence[Step], key: Callable[[Step], Any], least: int) -> set[int]:
    """Indices inside runs of at least `least` consecutive steps with an equal key; None never counts."""
    found: set[int] = set()
    for value, run in itertools.groupby(range(len(steps)), lambda i: key(steps[i])):
        members = list(run)
        if value is not None and len(members) >= least:
            found.update(members)
    return found


def format_errors(steps: Sequence[Step]) -> set[int]:
    """Answers that could not be parsed."""
    return {i for i, s in enumerate(steps) if s.parse_error is not None}


def repeated_answers(steps: Sequence[Step]) -> set[int]:
    """All of a run of at least 3 identical consecutive answers."""
    return _runs(steps, lambda s: s.completion.token_ids.tobytes(), SAME_ANSWERS)


def long_scrolls(steps: Sequence[Step]) -> set[int]:
    """All of a run of at least 5 consecutive scrolls, whatever their direction."""

    def scrolls(step: Step) -> bool | None:
        kinds = {call.action.kind if call.action else "" for call in step.calls}
        return True if kinds == {"scroll"} else None

    return _runs(steps, scrolls, SCROLLS)


def still_frames(steps: Sequence[Step]) -> set[int]:
    """Both steps around two consecutive pixel-identical screens."""
    return {j for i in range(len(steps) - 1) if steps[i].screen_hash == steps[i + 1].screen_hash for j in (i, i + 1)}


def empty_actions(steps: Sequence[Step]) -> set[int]:
    """Answers that parsed to no call at all."""
    return {i for i, s in enumerate(steps) if s.parse_error is None and not s.calls}


FILTERS: tuple[Callable[[Sequence[Step]], set[int]], ...] = (
    format_errors, repeated_answers, long_scrolls, still_frames, empty_actions,
)  # fmt: skip


def surviving(trajectory: Trajectory, task: Task, images: Container[str]) -> tuple[list[int], Counter[str]]:
    """Indices of the steps that become states, and how many were dropped by what (a whole trajectory counts once)."""
    if trajectory.outcome.status == "invalid":
        return [], Counter(invalid=1)
    if not captured(trajectory, images):
        return [], Counter(capture_gap=1)
    if used_budget(trajectory, task):
        return [], Counter(used_budget=1)
    found = {check.__name__: check(trajectory.steps) for check in FILTERS}
    dropped = set().union(*found.values())
    return [i for i in range(len(trajectory.steps)) if i not in dropped], Counter({k: len(v) for k, v in found.items()})


def distinct(states: Iterable[tuple[Task, Trajectory, int]]) -> list[tuple[Task, Trajectory, int]]:
    """The first of each set of states with the same task, prompt tokens and images, in order."""
    seen: dict[tuple[str, bytes, tuple[str, ...]], tuple[Task, Trajectory, int]] = {}
    for task, trajectory, index in states:
        step = trajectory.steps[index]
        seen.setdefault((task.id, step.prompt_ids.tobytes(), step.image_hashes), (task, trajectory, index))
    return list(seen.values())
