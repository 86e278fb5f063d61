"""Whole runs over several seeds and algorithms: success before and after, worst family, minutes, disjoint tasks.

    python -m tests.bench seeds --config=configs/stepo.py --seeds=0,1,2,3,4 --root=runs/seeds [--config.KEY=VALUE ...]

Each run is launch/train.py in a process of its own, one after another, in ROOT/NAME-SEED. The same command goes on
where it stopped: finished runs stay, an unfinished one continues. The tables come from the run directories alone.
`--config` may repeat, to set algorithms side by side; a config's ARG becomes part of NAME (grpo:naive_step).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuajax import metrics, program
from cuajax.config import ConfigError
from cuajax.data.store import Store
from tests.bench import _runs
from tests.bench._runs import Run

PREEMPTED, COLLAPSED = 75, 3  # exit statuses of launch/train.py


def label(spec: str) -> str:
    """`configs/grpo.py:naive_step` -> `grpo_naive_step`."""
    name, _, arg = spec.partition(":")
    return re.sub(r"\W+", "_", f"{Path(name).stem}_{arg}").strip("_")


# ------------------------------------------------------------------------------------------------------ running
def run_all(specs: Sequence[str], seeds: Sequence[int], *, root: Path, changes: dict[str, str]) -> list[str]:
    """Runs what is not finished; returns what failed, as lines for a person. Raises ConfigError before any run."""
    loaded = {spec: program.load(spec, changes) for spec in specs}
    failed = []
    for seed in seeds:
        for spec in specs:
            run_dir = root / f"{label(spec)}-{seed}"
            if _done(run_dir, loaded[spec].train.updates):
                print(f"{run_dir}: finished before", file=sys.stderr)
                continue
            print(f"{run_dir}: running, output in {run_dir}.out", file=sys.stderr)
            words = [f"--config={spec}", *(f"--config.{k}={v}" for k, v in changes.items())]
            command = [sys.executable, str(_runs.LAUNCH / "train.py"), *words, f"--config.seed={seed}"]
            status = _runs.execute([*command, f"--workdir={run_dir}"], run_dir)
            if status == PREEMPTED:
                raise SystemExit(f"{run_dir} was stopped and saved; the same command continues it")
            if status:
                why = "collapsed" if status == COLLAPSED else f"status {status}"
                failed.append(f"{run_dir.name}: {why}")
                print(f"{failed[-1]}\n{_runs.tail(run_dir)}", file=sys.stderr)
    return failed


def _done(run_dir: Path, updates: int) -> bool:
    return (run_dir / "config.json").exists() and Run.of(run_dir).finished(updates)


# ------------------------------------------------------------------------------------------------------- tables
def facts(run: Run) -> dict[str, Any]:
    """One finished run as the table shows it."""
    import parts

    result = run.result
    assert result is not None
    suite, tasks = parts.suite(run.config), _runs.final_tasks(run.config)
    lengths = [suite.oracle_length(task) for task in tasks if task.feasible]
    worst = min(result["families"], key=lambda family: result["families"][family])
    load = [s["load"] for s in run.sessions]
    return {
        "seed": run.config.seed, "start": run.start, "final": result["final"], "ci95": result["ci95"],
        "episodes": result["episodes"], "families": result["families"], "worst_family": worst,
        "worst_family_success": result["families"][worst], "oracle_length": sum(lengths) / max(1, len(lengths)),
        "mean_steps": result["mean_steps"], "infeasible_share": sum(not t.feasible for t in tasks) / len(tasks),
        "warmup_seconds": run.warmup_seconds, "seconds": run.seconds, "updates": result["updates"],
        "cpu_seconds": sum(s["cpu_seconds"] for s in run.sessions) or None,
        "load": sum(load) / len(load) if load else None, **disjoint(run),
    }  # fmt: skip


def disjoint(run: Run) -> dict[str, Any]:
    """Evaluation start states (and instructions) against those of every training task the run's store holds."""
    import parts

    suite = parts.suite(run.config)
    held = parts.held_out(run.config, suite, run.config.eval.tasks, start=0)
    evaluated = {suite.start_hash(task) for task in [*_runs.final_tasks(run.config), *held]}
    store = Store.open(run.path / "experience")
    try:
        head = store.info()
        met, infeasible, count = set(), 0, 0
        for seq, delta in enumerate(store.deltas_from(head.first, head.seq), head.first):
            # Candidate groups have no family in their delta: there the group itself names its task.
            named = "family" in delta
            task = suite.task(delta["family"], delta["seed"]) if named else store.read(seq).task
            met.add(suite.start_hash(task))
            infeasible, count = infeasible + (not task.feasible), count + 1
    finally:
        store.close()
    return {
        "tasks_met": count, "tasks_met_distinct": len(met), "tasks_compacted_away": head.first,
        "overlap": len(met & evaluated), "infeasible_share_trained": infeasible / max(1, count),
    }  # fmt: skip


