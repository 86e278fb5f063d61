"""Controls of a finished run: STEPO with rewards shuffled inside each group, and its time spent on more warm-up.

    python -m tests.bench controls --run=runs/stepo [--root=runs/controls] [--only=shuffle|warmup] [--seconds=S]

Both begin with the policy the run's reinforcement began with and end on its final tasks. Shuffled rewards carry no
information about what was done, so they must gain next to nothing; more warm-up gets as many seconds as the run's
reinforcement took (or --seconds). The same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from cuajax import metrics, program
from cuajax.config import Settings, override
from tests.bench import _runs
from tests.bench._runs import Run

MOST = 0.05  # gain that shuffled rewards may show


# ------------------------------------------------------------------------------------------ rewards without meaning
def branch(run: Run, to: Path) -> None:
    """A new run directory that begins where the reinforcement of `run` began, for as many updates; again: nothing."""
    if (to / program.RUN_FILE).exists():
        return
    start = run.path / _runs.START
    if not start.is_dir():
        raise SystemExit(f"{start} is missing: the run did not keep the policy that reinforcement began with")
    updates = (run.result or {}).get("updates", run.config.train.updates)
    draft = to.with_name(f".{to.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(start, draft / "checkpoints")
    rows = [json.dumps(row) for row in run.rows if row["step"] == 0]
    (draft / metrics.ROWS_FILE).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    program.save_resolved(draft, override(run.config, {"train.updates": updates}))
    to.parent.mkdir(parents=True, exist_ok=True)
    draft.rename(to)


def shuffle(run: Run, root: Path) -> Run:
    """Trains on shuffled rewards from the run's start; returns the finished run."""
    to = root / f"{run.path.name}-shuffled"
    branch(run, to)
    if not Run.of(to).finished(Run.of(to).config.train.updates):
        print(f"{to}: running, output in {to}.out", file=sys.stderr)
        status = _runs.execute([sys.executable, "-m", "tests.bench._shuffled", str(to)], to)
        if status not in (0, 3):  # 3: its success collapsed, which is an end as well
            raise SystemExit(f"{to} ended with status {status}; the same command continues it\n{_runs.tail(to)}")
    return Run.of(to)


# ------------------------------------------------------------------------------------------------- more warm-up
def more_warmup(run: Run, root: Path, *, seconds: float) -> dict[str, Any]:
    """Supervised updates of phase 2 from the run's start for `seconds`, then the final tasks; kept in a file."""
    kept = root / f"{run.path.name}-warmup.json"
    if kept.exists():
        return json.loads(kept.read_text(encoding="utf-8"))
    import learner as learning
    import parts

    cfg, params, _ = _runs.policy_of(run, directory=_runs.START)
    config, harness = run.config, parts.harness(run.config)
    learner = learning.Learner.of(config, cfg)
    params, updates, spent = _supervise(run, params, learner=learner, seconds=seconds)
    tasks, suite = _runs.final_tasks(config), parts.suite(config)
    with _runs.served(run, params, cfg=cfg) as serving:
        done = parts.run_tasks(serving.connect, suite, tasks, harness=harness)
        grounding, _ = parts.grounding(serving.connect, harness, parts.grounding_set(config, harness))
    scored = parts.scores(done, tasks)
    told = {"success": scored["success"], "families": scored["families"], "grounding": grounding, "updates": updates,
            "seconds": spent}  # fmt: skip
    root.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(told) + "\n", encoding="utf-8")
    return told


def _supervise(run: Run, params: Any, *, learner: Any, seconds: float) -> tuple[Any, int, float]:
    """(parameters, updates, seconds) of phase 2 once more, on fresh data, its learning rate falling by the clock."""
    import jax
    import jax.numpy as jnp
    import parts
    import warmup

    from cuajax.algorithms import surrogate
    from cuajax.data.pipeline import supervised

    config, w, harness = run.config, run.config.warmup, parts.harness(run.config)
    rule = warmup.rule(config, learner.axes)
    now, train = learner.begin(params, rule), learner.train_step(surrogate.sft_loss, rule)
    make = functools.partial(_fresh, config, harness)
    batches = iter(supervised(make, spec=parts.pack_spec(harness, config, w.second_pack), seed=config.seed, prefetch=2))
    updates, began, spent = 0, time.monotonic(), 0.0
    with metrics.ProgressLine(round(seconds), label="second", shown={"updates": "updates", "loss": "nll"}) as line:
        while spent < seconds:
            share = w.second_rate + (warmup.LAST - w.second_rate) * spent / seconds
            speed = w.optimizer.learning_rate * share * min(1.0, (updates + 1) / warmup.RAMP)
            now.opt_state.hyperparams["learning_rate"] = jnp.float32(speed)
            now, report = train(now, learner.place(next(batches)[0]))
            updates += 1
            line.update(int(spent), {"updates": updates, "nll": surrogate.summary(report)["nll"]})  # waits for it
            if updates == 1:
                began = time.monotonic()  # compiling is not warm-up
            spent = time.monotonic() - began
    batches.close()
    return jax.block_until_ready(now.params), updates, spent


def _fresh(config: Settings, harness: Any, seed: int, step: int) -> Any:
    """Samples of an update that the run's own warm-up did not make."""
    import parts

    return parts.single_decisions(config, harness, phase=2, seed=seed, step=config.warmup.second_steps + step)


# --------------------------------------------------------------------------------------------------------- report
def main(argv: list[str]) -> dict:
    parser = argparse.ArgumentParser("tests.bench controls", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--run", type=Path, required=True, help="a finished run directory")
    parser.add_argument("--root", type=Path, default=Path("runs/controls"))
    parser.add_argument("--only", choices=("shuffle", "warmup"))
    parser.add_argument("--seconds", type=float, help="of more warm-up, instead of what reinforcement took")
    given = parser.parse_args(argv)
    run = Run.of(given.run)
    if run.result is None or run.start is None:
        raise SystemExit(f"{run.path} is not finished, or has no evaluation where reinforcement began")
    start, rl, seconds = run.start, run.result["final"], given.seconds or run.rl_seconds
    told: dict[str, Any] = {"start": start, "rl": rl, "rl_gain": rl - start, "rl_seconds": run.rl_seconds}
    rows = [["reinforcement", rl, rl - start, run.rl_seconds, run.result["updates"]]]
    if given.only != "warmup":
        shuffled = shuffle(run, given.root)
        assert shuffled.result is not None
        gain = shuffled.result["final"] - start
        rows.append(["rewards shuffled", start + gain, gain, shuffled.rl_seconds, shuffled.result["updates"]])
        told |= {"shuffled": start + gain, "shuffled_gain": gain, "shuffled_ok": gain <= MOST}
    if given.only != "shuffle":
        more = more_warmup(run, given.root, seconds=seconds)
        rows.append(["more warm-up", more["success"], more["success"] - start, more["seconds"], more["updates"]])
        told |= {"more_warmup": more["success"], "more_warmup_gain": more["success"] - start,
                 "more_warmup_seconds": more["seconds"], "more_warmup_updates": more["updates"],
                 "more_warmup_grounding": more["grounding"]}  # fmt: skip
    print(f"{run.path}, {run.config.eval.final_tasks} held-out tasks, greedy; {_runs.machine()}")
    title = f"from success {start:.3f}, where reinforcement began"
    metrics.print_table(title, ("then", "success", "gain", "seconds", "updates"), rows)
    if told.get("shuffled_ok") is False:
        print(f"shuffled rewards gain {told['shuffled_gain']:.3f}, at most {MOST} was expected")
    return _runs.rounded(told)
