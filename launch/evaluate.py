"""Score a checkpoint of a run on held-out tasks.

    python launch/evaluate.py --run=DIR --episodes=512 --seed=1 [--sampled] [--samples=K] [--step=best|latest|N]
        [--json]

Tasks come evenly from the run's families, at seeds no training task and no evaluation of the run itself has; another
--seed gives other tasks. Greedy, or --sampled at the temperature of training attempts; with --samples=K also pass@k
(one of k attempts succeeds) and pass^k (all do). With --json stdout has one JSON object, the last line. See
configs/eval.py for the same as a config.
"""

import json as codec
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import parts
import policy_server

from cuajax import metrics, program
from cuajax.config import ConfigError, Settings
from cuajax.types import Outcome, Suite, Trajectory

BLOCK = 1 << 15  # tasks of one seed at most
FIRST = 1 << 21  # the run's own evaluations stay below
BLOCKS = ((1 << 30) - FIRST) // BLOCK


class Counted:
    """A suite that shows how far an evaluation is."""

    def __init__(self, inner: Suite, line: metrics.ProgressLine) -> None:
        self.name, self.families = inner.name, inner.families
        self.task, self.provision = inner.task, inner.provision
        self._inner, self._line, self._done, self._passed = inner, line, 0, 0

    async def evaluate(self, task: Any, env: Any, last: Any) -> Outcome:
        outcome = await self._inner.evaluate(task, env, last)
        self._done += 1
        self._passed += outcome.status == "success"
        self._line.update(self._done, {"success": self._passed / self._done})
        return outcome


def any_and_all(successes: Sequence[int], samples: int, k: int) -> tuple[float, float]:
    """(pass@k, pass^k): chances that one of k, or all k, of a task's attempts succeed, unbiased over `samples`."""
    whole = math.comb(samples, k)
    one = [1.0 - math.comb(samples - c, k) / whole for c in successes]
    every = [math.comb(c, k) / whole for c in successes]
    return sum(one) / len(one), sum(every) / len(every)


def summary(trajectories: Sequence[Trajectory], tasks: Sequence[Any]) -> dict[str, Any]:
    """Success with its 95 % interval (Wilson, over tasks), mean decisions, families and pass@k, pass^k."""
    scored, samples = parts.scores(trajectories, tasks), len(trajectories) // len(tasks)
    each = [trajectories[i * samples : (i + 1) * samples] for i in range(len(tasks))]
    valid = [t for t in trajectories if t.outcome.status != "invalid"]
    whole = [sum(t.outcome.status == "success" for t in some) for some in each
             if all(t.outcome.status != "invalid" for t in some)]  # fmt: skip
    count = len(valid) / samples
    low, high = parts.wilson(scored["success"] * count, count) if valid else (0.0, 1.0)
    made = {"success": scored["success"], "ci95": [low, high], "episodes": len(valid), "tasks": len(tasks),
            "mean_steps": scored["mean_steps"], "reward": scored["reward"], "invalid": scored["invalid"],
            "families": scored["families"]}  # fmt: skip
    ks = [k for k in (2**i for i in range(11)) if k < samples] + [samples]
    pairs = {k: any_and_all(whole, samples, k) for k in ks} if samples > 1 and whole else {}
    for place, name in enumerate(("pass@k", "pass^k")):
        made |= {name: {k: v[place] for k, v in pairs.items()}} if pairs else {}
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in made.items()}


def main(settings: Settings, json: bool, **flags: Any) -> int:
    # ------------------------------------------------------------------------ check, before devices are touched
    given = {name: value for name, value in flags.items() if value != UNSET[name]}
    wanted = {name: given.get(name, settings[name]) for name in UNSET}
    if not wanted["run"]:
        raise ConfigError("--run=DIR is missing: the run directory to score")
    run_dir = Path(wanted["run"])
    config = program.load_resolved(run_dir)
    suite, harness = parts.suite(config), parts.harness(config)
    if not 1 <= wanted["episodes"] <= BLOCK or wanted["seed"] < 0 or wanted["samples"] < 1:
        raise ConfigError(f"episodes is {wanted['episodes']} (1 to {BLOCK}), seed {wanted['seed']} (from 0),"
                          f" samples {wanted['samples']} (from 1)")  # fmt: skip
    tasks = parts.held_out(config, suite, wanted["episodes"], start=FIRST + wanted["seed"] % BLOCKS * BLOCK)
    temperature = (config.agent.temperature or 1.0) if wanted["sampled"] else 0.0
    metrics.setup_logging()

    # --------------------------------------------------------------------------------------- the policy, served here
    began = time.monotonic()
    from cuajax.models import presets

    vocabulary = parts.tokenizer(harness).vocab_size
    cfg = presets.get(config.policy.preset, vocab_size=vocabulary, dtype=config.policy.dtype)
    params, meta = policy_server.checkpoint(run_dir, cfg, step=str(wanted["step"]))
    serving = policy_server.start(config, harness, params, cfg=cfg, version=meta["version"])

    # ------------------------------------------------------------------------------------------------------ score it
    total = len(tasks) * wanted["samples"]
    with metrics.ProgressLine(total, label="episodes", shown={"success": "success"}) as line:
        found = parts.run_tasks(
            serving.connect, Counted(suite, line), tasks, harness=harness, temperature=temperature,
            samples=wanted["samples"],
        )  # fmt: skip
    serving.stop()
    told = summary(found, tasks) | {
        "run": str(run_dir), "step": meta["step"], "version": meta["version"], "seed": wanted["seed"],
        "sampled": wanted["sampled"], "samples": wanted["samples"], "seconds": round(time.monotonic() - began, 2),
    }  # fmt: skip
    low, high = told["ci95"]
    rows = [*told["families"].items(), ("all", told["success"])]
    rows += [(f"{name[:-1]}{k}", v) for name in ("pass@k", "pass^k") for k, v in told.get(name, {}).items()]
    title = f"{run_dir}, update {meta['step']}: 95 % interval {low:.1%} to {high:.1%}, {told['episodes']} episodes"
    metrics.print_table(title, ("family", "success"), rows, stream=sys.stderr if json else sys.stdout)
    if json:
        print(codec.dumps(told))
    return 0


UNSET: dict[str, Any] = {"run": "", "episodes": 0, "seed": -1, "sampled": False, "samples": 0, "step": ""}

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    program.run(main, doc=__doc__ or "", default=str(root / "configs" / "eval.py"), json=False, **UNSET)
