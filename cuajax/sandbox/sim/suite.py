"""The embedded desktop as a suite: tasks, sandboxes and scores."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import numpy as np

from cuajax.sandbox.env import SandboxLost
from cuajax.sandbox.sim.families import NAMES, TWINS, Scene, check_name, scene
from cuajax.sandbox.sim.goals import Goal, met, next_move, remaining
from cuajax.sandbox.sim.render import render
from cuajax.sandbox.sim.state import CELL, Desktop, apply
from cuajax.types import Action, Env, Observation, Outcome, Task

_SCENES = 4096  # start states kept: a group asks for the same one many times


class SimEnv:
    """One desktop an attempt acts in; the `_now` twins do the same without a coroutine."""

    def __init__(self, suite: SimSuite):
        self._suite = suite
        self.desktop: Desktop | None = None
        self.goal: Goal | None = None

    def reset_now(self, task: Task) -> Observation:
        start = self._suite.scene(task)
        self.desktop, self.goal = start.desktop.copy(), start.goal
        return self.observe()

    def step_now(self, action: Action) -> Observation:
        if self.desktop is None:
            raise SandboxLost("step before reset (or after close)")
        apply(self.desktop, action)
        return self.observe()

    def observe(self) -> Observation:
        if self.desktop is None:
            raise SandboxLost("observe before reset (or after close)")
        return Observation(self._suite.screenshot(self.desktop))

    async def reset(self, task: Task) -> Observation:
        return self.reset_now(task)

    async def step(self, action: Action) -> Observation:
        return self.step_now(action)

    async def close(self) -> None:
        self.desktop = None

    async def snapshot(self) -> tuple[Desktop, Goal]:
        if self.desktop is None or self.goal is None:
            raise SandboxLost("snapshot before reset (or after close)")
        return self.desktop.copy(), self.goal

    async def restore(self, snapshot: tuple[Desktop, Goal]) -> Observation:
        self.desktop, self.goal = snapshot[0].copy(), snapshot[1]
        return self.observe()


class SimSuite:
    """Tasks of the embedded desktop on a `width` x `height` pixel screen.

    budget: decisions of an attempt; None is the oracle's length + 4, at least 6.
    scale: screen pixels per desktop pixel, so a cell is 16*scale pixels wide; at least 4x4 cells must fit.
    """

    name = "sim"

    def __init__(
        self,
        width: int = 64,
        height: int = 64,
        *,
        families: Sequence[str] = NAMES,
        budget: int | None = None,
        scale: int = 1,
    ):
        if scale < 1 or min(width, height) < 4 * CELL * scale:
            raise ValueError(
                f"a screen of {width}x{height} at scale {scale} holds fewer than 4x4 cells; "
                f"give scale >= 1 and at least {4 * CELL} x scale pixels a side"
            )
        self.width, self.height, self.scale, self.budget = width, height, scale, budget
        self.families = tuple(families)
        for name in self.families:
            check_name(name)
        self._scenes: dict[tuple[str, int], Scene] = {}

    # --------------------------------------------------------------------------------------------- tasks
    def task(self, family: str, seed: int) -> Task:
        """The task `sim/<family>/<seed>`; "a+b" names a composition. Raises ValueError on an unknown family."""
        check_name(family)
        start = self._scene(family, seed)
        budget = self.budget or max(int(remaining(*start)) - 1 + 4, 6)
        return Task(
            id=f"sim/{family}/{seed}",
            suite=self.name,
            family=family,
            instruction=start.goal.instruction,
            setup={"seed": seed, "width": self.width, "height": self.height, "scale": self.scale},
            budget=budget,
            feasible=start.goal.feasible,
        )

    def scene(self, task: Task) -> Scene:
        """A task's start state and goal; shared, so copy the desktop before acting on it."""
        return self._scene(task.family, task.setup["seed"])

    def _scene(self, family: str, seed: int) -> Scene:
        found = self._scenes.get((family, seed))
        if found is None:
            drawn = "twin" if family in TWINS else family  # twins share every draw but one
            found = scene(family, random.Random(f"{drawn}/{seed}"), self.width / self.scale, self.height / self.scale)
            if len(self._scenes) >= _SCENES:
                self._scenes.pop(next(iter(self._scenes)))
            self._scenes[family, seed] = found
        return found

    def start_hash(self, task: Task) -> str:
        """Tells tasks apart by what they are (start state and instruction), whatever their seeds."""
        key = (self.scene(task).desktop.key(), task.instruction)
        return hashlib.sha256(repr(key).encode()).hexdigest()

    def oracle_length(self, task: Task) -> int:
        """GUI actions the oracle takes (the decision to terminate not counted)."""
        return int(remaining(*self.scene(task))) - 1

    # ----------------------------------------------------------------------------------- sandboxes, scores
    def screenshot(self, desktop: Desktop) -> np.ndarray:
        return render(desktop, width=self.width, height=self.height, scale=self.scale)

    async def provision(self) -> SimEnv:
        return SimEnv(self)

    async def evaluate(self, task: Task, env: Env, last: Action | None) -> Outcome:
        if not isinstance(env, SimEnv):
            raise TypeError(f"the sim scores its own sandboxes, got {type(env).__name__}")
        return self.evaluate_now(task, env, last)

    def evaluate_now(self, task: Task, env: SimEnv, last: Action | None) -> Outcome:
        """1 iff the end state meets the goal and the attempt did not give up; infeasible: iff it did."""
        if env.desktop is None or env.goal is None:
            raise SandboxLost(f"evaluate {task.id} in a sandbox that was not reset")
        gave_up = last is not None and last.kind == "terminate" and last.status == "failure"
        if not task.feasible:
            return _GAVE_UP if gave_up else _NEVER
        if gave_up:
            return _COULD
        return _MET if met(env.desktop, env.goal) else _UNMET

    def oracle(self, env: SimEnv) -> Action:
        """The next right action in a sandbox, terminate included."""
        if env.desktop is None or env.goal is None:
            raise SandboxLost("oracle before reset (or after close)")
        return next_move(env.desktop, env.goal).action


_MET = Outcome("success", 1.0, "goal met")
_UNMET = Outcome("failure", 0.0, "goal not met")
_GAVE_UP = Outcome("success", 1.0, "rightly given up")
_NEVER = Outcome("failure", 0.0, "infeasible, and not given up")
_COULD = Outcome("failure", 0.0, "given up though feasible")
