"""Steps, screenshots, tasks and warm-up decisions a second of the embedded desktop, on one core."""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from cuajax.sandbox.sim.families import FAMILIES
from cuajax.sandbox.sim.prm import SimPRM
from cuajax.sandbox.sim.screens import decisions
from cuajax.sandbox.sim.state import apply
from cuajax.sandbox.sim.suite import SimEnv, SimSuite
from cuajax.types import Action, Call, Completion, Step

_NOTHING = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "stop")


def _rate(body: Callable[[], int], repeats: int = 9) -> tuple[float, float]:
    """Median and spread (half the inter-quartile range) of operations a second; `body` returns how many it did."""
    body()
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        count = body()
        rates.append(count / (time.perf_counter() - start))
    low, middle, high = statistics.quantiles(rates, n=4)
    return middle, (high - low) / 2


def _episodes(suite: SimSuite, seeds: int, *, pixels: bool) -> Callable[[], int]:
    """Oracle attempts at every family; counts steps (resets, which render as well, are in the time)."""
    plans: list[tuple] = []
    for name in suite.families:
        for seed in range(seeds):
            env, task, actions = SimEnv(suite), suite.task(name, seed), []
            env.reset_now(task)
            while (action := suite.oracle(env)).kind != "terminate":
                actions.append(action)
                env.step_now(action)
            plans.append((task, actions))
    env = SimEnv(suite)

    def body() -> int:
        count = 0
        for task, actions in plans:
            if pixels:
                env.reset_now(task)
                for action in actions:
                    env.step_now(action)
                count += len(actions) + 1
            else:
                desktop = suite.scene(task).desktop.copy()
                for action in actions:
                    apply(desktop, action)
                count += len(actions)
        return count

    return body


def _scores(suite: SimSuite) -> Callable[[], int]:
    task = suite.task("form", 1)
    candidates = [Step(0, _NOTHING.token_ids, (), _NOTHING, (Call(Action("click", x / 16, 0.5)),)) for x in range(16)]
    prm = SimPRM(suite)

    def body() -> int:
        for candidate in candidates * 20:
            prm.score_now(task, (), candidate)
        return 20 * len(candidates)

    return body


def main(argv: list[str]) -> dict:
    """Optional arguments: width height scale (64 64 1)."""
    width, height, scale = (int(a) for a in (argv + ["64", "64", "1"][len(argv) :]))
    suite, seeds = SimSuite(width, height, scale=scale), iter(range(10**9))

    def tasks() -> int:
        for _ in range(200):
            suite.task("form", next(seeds))
        return 200

    def warm_up(most: int) -> Callable[[], int]:
        size = (width, height, scale)
        return lambda: len(decisions(random.Random(next(seeds)), 32, 6, clauses=most, size=size))

    table: dict[str, tuple[str, Callable[[], int]]] = {
        "step_and_render": ("apply + screenshot, all families", _episodes(suite, 10, pixels=True)),
        "step": ("apply alone", _episodes(suite, 10, pixels=False)),
        "task": ("new tasks (form)", tasks),
        "prm": ("PRM scores (form)", _scores(suite)),
        "decision": ("warm-up decisions, 32 screens x 6", warm_up(1)),
        "decision2": ("same, two clauses", warm_up(2)),
    }
    print(f"{width}x{height} px, scale {scale}, {len(FAMILIES)} families, {platform.machine()}, one thread")
    print(f"{'what':<36}{'a second':>12}{'+-':>8}{'us each':>10}")
    result: dict[str, object] = {"width": width, "height": height, "scale": scale, "python": platform.python_version()}
    for key, (label, body) in table.items():
        rate, spread = _rate(body)
        print(f"{label:<36}{rate:>12,.0f}{spread:>8,.0f}{1e6 / rate:>10.1f}")
        result[f"{key}_per_s"] = round(rate)
    return result
