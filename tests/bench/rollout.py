"""Host cost of a decision (prompt, hash, parse, bookkeeping; the sim included or not), and of patching screens."""

from __future__ import annotations

import asyncio
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cuajax.inputs.grid import positions, vision_inputs
from cuajax.rollout.envs import EnvPool
from cuajax.rollout.episode import Agent, Limits, Name, Stages, attempt
from cuajax.types import Observation, Outcome
from tests.rollout.scripted import HARNESS, Scripted, SimSuite, say

ATTEMPTS, BUDGET = 200, 8


class Still:
    """A suite whose sandboxes only turn pages: what remains is the rollout's own cost."""

    def __init__(self, sim: SimSuite) -> None:
        self.name, self.families, self.task = sim.name, sim.families, sim.task
        pixels = np.random.default_rng(0).integers(0, 256, (16, 64, 64, 3), dtype=np.uint8)
        self.pages, self.page = [Observation(p) for p in pixels], 0

    async def provision(self) -> Any:
        return self

    async def reset(self, task: Any) -> Observation:
        return self.pages[0]

    async def step(self, action: Any) -> Observation:
        self.page = (self.page + 1) % 16
        return self.pages[self.page]

    async def close(self) -> None: ...

    async def evaluate(self, task: Any, env: Any, last: Any) -> Outcome:
        return Outcome("failure")


def _decisions(suite: Any, task: Any) -> Callable[[], int]:
    agent = Agent.of(Scripted(say("<x3>", "<y4>", "<move>")), HARNESS)

    async def main() -> int:
        envs, stages = EnvPool(suite, reuse=True, keep=4), Stages(Limits())
        count = 0
        for i in range(ATTEMPTS):
            name = Name(str(i), "g", 0)
            trajectory, _ = await attempt(task, suite, agent=agent, name=name, envs=envs, stages=stages)
            count += len(trajectory.steps)
        return count

    return lambda: asyncio.run(main())


def _micros(body: Callable[[], int], repeats: int = 9) -> tuple[float, float]:
    """Median microseconds an operation and half the inter-quartile range; `body` returns how many it did."""
    body()
    costs = []
    for _ in range(repeats):
        start = time.perf_counter()
        count = body()
        costs.append((time.perf_counter() - start) / count * 1e6)
    low, middle, high = statistics.quantiles(costs, n=4)
    return middle, (high - low) / 2


def main(argv: list[str]) -> dict[str, Any]:
    sim = SimSuite(budget=BUDGET)
    task = sim.task("check2", 1)
    screens = list(np.random.default_rng(0).integers(0, 256, (200, 64, 64, 3), dtype=np.uint8))
    ids = np.array([HARNESS.dialect.tokenizer.image_id] * 16 + [50] * 12, np.int32)  # type: ignore[attr-defined]
    image_id = int(ids[0])
    rows = {
        "decision, pages only": _micros(_decisions(Still(sim), task)),
        "decision with the sim": _micros(_decisions(sim, task)),
        "patches of a 64x64 screen": _micros(lambda: len(vision_inputs(screens, HARNESS.image).patches)),
        "positions of a prompt": _micros(lambda: sum(len(positions(ids, [(4, 4)], image_id)) == 2 for _ in range(999))),
    }
    for name, (middle, spread) in rows.items():
        print(f"{name:<28}{middle:8.1f} us  +- {spread:.1f}")
    return {"machine": platform.machine(), "us": {name: round(middle, 2) for name, (middle, _) in rows.items()}}
