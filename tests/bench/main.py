"""Where a run's wall clock goes, by role, and its rates: from the metrics of a run directory or of a short fresh run.

    python -m tests.bench main [--run=DIR] [--config=FILE[:ARG]] [--skip=2] [--config.KEY=VALUE ...]

Without --run a run of --config (default configs/stepo.py:debug) is made in a temporary directory. The first --skip
updates compile and are left out. Roles are threads: learner, pipeline (packing), server (the engine). Attempts share
one event loop, so a rollout's stages are attempt-seconds: their sum over the wall clock is how many attempts live at
once. What no stage claims is idle, so a role's stages must sum to its wall clock; a role that does not is told.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuajax import metrics
from tests.bench import _runs
from tests.bench._runs import Run
from tests.bench.seeds import overrides

SLACK = 0.02  # share of the wall clock by which a role's stages may miss it
THREADS = ("learner", "pipeline", "server")
Row = dict[str, Any]


def walls(rows: Sequence[Row]) -> float:
    """Seconds the rows cover: each tells its own window."""
    return sum(1.0 / row["rate/updates"] for row in rows)


def stages(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Seconds by role and stage. Packing runs in a thread of its own, whose only claim is data/pack_s."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for role, stage, seconds, _ in metrics.breakdown(rows):
        if role != "total":
            found[role][stage] = seconds
    packing = total(rows, "data/pack_s")
    found["pipeline"] = {"pack": packing, "idle": walls(rows) - packing}
    if "rollout" in found:  # attempts, not a thread: what the loop does not claim is no one's idleness
        found["rollout"].pop("idle", None)
    return dict(found)


def total(rows: Sequence[Row], name: str) -> float:
    return float(sum(row.get(name) or 0.0 for row in rows))


def rates(rows: Sequence[Row]) -> dict[str, float]:
    """What was done a second, what was thrown away, and what packing saved."""
    wall, read = walls(rows), max(1.0, total(rows, "data/read"))
    plain = max(1.0, total(rows, "pack/tokens_plain"))
    return {
        "updates_per_s": len(rows) / wall, "decisions_per_s": total(rows, "rollout/decisions") / wall,
        "attempts_per_s": total(rows, "rollout/attempts") / wall,
        "tokens_per_s": sum(row["rate/tokens"] / row["rate/updates"] for row in rows) / wall,
        "groups_read": read, "aged": total(rows, "data/aged"), "zero_variance": total(rows, "data/zero_variance"),
        "aged_share": total(rows, "data/aged") / read, "zero_variance_share": total(rows, "data/zero_variance") / read,
        "invalid_attempts": total(rows, "rollout/invalid"), "staleness": total(rows, "rollout/staleness") / len(rows),
        "packing_saving": 1.0 - total(rows, "pack/tokens") / plain, "fill": total(rows, "pack/fill") / len(rows),
        "deduplicated_share": total(rows, "serving/deduplicated") / max(1.0, total(rows, "serving/requests")),
    }  # fmt: skip


def unbalanced(found: dict[str, dict[str, float]], wall: float) -> dict[str, float]:
    """Threads whose stages do not sum to the wall clock, and what share of it they sum to."""
    shares = {role: sum(found[role].values()) / wall for role in THREADS if role in found}
    return {role: share for role, share in shares.items() if abs(share - 1.0) > SLACK}


def main(argv: list[str]) -> dict:
    parser = argparse.ArgumentParser("tests.bench main", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--run", type=Path, help="a run directory; without one a short run is made")
    parser.add_argument("--config", default="configs/stepo.py:debug", help="of the run that is made")
    parser.add_argument("--skip", type=int, default=2, help="first updates to leave out: they compile")
    given, rest = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = given.run or Path(scratch) / "run"
        if given.run is None:
            words = [f"--config={given.config}", *(f"--config.{k}={v}" for k, v in overrides(rest).items())]
            program = [sys.executable, str(_runs.LAUNCH / "train.py"), *words, f"--workdir={run_dir}"]
            if status := _runs.execute(program, run_dir):
                raise SystemExit(f"the run ended with status {status}:\n{_runs.tail(run_dir)}")
        run = Run.of(run_dir)
    rows = run.updates[given.skip :]
    if not rows:
        raise SystemExit(f"{run_dir} has {len(run.updates)} updates, --skip={given.skip} leaves none")
    return report(run, rows)


def report(run: Run, rows: Sequence[Row]) -> dict[str, Any]:
    """Prints the tables; returns the JSON."""
    wall, found, done = walls(rows), stages(rows), rates(rows)
    print(f"{run.path}: {len(rows)} updates in {metrics.duration(wall)}; {_runs.machine()}")
    table = [
        (role, stage, seconds, f"{seconds / wall:.1%}") for role, s in found.items() for stage, seconds in s.items()
    ]
    table += [(role, "all", sum(s.values()), f"{sum(s.values()) / wall:.1%}") for role, s in found.items()]
    order = {role: place for place, role in enumerate(found)}
    table.sort(key=lambda line: (order[line[0]], line[1] == "all"))
    metrics.print_table("where the wall clock goes", ("role", "stage", "seconds", "of the wall clock"), table)
    metrics.print_table("rates", ("what", "value"), done.items())
    wrong = unbalanced(found, wall)
    for role, share in wrong.items():
        print(f"{role}: its stages sum to {share:.1%} of the wall clock; the books do not balance")
    shares = {role: {stage: seconds / wall for stage, seconds in s.items()} for role, s in found.items()}
    warm = run.warmup_seconds
    return _runs.rounded({"wall_s": wall, "updates": len(rows), **done, "shares": shares, "balanced": not wrong,
                          "unbalanced": wrong, "warmup_s": warm, "total_s": run.seconds})  # fmt: skip
