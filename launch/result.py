"""What a finished run leaves for a person: result.json, the success curve, report.html and one table."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import parts

from cuajax import metrics, program
from cuajax.config import Settings
from cuajax.data.records import RecordError
from cuajax.data.store import Store
from cuajax.types import Task, Trajectory
from cuajax.viewer import curve, screens
from cuajax.viewer.report import FamilyScore, Report, write

SHOWN = 6  # attempts replayed in the report


def attempts(store: Store, *, head: int) -> list[tuple[Task, Trajectory]]:
    """A failed attempt from the start of the run, and successes of different families from its end."""
    chosen: list[tuple[Task, Trajectory]] = []
    told: set[tuple[str, str]] = set()

    def pick(seqs: Sequence[int], status: str, most: int) -> None:
        for seq in seqs:
            if len(chosen) >= most:
                return
            try:
                group = store.read(seq)
            except RecordError:
                continue
            for t in group.trajectories:
                if t.outcome.status == status and t.steps and (group.task.family, status) not in told:
                    told.add((group.task.family, status))
                    chosen.append((group.task, t))
                    break

    pick(range(min(head, 64)), "failure", 1)
    pick(range(head - 1, max(-1, head - 200), -1), "success", SHOWN)
    return chosen


def tell(
    run_dir: Path, config: Settings, store: Store, *, trajectories: Sequence[Trajectory], tasks: Sequence[Task],
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Writes the files, prints the table, and returns what result.json holds."""
    final = parts.scores(trajectories, tasks)
    rows = metrics.read_rows(run_dir)
    held = [(r["step"], r["eval/success"]) for r in rows if r.get("eval/success") is not None]
    before = next((r for r in rows if r["step"] == 0 and "eval/success" in r), {})
    trained = [(r["step"], r["rollout/success"]) for r in rows if r.get("rollout/success") is not None]
    start = before.get("eval/success")
    valid = [t for t in trajectories if t.outcome.status != "invalid"]
    low, high = parts.wilson(sum(t.outcome.status == "success" for t in valid), len(valid))
    result = {
        "name": config.name, "seed": config.seed, "start": start, "final": final["success"], "ci95": [low, high],
        "families": final["families"], "mean_steps": final["mean_steps"], "episodes": len(valid),
        "invalid": final["invalid"], "warmup_seconds": before.get("seconds/total"), "seconds": seconds,
        "updates": rows[-1]["step"] if rows else 0, "target": config.train.updates, "curve": held,
    }  # fmt: skip
    result |= {k: None for k, v in result.items() if isinstance(v, float) and math.isnan(v)}  # JSON has no NaN
    draft = run_dir / f".result.{os.getpid()}"
    draft.write_text(json.dumps(result, indent=2) + "\n")
    draft.replace(run_dir / "result.json")
    series = {"held-out, greedy": held, "training, sampled": trained}
    curve.png(series, run_dir / "success.png")
    shown = attempts(store, head=store.head())
    images, _ = store.try_images(screens.image_hashes(shown))
    harness = parts.harness(config)
    headline = f"{config.name}: no final evaluation"
    if valid:
        headline = f"{config.name}: {final['success']:.1%} of {len(valid)} held-out tasks, greedy"
    write(Report(
        title=f"cuajax · {config.name} · seed {config.seed}",
        headline=headline + (f", from {start:.1%} where reinforcement began" if start is not None else ""),
        facts=[("95 % interval", f"{low:.1%} to {high:.1%}"), ("decisions an attempt", f"{final['mean_steps']:.2f}"),
               ("wall clock", metrics.duration(seconds)), ("updates", str(result["updates"]))],
        curves=series,
        families=[FamilyScore(f, sum(t.family == f for t in tasks), before.get(f"eval/family/{f}"), s)
                  for f, s in final["families"].items()],
        stages=metrics.breakdown(rows), attempts=shown, images=images,
        token_text=lambda i: parts.tokenizer(harness).token(int(i)), config=program.plain(config),
    ), run_dir / "report.html")  # fmt: skip
    metrics.print_table(headline, ("family", "before", "after"), [
        *((f, before.get(f"eval/family/{f}", float("nan")), s) for f, s in final["families"].items()),
        ("all", start if start is not None else float("nan"), final["success"]),
    ])  # fmt: skip
    print(f"{metrics.duration(seconds)} in all; report: {run_dir / 'report.html'}", file=sys.stderr)
    return result


def line(values: Mapping[str, Any]) -> str:
    """One JSON line for machines."""
    return json.dumps(dict(values))
