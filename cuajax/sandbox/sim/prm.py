"""The exact process reward model of the embedded desktop: is a decision a step nearer to the goal?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cuajax.sandbox.sim.goals import met, remaining
from cuajax.sandbox.sim.state import Desktop, apply
from cuajax.sandbox.sim.suite import SimSuite
from cuajax.types import Call, Outcome, Step, Task

_KEPT = 256  # replayed states

_NEARER = Outcome("success", 1.0, "nearer to the goal")
_ENDED = Outcome("success", 1.0, "rightly ended")
_NOT_NEARER = Outcome("failure", 0.0, "not nearer to the goal")
_WRONG_END = Outcome("failure", 0.0, "wrongly ended")
_NO_ACTION = Outcome("failure", 0.0, "no action")


class SimPRM:
    """Replays the history from the task's start state and scores the candidate on the state it reaches.

    1 iff the candidate lowers the fewest steps still needed, or rightly ends the task: success when the goal is met,
    failure when it is infeasible. Pixels are not looked at.
    """

    def __init__(self, suite: SimSuite):
        self._suite = suite
        # The candidates of one state share their history: keyed by its steps' identities, which the value keeps alive.
        self._states: dict[tuple[str, tuple[int, ...]], tuple[Desktop, tuple[Step, ...]]] = {}

    async def score(self, task: Task, history: Sequence[Step], screenshot: np.ndarray, candidate: Step) -> Outcome:
        return self.score_now(task, history, candidate)

    def score_now(self, task: Task, history: Sequence[Step], candidate: Step) -> Outcome:
        actions = [call.action for call in candidate.calls if call.action is not None]
        if candidate.parse_error is not None or not actions:
            return _NO_ACTION
        goal = self._suite.scene(task).goal
        state = self._state(task, history).copy()
        before = remaining(state, goal)
        for action in actions:
            if action.kind == "terminate":
                right = met(state, goal) if action.status != "failure" else not goal.feasible
                return _ENDED if right else _WRONG_END
            apply(state, action)
        return _NEARER if remaining(state, goal) < before else _NOT_NEARER

    def _state(self, task: Task, history: Sequence[Step]) -> Desktop:
        key = (task.id, tuple(map(id, history)))
        if key not in self._states:
            desktop = self._suite.scene(task).desktop.copy()
            for step in history:
                _replay(desktop, step.calls)
            if len(self._states) >= _KEPT:
                self._states.pop(next(iter(self._states)))
            self._states[key] = (desktop, tuple(history))
        return self._states[key][0]


def _replay(desktop: Desktop, calls: Sequence[Call]) -> None:
    for call in calls:
        if call.action is not None:
            apply(desktop, call.action)
