"""What a trained policy uses: greedy success as it is, with the screen blanked, and with the instruction blanked.

    python -m tests.bench ablate --run=runs/stepo [--checkpoint=latest|best|STEP] [--tasks=256]

Blank screens are one grey; a blank instruction is empty. Attempts act in the real sandbox and are scored as ever: only
what the policy sees differs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cuajax import metrics
from cuajax.types import Action, Env, Observation, Outcome, Suite, Task
from tests.bench import _runs
from tests.bench._runs import Run

GREY = 128


class BlankEnv:
    """A sandbox whose every screenshot is one grey."""

    def __init__(self, inner: Env) -> None:
        self.inner = inner

    async def reset(self, task: Task) -> Observation:
        return _blank(await self.inner.reset(task))

    async def step(self, action: Action) -> Observation:
        return _blank(await self.inner.step(action))

    async def close(self) -> None:
        await self.inner.close()


class BlankSuite:
    """A suite that hands out `BlankEnv`s and scores the sandboxes inside them."""

    def __init__(self, inner: Suite) -> None:
        self.inner, self.name, self.families = inner, inner.name, inner.families

    def task(self, family: str, seed: int) -> Task:
        return self.inner.task(family, seed)

    async def provision(self) -> Env:
        return BlankEnv(await self.inner.provision())

    async def evaluate(self, task: Task, env: Env, last: Action | None) -> Outcome:
        assert isinstance(env, BlankEnv)
        return await self.inner.evaluate(task, env.inner, last)


def _blank(seen: Observation) -> Observation:
    return Observation(np.full_like(seen.screenshot, GREY))


def wordless(tasks: Sequence[Task]) -> list[Task]:
    return [replace(task, instruction="") for task in tasks]


def main(argv: list[str]) -> dict:
    parser = argparse.ArgumentParser("tests.bench ablate", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--run", type=Path, required=True, help="a run directory")
    parser.add_argument("--checkpoint", default="latest", help="latest, best or a step")
    parser.add_argument("--tasks", type=int, default=256)
    given = parser.parse_args(argv)
    import parts

    run = Run.of(given.run)
    cfg, params, step = _runs.policy_of(run, which=given.checkpoint)
    suite, harness = parts.suite(run.config), parts.harness(run.config)
    tasks = _runs.final_tasks(run.config, count=given.tasks)
    conditions: dict[str, tuple[Any, Sequence[Task]]] = {
        "normal": (suite, tasks), "blank_screen": (BlankSuite(suite), tasks),
        "blank_instruction": (suite, wordless(tasks)),
    }  # fmt: skip
    found = {}
    with _runs.served(run, params, cfg=cfg) as serving:
        for name, (seen, asked) in conditions.items():
            done = parts.run_tasks(serving.connect, seen, asked, harness=harness)
            found[name] = parts.scores(done, asked)
    print(f"{run.path}, checkpoint {step}, {len(tasks)} held-out tasks, greedy; {_runs.machine()}")
    rows = [[family, *(one["families"][family] for one in found.values())] for family in found["normal"]["families"]]
    rows.append(["all", *(one["success"] for one in found.values())])
    metrics.print_table("success", ("family", *(name.replace("_", " ") for name in found)), rows)
    told = {name: one["success"] for name, one in found.items()}
    intervals = {k: parts.wilson(round(v * len(tasks)), len(tasks)) for k, v in told.items()}
    invalid = sum(one["invalid"] for one in found.values())
    families = {name: one["families"] for name, one in found.items()}
    return _runs.rounded(
        {
            **told,
            "ci95": intervals,
            "tasks": len(tasks),
            "invalid": invalid,
            "checkpoint": step,
            "infeasible_share": sum(not t.feasible for t in tasks) / len(tasks),
            "families": families,
        }
    )