SUCCESS = ("run", "start", "final", "95 %", "worst family", "oracle", "steps")
COST = ("run", "warm-up s", "total s", "CPU s", "load", "tasks met", "overlap")


def success_cells(name: str, one: dict[str, Any]) -> list[Any]:
    low, high = one["ci95"]
    worst = f"{one['worst_family']} {one['worst_family_success']:.3f}"
    return [f"{name}-{one['seed']}", one["start"], one["final"], f"{low:.2f}..{high:.2f}", worst,
            one["oracle_length"], one["mean_steps"]]  # fmt: skip


def cost_cells(name: str, one: dict[str, Any]) -> list[Any]:
    seconds = [None if one[k] is None else round(one[k]) for k in ("warmup_seconds", "seconds", "cpu_seconds")]
    return [f"{name}-{one['seed']}", *seconds, one["load"], one["tasks_met"], one["overlap"]]


def summary(name: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The seeds of one config, together."""
    final = [one["final"] for one in found]
    families = {f: sum(one["families"][f] for one in found) / len(found) for f in found[0]["families"]}
    weakest = min(families, key=lambda family: families[family])
    loads = [one["load"] for one in found if one["load"] is not None]
    return {
        "config": name, "seeds": [one["seed"] for one in found], "start": [one["start"] for one in found],
        "final": final, "mean": sum(final) / len(final), "worst": min(final), "worst_family": weakest,
        "worst_family_mean": families[weakest], "families": families, "oracle_length": found[0]["oracle_length"],
        "infeasible_share": found[0]["infeasible_share"],
        "infeasible_share_trained": sum(one["infeasible_share_trained"] for one in found) / len(found),
        "overlap": sum(one["overlap"] for one in found), "tasks_met": [one["tasks_met"] for one in found],
        "minutes": [one["seconds"] / 60 for one in found],
        "warmup_minutes": [None if (s := one["warmup_seconds"]) is None else s / 60 for one in found],
        "cpu_minutes": [None if (s := one["cpu_seconds"]) is None else s / 60 for one in found],
        "load": sum(loads) / len(loads) if loads else None,
    }  # fmt: skip


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table as Markdown."""
    lines = [columns, ["---"] * len(columns), *([metrics.brief(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: list[str]) -> dict:
    parser = argparse.ArgumentParser("tests.bench seeds", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--config", action="append", required=True, metavar="FILE[:ARG]", help="may repeat")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--root", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--table", action="store_true", help="run nothing; tabulate the runs that are finished")
    parser.add_argument("--markdown", action="store_true", help="the tables in Markdown as well")
    given, rest = parser.parse_known_args(argv)
    seeds = [int(seed) for seed in given.seeds.split(",")]
    try:
        changes = overrides(rest)
        failed = [] if given.table else run_all(given.config, seeds, root=given.root, changes=changes)
        tables = {name: _finished(given.root, name, seeds) for name in map(label, given.config)}
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
    tables = {name: found for name, found in tables.items() if found}
    each = [(name, one) for name, found in tables.items() for one in found]
    totals = [summary(name, found) for name, found in tables.items()]
    short = ("config", "runs", "start", "mean", "worst run", "worst family", "minutes")
    overall = [[t["config"], len(t["seeds"]), _mean(t["start"]), t["mean"], t["worst"],
                f"{t['worst_family']} {t['worst_family_mean']:.3f}", _mean(t["minutes"])] for t in totals]  # fmt: skip
    shown = [("success", SUCCESS, [success_cells(*one) for one in each]),
             ("cost", COST, [cost_cells(*one) for one in each]), ("over seeds", short, overall)]  # fmt: skip
    print(_runs.machine())
    for title, columns, rows in shown:
        metrics.print_table(title, columns, rows)
    for _, columns, rows in shown if given.markdown else ():
        print(f"\n{markdown(columns, rows)}")
    if overlap := sum(t["overlap"] for t in totals):
        print(f"{overlap} training tasks start as an evaluation task does: the evaluation is not held out")
    told = {"machine": _runs.machine()} | ({"failed": failed} if failed else {})
    return _runs.rounded((totals[0] if len(totals) == 1 else {"configs": totals}) | told)


def overrides(words: Sequence[str]) -> dict[str, str]:
    """`--config.KEY=VALUE ...` by key. Raises ConfigError on anything else."""
    stray = [word for word in words if not re.match(r"--config\.[\w.]+=", word)]
    if stray:
        raise ConfigError(f"cannot read {stray[0]!r}; settings look like --config.KEY=VALUE")
    return {key: value for key, _, value in (w.removeprefix("--config.").partition("=") for w in words)}


def _finished(root: Path, name: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
    dirs = [d for seed in seeds if (d := root / f"{name}-{seed}").joinpath("result.json").exists()]
    return [facts(Run.of(run_dir)) for run_dir in dirs]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
